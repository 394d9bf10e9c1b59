"""A case from end to end, on a clock that counts its own readings: nothing here depends on how fast the machine is."""

from __future__ import annotations

import itertools
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.bench.measure import Measured, Method, measure
from normkit.bench.peers import (
    CompiledFormula,
    Copy,
    CopyAgain,
    Formula,
    Normkit,
    NormkitInto,
    Peer,
    Prepared,
    TorchRMSNorm,
)
from normkit.bench.shapes import OPS, PASSES, Case, Inputs, Shape
from rows import always

SHAPE = Shape((5, 40))
BASE: tuple[Peer, ...] = (Copy(), CopyAgain(), NormkitInto(), Normkit())


def method() -> Method:
    ticks = itertools.count()
    return Method(rounds=3, least=1.0, clock=lambda: float(next(ticks)))  # a sample lasts one tick


def forget_weight(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Forgetful(Peer):
    name = "forgetful"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        return Prepared(partial(forget_weight, inputs.x))


class Lazy(Peer):
    """Claims to have written an output that it never touches."""

    name = "lazy"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        return Prepared(lambda: None, (torch.full_like(inputs.y, torch.nan),))


class Broken(Peer):
    name = "broken"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        raise RuntimeError("no compiler\nsecond line")


def test_a_wrong_contender_is_not_timed_and_a_broken_one_stops_nobody() -> None:
    case = Case("rms", "forward", SHAPE, "float32")
    found = measure(case, (*BASE, Forgetful(), Lazy(), Broken(), TorchRMSNorm()), method())
    assert set(found.samples) == {"copy", "copy again", "normkit, out=", "normkit", "nn.RMSNorm"}
    assert "wrong, not timed: y" in found.failed["forgetful"]
    assert "wrong, not timed: y is off by inf" in found.failed["lazy"]
    assert found.failed["broken"] == "failed: RuntimeError: no compiler"


def test_a_wrong_gradient_is_found_too() -> None:
    class Detached(Peer):
        name = "detached"

        def prepare(self, case: Case, inputs: Inputs) -> Prepared:
            def call() -> Tensor:
                x = inputs.x
                root = torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-6)
                return x * root * inputs.weight

            return Prepared(call)

    forward = measure(Case("rms", "forward", SHAPE, "float32"), (*BASE, Detached()), method())
    assert "detached" in forward.samples
    step = measure(Case("rms", "step", SHAPE, "float32"), (*BASE, Detached()), method())
    assert "wrong, not timed: dx" in step.failed["detached"]


@pytest.mark.parametrize("which", always(PASSES, lambda which: which == "step"))
@pytest.mark.parametrize("op", OPS)
def test_every_pass_of_every_operator_is_timed(op: str, which: str) -> None:
    found = measure(Case(op, which, SHAPE, "bfloat16"), (*BASE, Formula()), method())
    assert found.failed == {}
    assert {"copy", "normkit", "HF formula, eager"} <= set(found.samples)
    assert all(len(s.seconds) == 3 for s in found.samples.values())
    assert ("normkit, out=" in found.samples) == (which == "forward")


def test_memory_given_by_address_lives_as_long_as_its_calls() -> None:
    alive: list[bool] = []

    class Foreign(Peer):
        name = "foreign"

        def prepare(self, case: Case, inputs: Inputs) -> Prepared:
            y = F.rms_norm(inputs.x.detach(), (case.shape.width,), inputs.weight, 1e-6)
            held = weakref.ref(y)
            return Prepared(lambda: alive.append(held() is not None), (y,))

    assert measure(Case("rms", "forward", SHAPE, "float32"), (*BASE, Foreign()), method()).failed == {}
    assert len(alive) > 3
    assert all(alive)


def test_modes_and_gradients_are_left_as_they_were() -> None:
    with torch.no_grad():
        measure(Case("rms", "step", SHAPE, "float32"), BASE, method())
        assert not torch.is_grad_enabled()


def test_shares_are_of_the_copys_bandwidth() -> None:
    found: Measured = measure(Case("rms", "forward", SHAPE, "float32"), BASE, method())
    # Every sample lasts one tick on this clock, so the share is the ratio of the bytes.
    assert found.share("normkit").median == pytest.approx(found.case.moved / found.case.copied)
    assert found.share("copy").median == 1


@pytest.mark.slow
@pytest.mark.parametrize("which", PASSES)
def test_the_compiled_formula_competes(which: str) -> None:
    """Slow for its C++ compiler only."""
    found = measure(Case("layer", which, SHAPE, "bfloat16"), (*BASE, CompiledFormula()), method())
    assert found.failed == {}
    assert "HF formula, compiled" in found.samples
