"""Devices that are not there are refused with a remedy; a GPU's clock waits for the GPU."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from normkit.bench import device as device_module
from normkit.bench.device import bytes_for_graphs, check_device, clock_of, least_of
from normkit.bench.timing import Contender, interleave
from normkit.cli import app


def pretend(
    monkeypatch: pytest.MonkeyPatch, *, built: bool = True, available: bool = True, count: int = 1
) -> list[int]:
    """Let PyTorch say that it has so many GPUs; return what becomes the current one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0" if built else None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(device_module, "find_spec", lambda name: object())
    return chosen


@pytest.mark.parametrize(
    ("name", "built", "available", "remedy"),
    [
        ("tpu", True, True, "expected cpu, cuda or cuda:1"),
        ("cuda:x", True, True, "expected cpu, cuda or cuda:1"),
        ("cuda", False, False, "install a build for CUDA"),
        ("cuda", True, False, "nvidia-smi"),
        ("cuda:3", True, True, "finds 1 GPU; take cuda:0"),
    ],
)
def test_a_device_that_is_not_there_is_one_line_and_2(
    monkeypatch: pytest.MonkeyPatch, name: str, built: bool, available: bool, remedy: str
) -> None:
    pretend(monkeypatch, built=built, available=available)
    found = CliRunner().invoke(app, ["bench", "--device", name])
    assert found.exit_code == 2
    assert found.stdout == ""
    assert remedy in found.stderr
    assert f"--device {name}".split(":")[0] in found.stderr.replace("'", "")
    assert len(found.stderr.splitlines()) == 1


def test_triton_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(device_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install triton"):
        check_device("cuda")


def test_the_device_is_named_with_its_number_and_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = pretend(monkeypatch, count=2)
    assert check_device("cuda") == "cuda:0"
    assert check_device("cuda:1") == "cuda:1"
    assert chosen == [0, 1]
    assert check_device("cpu") == "cpu"


def test_a_sample_waits_for_the_device_before_and_after_and_never_between(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"wait {device}"))
    clock = clock_of("cuda:1")
    interleave([Contender("a", lambda: done.append("call"))], rounds=4, seed=0, least=0.0, clock=clock)
    assert done[-3:] == ["wait cuda:1", "call", "wait cuda:1"]
    done.clear()
    monkeypatch.setattr(device_module, "time", Ticking())
    interleave([Contender("a", lambda: done.append("call"))], rounds=1, seed=0, least=7.0, clock=clock_of("cuda:0"))
    assert done[-10:] == ["wait cuda:0", *["call"] * 8, "wait cuda:0"]


class Ticking:
    """A clock that advances by as much as was called since it was read: 1 to start with, then 2, 4, 8."""

    def __init__(self) -> None:
        self.now, self.reads = 0.0, 0

    def perf_counter(self) -> float:
        self.reads += 1
        if self.reads > 2 and self.reads % 2 == 0:
            self.now += 2 ** min(self.reads // 2 - 2, 3)
        return self.now


def test_memory_for_graphs_follows_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 8 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert bytes_for_graphs("cuda:0") == 2 << 30
    assert bytes_for_graphs("cpu") == 4 << 30
    assert least_of("cuda") > least_of("cpu")
