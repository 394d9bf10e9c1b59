"""Group norms after `swap_`: the kernels over positions compute them, in the dtypes where that is no less accurate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.ops import positions


@pytest.mark.parametrize("affine", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("groups", "channels"), [(4, 20), pytest.param(3, 12, marks=pytest.mark.slow)])
def test_group_norm(monkeypatch: pytest.MonkeyPatch, groups: int, channels: int, affine: bool) -> None:
    module = nn.GroupNorm(groups, channels, eps=1e-3, affine=affine).bfloat16()
    generator = torch.Generator().manual_seed(groups)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    x = torch.randn(3, channels, 9, 7, generator=generator).bfloat16()[..., ::2].requires_grad_()
    own = module(x)
    upstream = torch.randn(own.shape, generator=generator).bfloat16()
    gradients = torch.autograd.grad(own, [x, *module.parameters()], upstream)
    exact = [x.detach().double().requires_grad_(), *(p.detach().double().requires_grad_() for p in module.parameters())]
    y = nn.functional.group_norm(exact[0], groups, *exact[1:], eps=1e-3)
    base = torch.autograd.grad(y, exact, upstream.double())
    calls: list[tuple[int, ...]] = []
    through = positions.normalize

    def counted(x: Tensor, *rest: object) -> object:
        calls.append(tuple(x.shape))
        return through(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(positions, "normalize", counted)
    report = nk.swap_(module)
    calls.clear()  # those of the proof
    assert [entry.kernel.split(", ")[-1] for entry in report.accepted] == ["cpu"], str(report)
    swapped = module(x)
    assert calls == [(3, channels, 9, 4)]
    assert swapped.dtype == own.dtype
    assert float((swapped == own).double().mean()) > 0.99
    ours = torch.autograd.grad(swapped, [x, *module.parameters()], upstream)
    for mine, theirs, right in zip(ours, gradients, base, strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine - right).norm()) <= 1.1 * float((theirs - right).norm())


def test_other_shapes_are_the_modules_own() -> None:
    module = nn.GroupNorm(4, 20).bfloat16()
    x = torch.randn(3, 20).bfloat16()
    expected = module(x)
    with nk.swap_(module) as report:
        assert report.accepted
        assert torch.equal(module(x), expected)
