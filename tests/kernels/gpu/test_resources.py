"""The compiled kernels: wide loads, no spills, float32 arithmetic, IEEE roots, x read once where a tile holds it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import normkit as nk
from compiled import WIDE_LOAD, WIDE_STORE, check_arithmetic
from rows import always

KINDS = {"rms": nk.TORCH_RMS_NORM, "layer": nk.TORCH_LAYER_NORM}
BF, F = torch.bfloat16, torch.float32


def forward(width: int, dtype: torch.dtype, spec: nk.NormSpec, keep: bool = True) -> Callable[[], object]:
    from normkit.kernels.gpu import rows

    x, w = torch.empty(64, width, dtype=dtype), torch.empty(width, dtype=dtype)
    return lambda: rows.forward(x, spec, w, w if spec.centered else None, axes=(1,), eps=1e-6, keep=keep)


def backward(width: int, dtype: torch.dtype, spec: nk.NormSpec) -> Callable[[], object]:
    from normkit.kernels.gpu import row_backward, rows

    x, w = torch.empty(64, width, dtype=dtype), torch.empty(width, dtype=dtype)
    kept = rows.new_statistics(spec, 64, x.device)
    b, wanted = (w, (True, True, True)) if spec.centered else (None, (True, True, False))
    return lambda: row_backward.backward(x, spec, w, b, x, kept, axes=(1,), wanted=wanted)


# The widest that one program holds, forward and backward, and one that none does: each at its limit of registers.
CASES = [
    (phase, width, kind, dtype, capability)
    for phase, widths in (("forward", (128, 4096, 16384, 65536)), ("backward", (128, 4096, 8192, 65536)))
    for width in widths
    for kind in KINDS
    for dtype in (BF, F)
    for capability in (90, 100)
]


def chosen(case: tuple[str, int, str, torch.dtype, int]) -> bool:
    _, width, kind, dtype, capability = case
    return kind == "layer" and (dtype == F) == (width != 4096) and (capability == 90) == (width != 128)


@pytest.mark.parametrize(("phase", "width", "kind", "dtype", "capability"), always(CASES, chosen))
def test_nothing_spills_and_nothing_is_approximate(
    phase: str, width: int, kind: str, dtype: torch.dtype, capability: int
):
    from normkit.kernels.gpu import resources

    make = forward if phase == "forward" else backward
    for used in resources.of(make(width, dtype, KINDS[kind]), capability):
        name = f"{used.kernel} at {width}"
        assert used.local_bytes == used.stack_bytes == 0, name
        assert used.registers <= 65536 // (32 * used.warps), name
        assert used.count(WIDE_LOAD), name
        check_arithmetic(used, name)
        if phase == "forward" and used.kernel != "chunk_moments":
            assert used.count(r"sqrt\.rn\.f32"), name
            assert used.count(r"div\.(full|rn)\.f32"), name
        if used.kernel not in ("fold_partials", "row_sums", "chunk_moments"):
            assert used.count(WIDE_STORE), name


READ_ONCE = [(128, BF), (4096, BF), (5120, F), (16384, F)]


@pytest.mark.parametrize(("width", "dtype"), always(READ_ONCE, lambda case: case[0] < 5000))
def test_the_forward_reads_x_once(width: int, dtype: torch.dtype):
    """Every wide load of a program is a part of its tile of x or of the weights: there is no second reading."""
    from normkit.kernels.gpu import resources
    from normkit.kernels.gpu.settings import forward_setting

    setting = forward_setting(width)
    [used] = resources.of(forward(width, dtype, nk.TORCH_RMS_NORM, keep=False))
    a_load = 16 * 32 * setting.warps
    of_x = setting.rows * setting.block * dtype.itemsize / a_load
    of_w = setting.block * dtype.itemsize / a_load  # or less than one, which is loaded narrow and handed round
    assert used.count(WIDE_LOAD) == of_x + math.floor(of_w)
    assert used.count(r"ld\.global") == of_x + math.ceil(of_w)
    assert used.count(WIDE_STORE) == used.count(r"st\.global") == of_x


def test_a_spill_would_show():
    """Twice the widest tile without the warps for it: the report that the tests read says so."""
    from normkit.kernels.gpu import resources

    launch = resources.launches(forward(16384, F, nk.TORCH_LAYER_NORM))[0]
    narrow = resources.Launch(
        launch.kernel, launch.constants, launch.warps // 4, launch.ctas, launch.grid, launch.arguments
    )
    assert resources.compiled(narrow, 90).stack_bytes > 0
