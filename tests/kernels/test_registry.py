"""Choosing a kernel gives a decision with its reason."""

import pytest
import torch

import normkit as nk
from normkit.kernels import reference, registry
from normkit.kernels.registry import REFERENCE, Kernel, Request, choose
from rows import randn

REQUEST = Request(nk.LLAMA, torch.zeros(2, 4), (1,), False)


def test_the_reference_takes_everything():
    decision = choose(REQUEST)
    assert decision.kernel is REFERENCE
    assert decision.rejected == ()
    assert "every request" in decision.reason


def test_the_first_kernel_that_does_not_refuse_is_taken(monkeypatch: pytest.MonkeyPatch):
    calls: list[torch.dtype] = []

    def double(x: torch.Tensor, *args: object, **rest: object) -> torch.Tensor:
        calls.append(x.dtype)
        return 2 * reference.normalize(x, *args, **rest)  # type: ignore[arg-type]

    never = Kernel("never", lambda request: "takes nothing", double)
    halves = Kernel("halves", lambda r: None if r.x.dtype == torch.bfloat16 else "bfloat16 only", double)
    monkeypatch.setattr(registry, "_kernels", [never, halves, REFERENCE])
    decision = choose(REQUEST)
    assert decision.kernel is REFERENCE
    assert decision.rejected == (("never", "takes nothing"), ("halves", "bfloat16 only"))
    x = randn(2, 4)
    assert torch.equal(
        nk.rms_norm(x), registry.REFERENCE.normalize(x, nk.TORCH_RMS_NORM, None, None, axes=(1,), eps=1e-6)
    )
    assert not calls
    nk.rms_norm(x.bfloat16())
    assert calls == [torch.bfloat16]


def test_a_request_tells_a_kernel_of_a_mask(monkeypatch: pytest.MonkeyPatch):
    seen: list[Request] = []

    def look(request: Request) -> str:
        seen.append(request)
        return "only looking"

    monkeypatch.setattr(registry, "_kernels", [Kernel("look", look, reference.normalize), REFERENCE])
    x = randn(2, 4)
    registry.normalize(x, nk.TORCH_RMS_NORM, axes=(1,), eps=0.0, mask=torch.ones(2, 1, dtype=torch.bool))
    registry.normalize(x, nk.TORCH_RMS_NORM, axes=(0,), eps=0.0)
    assert [(r.masked, r.axes, r.spec) for r in seen] == [
        (True, (1,), nk.TORCH_RMS_NORM),
        (False, (0,), nk.TORCH_RMS_NORM),
    ]
