"""`benchmarks/gpu_resources.py`: what it says that a design moves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import normkit as nk

PATH = Path(__file__).parents[3] / "benchmarks" / "gpu_resources.py"


@pytest.fixture
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_resources", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_resources"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("clusters", "forward", "backward"), [("0", 3 / 2, 5 / 3), ("1", 1, 1)])
def test_a_row_that_a_cluster_holds_is_read_once(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, clusters: str, forward: float, backward: float
):
    """65536 columns: x three times or twice, x and dy and dx five times or three, and a cluster shares the tile."""
    from normkit.kernels.gpu.launch import clusters_on

    monkeypatch.setenv("NORMKIT_GPU_CLUSTERS", clusters)
    clusters_on.cache_clear()
    try:
        moved, tile = report.design("forward", 65536, torch.bfloat16, nk.TORCH_RMS_NORM)
        assert moved == pytest.approx(forward, rel=1e-2)
        assert tile == 2 * (16384 if clusters == "1" else 4096)
        moved, tile = report.design("backward", 65536, torch.bfloat16, nk.TORCH_RMS_NORM)
        assert moved == pytest.approx(backward, rel=1e-2)
        assert tile == 2 * 2 * (8192 if clusters == "1" else 2048)
    finally:
        clusters_on.cache_clear()
