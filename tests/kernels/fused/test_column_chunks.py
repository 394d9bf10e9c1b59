"""Chunks of the column kernels: of many tiles, of groups deeper than a tile, of more samples than are added in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from columns import Case
from fused import INTERPRETED
from rows import quick, randn

LAYOUTS = pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of few elements and at most three chunks, so that a chunk has several tiles; the CPU's stay as they are."""
    if not INTERPRETED:
        yield
        return
    from normkit.kernels.gpu import column_settings

    for name, value in {"MOMENTS_TILE": 64, "GRADIENT_TILE": 32, "LIMIT": 3, "ACROSS": 4, "ALONG": 16}.items():
        monkeypatch.setattr(column_settings, name, value)
    settings = (column_settings.sums_setting, column_settings.apply_tile)
    for setting in settings:
        setting.cache_clear()
    yield
    for setting in settings:
        setting.cache_clear()


@LAYOUTS
@pytest.mark.parametrize("norm", quick(["batch", "instance", 2, 1], lambda norm: norm == 2))
@pytest.mark.usefixtures("small_tiles")
def test_chunks_of_several_tiles(norm: str | int, first: bool):
    case = Case.draw(norm, 2, 37, 6)
    case.check(case.run(first))
    case = case.masked()
    want = case.run(first)
    case.check(want)
    x, dy = torch.full((2, 70, 6), torch.nan), torch.full((2, 70, 6), torch.nan)
    mask = torch.zeros(2, 70, dtype=torch.bool)
    x[:, 25:62], dy[:, 25:62], mask[:, 25:62] = case.x, case.dy, case.mask  # type: ignore[assignment]
    got = replace(case, x=x, dy=dy, mask=mask).run(first)
    for a, b in zip([got[0][:, 25:62], got[1][:, 25:62], *got[2:]], want, strict=True):
        assert torch.equal(a, b)


def halves(length: int, before: float, after: float) -> Tensor:
    """Return a factor for each position, (length, 1)."""
    return torch.where(torch.arange(length) < length // 2, before, after).unsqueeze(1)


@LAYOUTS
@pytest.mark.parametrize("norm", ["batch", 2])
@pytest.mark.parametrize(
    "kind",
    quick(["means", "large", "small", "tiny"], lambda kind: kind == "means"),
)
@pytest.mark.usefixtures("small_tiles")
def test_chunks_of_different_size(kind: str, norm: str | int, first: bool):
    """Squares that only a chunk, or only the whole, cannot hold; scales are exact, so the bound is as ever."""
    case, z = replace(Case.draw(norm, 2, 50, 4), eps=0.0), randn(2, 50, 4)
    x = {
        "means": z * 1e20 + halves(50, 1e25, -1e25),
        "large": z * halves(50, 1.0, 1e30),
        "small": z * halves(50, 1e-30, 1.0),
        "tiny": z * halves(50, 1e-30, 1e-33),
    }[kind]
    case = replace(case, x=x)
    case.check(case.run(first))


@LAYOUTS
def test_a_group_deeper_than_a_tile(first: bool):
    case = Case.draw(2, 1, 9, 134)
    case.check(case.run(first))


@pytest.mark.parametrize("samples", quick([70], lambda samples: False))
def test_more_samples_than_are_added_in_turn(samples: int):
    case = Case.draw("instance", samples, 2, 3).masked(0.8)
    case.check(case.run(True))


@pytest.mark.usefixtures("small_tiles")
def test_joining_extreme_channels_changes_no_bit_of_another():
    case = replace(Case.draw("batch", 1, 30, 4), eps=1e-12)
    case.x[..., 3] *= 1e-41  # whose mean over several chunks would be another, were they multiplied by a power of two
    plain = case.run()
    x = case.x.clone()
    x[..., 2] *= 1e25
    for got, want in zip(replace(case, x=x).run(), plain, strict=True):
        assert torch.equal(got[..., [0, 1, 3]], want[..., [0, 1, 3]])
