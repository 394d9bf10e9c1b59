"""The compiled kernels of norms across positions: what is read in pieces of 16 bytes, no spills, sums in one order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compiled import WIDE_LOAD, WIDE_STORE, check_arithmetic
from rows import always

BF, F = torch.bfloat16, torch.float32
CHANNELS = 256
GROUPS = {"batch": CHANNELS, "instance": CHANNELS, "group": 32, "odd group": 16, "wide group": 2}
# Channels of a group: 8 and 16 fill their tile and 128 two of them; of 12 a fourth of the columns lie idle.
READ = {"chunk_moments": 3, "chunk_sums": 2, "apply": 1, "gradient": 2}  # how often a tile of x or dy is read
WRITTEN = ("apply", "gradient")


def call(norm: str, runs: bool, masked: bool, dtype: torch.dtype, length: int = 56 * 56) -> Callable[[], object]:
    """Return a forward and a backward; ``runs``: positions side by side."""
    from normkit.kernels.gpu import positions

    channels = 192 if norm == "odd group" else CHANNELS
    channel, shape = (1, (8, channels, length)) if runs else (2, (8, length, channels))
    x, w = torch.empty(shape, dtype=dtype), torch.empty(channels)
    mask = torch.empty(shape, dtype=torch.bool).narrow(channel, 0, 1) if masked else None
    how = {"channel": channel, "groups": GROUPS[norm], "per_sample": norm != "batch", "eps": 1e-5, "mask": mask}

    def run() -> None:
        _, table, plan, _ = positions.forward(x, w, w, **how)
        positions.backward(x, w, x, table, plan, wanted=(True, True, True))

    return run


CASES = [
    (norm, runs, masked, dtype, capability)
    for norm in GROUPS
    for runs in (False, True)
    for masked in (False, True)
    for dtype, capability in ((BF, 90), (F, 100))
]
ALWAYS = [("batch", True, False, BF, 90), ("group", False, True, F, 100), ("instance", True, True, BF, 90)]


def wide_reads(norm: str, runs: bool, masked: bool, kernel: str) -> bool:
    """Say whether x is read in pieces of 16 bytes.

    Positions out of a list lie anywhere. A tile's columns for groups of 12 channels begin at multiples of 24 bytes.
    """
    sums = kernel in ("chunk_moments", "chunk_sums")
    if runs:
        return not (sums and masked)
    return not (sums and norm == "odd group")


@pytest.mark.parametrize(("norm", "runs", "masked", "dtype", "capability"), always(CASES, ALWAYS.__contains__))
def test_x_is_read_in_wide_pieces_and_nothing_spills(
    norm: str, runs: bool, masked: bool, dtype: torch.dtype, capability: int
):
    from normkit.kernels.gpu import resources

    for used in resources.of(call(norm, runs, masked, dtype), capability):
        # Up to four numbers that are wanted at the end are put aside while a chunk is summed, and fetched once.
        aside = 16 if used.kernel in ("chunk_moments", "chunk_sums", "join_channels") else 0
        assert used.local_bytes + used.stack_bytes <= aside, used.kernel
        tile = 4096 * dtype.itemsize // (16 * 32 * used.warps)  # in wide loads of a thread
        if used.kernel in READ and wide_reads(norm, runs, masked, used.kernel):
            assert used.count(WIDE_LOAD) >= READ[used.kernel] * tile, used.kernel
            if dtype == BF:  # everything else is float32
                assert not used.count(r"ld\.global\S*\.b16"), used.kernel
        if used.kernel in WRITTEN:
            assert used.count(WIDE_STORE) == used.count(r"st\.global") == tile, used.kernel
        check_arithmetic(used, used.kernel)
        assert bool(used.sums()) == (used.kernel not in (*WRITTEN, "list_valid")), used.kernel


@pytest.mark.parametrize(("masked", "momentum"), [(False, 0.1), (True, 0.0)])
def test_running_statistics_move_in_float64(masked: bool, momentum: float):
    from normkit.kernels.gpu import positions, resources

    x, mask = torch.empty(8, 300, 96), torch.empty(8, 300, 1, dtype=torch.bool) if masked else None

    def run() -> None:
        found = positions.forward(x, None, None, channel=2, groups=96, per_sample=False, eps=1e-5, mask=mask)[3]
        assert found.move(torch.empty(96), torch.empty(96), momentum)

    (used,) = (u for u in resources.of(run) if u.kernel == "remember")
    assert used.local_bytes + used.stack_bytes == 0
    assert used.count(r"div\.rn\.f64")
    assert not used.count(r"(fma|mad)\.\S*f64")
