import json
import os
from typing import Any

import pytest
import torch

from normkit import environment
from normkit.environment import cpu_model, describe, lines, usable_cores


def test_it_names_what_a_report_of_a_fault_needs_and_is_json():
    facts = json.loads(json.dumps(describe(), allow_nan=False))
    assert facts["torch"] == torch.__version__
    assert facts["cores"] == usable_cores() >= 1
    assert facts["memory_bytes"] > 2**28
    assert facts["cpu"] == cpu_model() != ""
    assert any("OpenMP" in line for line in facts["blas"])
    assert facts["calibration"]["matmul_gflops"] > 0
    assert facts["calibration"]["copy_gb_per_s"] > 0
    assert "calibration" not in describe(calibrate=False)


def test_an_odd_system_loses_facts_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> Any:
        raise OSError("not here")

    monkeypatch.setattr(environment, "_read", lambda path: "")
    monkeypatch.setattr(environment, "_calibration", refuse)
    monkeypatch.setattr(os, "sysconf", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    facts = describe()
    assert facts["memory_bytes"] is None
    assert facts["gpus"] is None
    assert facts["calibration"] is None
    assert facts["cpu_flags"] == []
    assert facts["torch"]
    assert any(line.startswith("gpus ") and line.endswith("unknown") for line in lines(facts))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"/sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"/sys/fs/cgroup/cpu.max": "what is this"}, 8),
        ({}, 8),
    ],
)
def test_a_containers_quota_counts(files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(environment, "_read", lambda path: files.get(path, ""))
    assert usable_cores() == cores


def test_the_flags_that_matter_are_picked_from_the_systems_list(monkeypatch: pytest.MonkeyPatch):
    text = "model name\t: Some CPU @ 3 GHz\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n"
    monkeypatch.setattr(environment, "_read", lambda path: text)
    assert cpu_model() == "Some CPU @ 3 GHz"
    assert describe(calibrate=False)["cpu_flags"] == ["avx2", "avx512f", "avx512_bf16", "amx_bf16"]
