"""Running statistics move in a kernel, to the bits of operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from columns import Case
from fused import INTERPRETED
from normkit.functional.positions import move_running, remember
from normkit.kernels.contract import Found
from rows import randn


def found_of(case: Case) -> Found:
    """Return the moments behind the statistics of a batch, as a kernel found them."""
    if INTERPRETED:
        from normkit.kernels.gpu.positions import forward
    else:
        from normkit.kernels.cpu.positions import forward
    channels, mask = case.x.shape[2], None if case.mask is None else case.mask.unsqueeze(2)
    found: Found = forward(case.x, None, None, channel=2, groups=channels, per_sample=False, eps=1e-5, mask=mask)[3]
    return found


@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, 1 / 3])
@pytest.mark.parametrize(("shape", "masked"), [((4, 9, 5), False), ((3, 200, 34), True), ((2, 1, 16), False)])
def test_running_statistics_move_as_operators_move_them(shape: tuple[int, int, int], masked: bool, momentum: float):
    case = Case.draw("batch", *shape)
    case = case.masked() if masked else case
    found = found_of(case)
    got, want = ([randn(shape[2], seed=7), randn(shape[2], seed=8) ** 2] for _ in range(2))
    versions = [t._version for t in got]
    assert found.move(*got, momentum)
    move_running(*want, found.moments(), momentum)
    assert all(map(torch.equal, got, want))
    assert all(t._version > before for t, before in zip(got, versions, strict=True))


@pytest.mark.parametrize("kind", ["strided", "half", "one for both", "overlapping", "negated"])
def test_what_the_kernel_cannot_move_it_leaves(kind: str):
    found = found_of(Case.draw("batch", 4, 9, 5))
    mean, var = torch.zeros(5), torch.ones(5)
    if kind == "strided":
        mean = torch.zeros(5, 2)[:, 0]
    if kind == "half":
        var = var.half()
    if kind == "one for both":
        var = mean
    if kind == "overlapping":
        both = torch.arange(8.0)
        mean, var = both[:5], both[3:]
    if kind == "negated":
        mean = torch._neg_view(torch.ones(5))
    before = mean.clone(), var.clone()
    assert not found.move(mean, var, 0.5)
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])


def test_those_of_a_rescaled_batch_move_too():
    """On a CPU by operators, as there a kernel has no float64; the caller sees the same."""
    case = Case.draw("batch", 4, 9, 5)
    case = replace(case, x=case.x * torch.tensor([1.0, 1e18, 1e-30, 1.0, 1e19]))
    found = found_of(case)
    got, want = ([torch.zeros(5), torch.ones(5)] for _ in range(2))
    remember(*got, found, 0.25)
    move_running(*want, found.moments(), 0.25)
    assert all(map(torch.equal, got, want))
    assert got[1].isfinite().all()


def test_moments_keep_no_more_than_themselves():
    found = found_of(Case.draw("batch", 40, 90, 5)).moments()
    assert max(t.untyped_storage().nbytes() for t in (found.count, found.mean, found.m2, found.remainder)) <= 8 * 5 * 4
