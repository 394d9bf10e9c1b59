"""One case from its tensors to its ratios: prepare the contenders, refuse wrong ones, time the rest together."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normkit.bench.device import bytes_for_graphs
from normkit.bench.peer import Peer, Prepared
from normkit.bench.peers import GIVEN, Copy, CopyAgain, Normkit, NormkitInto
from normkit.bench.ratios import Noise, Ratio, noise_of, paired
from normkit.bench.shapes import Case, Inputs, make_inputs
from normkit.bench.timing import MOST_CALLS, SAMPLE, Clock, Contender, Samples, interleave
from normkit.bench.truth import Truth, truth_of, worst

PLANES_OF_A_GRAPH = 4  # tensors of x's size that a forward leaves for its backward: y, and what compilers keep


@dataclass(frozen=True)
class Method:
    """How times are taken."""

    rounds: int = 21
    seed: int = 0
    least: float = SAMPLE
    clock: Clock = time.perf_counter


@dataclass(frozen=True)
class Measured:
    """A case with the samples of those that were timed and the reasons of those that were not.

    ``errors`` holds the largest error of each against float64, in units of what is allowed.
    """

    case: Case
    samples: Mapping[str, Samples]
    absent: Mapping[str, str]
    failed: Mapping[str, str]
    errors: Mapping[str, float]

    @property
    def noise(self) -> Noise:
        """Judge the machine while this case was timed."""
        return noise_of(self.samples[Copy.name].seconds, self.samples[CopyAgain.name].seconds)

    def base(self, name: str) -> str:
        """Return which normkit a contender is held against: both allocate, or both write into what exists."""
        into = name in GIVEN and name != NormkitInto.name and NormkitInto.name in self.samples
        return NormkitInto.name if into else Normkit.name

    def ratio(self, name: str) -> Ratio | None:
        """Return a contender's time over normkit's, None where either is missing."""
        base = self.base(name)
        if name not in self.samples or base not in self.samples:
            return None
        return paired(self.samples[name].seconds, self.samples[base].seconds)

    def share(self, name: str) -> Ratio:
        """Return the bandwidth that a contender reaches as a share of the copy's: what must move, over its time."""
        found = paired(self.samples[Copy.name].seconds, self.samples[name].seconds)
        work = self.case.moved / self.case.copied if name not in (Copy.name, CopyAgain.name) else 1.0
        return Ratio(work * found.median, work * found.low, work * found.high)


def measure(case: Case, peers: Sequence[Peer], method: Method) -> Measured:
    """Time a case. What a peer cannot do, or does wrongly, is said and not timed."""
    torch.compiler.reset()  # or what was compiled for the last case counts against the compiler's limit
    inputs = make_inputs(case, method.seed)
    truth = truth_of(case, inputs)
    contenders: list[Contender] = []
    absent: dict[str, str] = {}
    failed: dict[str, str] = {}
    errors: dict[str, float] = {}
    with torch.set_grad_enabled(case.which != "forward"):
        for peer in peers:
            if case.op not in peer.ops:
                continue
            reason = peer.missing(case)
            if reason is not None:
                absent[peer.name] = reason
                continue
            try:
                contender, errors[peer.name] = _ready(peer, case, inputs, truth)
                contenders.append(contender)
            except WrongResultError as error:
                failed[peer.name] = str(error)
            except Exception as error:  # a peer that fails, in whatever way, must not stop the others
                failed[peer.name] = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        samples = interleave(contenders, method.rounds, method.seed, method.least, method.clock)
    return Measured(case, samples, absent, failed, errors)


class WrongResultError(Exception):
    """A contender computes something else."""


def _ready(peer: Peer, case: Case, inputs: Inputs, truth: Truth) -> tuple[Contender, float]:
    """Return the contender and its error, or raise where it is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compilers warn about themselves; what counts here is the result
        prepared = peer.prepare(case, inputs)
        if isinstance(peer, Copy):
            return Contender(peer.name, prepared.call), _copy_error(prepared, inputs)
        names, results = _results(prepared, case, inputs)
    name, error = worst(truth, names, results)
    if error > 1:
        raise WrongResultError(f"wrong, not timed: {name} is off by {error:.3g} × what its roundings explain")
    return _contender(peer.name, prepared, case, inputs), error


def _copy_error(prepared: Prepared, inputs: Inputs) -> float:
    prepared.call()
    if not torch.equal(inputs.y, inputs.x.detach()):
        raise WrongResultError("wrong, not timed: the copy differs from its source")
    return 0.0


def _results(prepared: Prepared, case: Case, inputs: Inputs) -> tuple[list[str], list[Tensor]]:
    out = prepared.call()
    found = prepared.into or _outputs(out)
    names, results = ["y", "s"][: len(found)], [t.detach() for t in found]
    if case.which != "forward":
        names += inputs.names
        results += torch.autograd.grad(_outputs(out), inputs.leaves, inputs.upstream)
    return names, results


def _outputs(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _contender(name: str, prepared: Prepared, case: Case, inputs: Inputs) -> Contender:
    leaves, upstream = inputs.leaves, inputs.upstream
    call: Callable[[], Any] = prepared.call
    if case.which == "forward":
        return Contender(name, call, holds=prepared)

    def backward(outputs: Any) -> object:
        return torch.autograd.grad(outputs, leaves, upstream)

    def step() -> object:
        return torch.autograd.grad(call(), leaves, upstream)

    if case.which == "step":
        return Contender(name, step)
    fit = bytes_for_graphs(case.device) // (PLANES_OF_A_GRAPH * case.plane)
    return Contender(name, backward, partial(call), most=max(1, min(fit, MOST_CALLS)))
