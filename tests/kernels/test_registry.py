"""Choosing a kernel gives a decision with its reason; a backend asked for by name runs or raises."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import normkit as nk
from normkit.conventions import NAMED
from normkit.kernels import registry
from normkit.kernels.contract import Request
from normkit.kernels.cpu.kernel import CPU
from normkit.kernels.registry import REFERENCE, choose
from rows import randn

X = randn(4, 8)
W = torch.ones(8)


def request(
    spec: nk.NormSpec = nk.TORCH_RMS_NORM, x: Tensor = X, axes: tuple[int, ...] = (1,), **rest: object
) -> Request:
    return Request(spec, x, axes, **rest)  # type: ignore[arg-type]


def test_a_decision_says_why():
    decision = choose(request())
    assert decision.kernel is CPU
    assert (decision.reason, decision.rejected) == ("takes this call", ())
    with nk.use("cpu"):
        assert choose(request()).reason == "asked for by name"
    with nk.use("reference"):
        assert choose(request()).kernel is REFERENCE


GATE: Any = {"gate": "after", "activation": "silu"}
REFUSED = {
    "float64": (request(x=X.double()), "x is torch.float64"),
    "weight in float64": (request(weight=W.double()), "weight is torch.float64"),
    "empty": (request(x=X[:0]), "x is empty"),
    "meta": (request(x=X.to("meta")), "x is on meta"),
    "axes apart": (request(x=randn(2, 3, 4), axes=(0, 2)), "form no single row"),
    "four outer axes": (
        request(x=randn(2, 2, 2, 2, 4).permute(3, 2, 1, 0, 4), axes=(4,)),
        "more than three outer axes",
    ),
    "trainable, per row": (request(weight=torch.ones(4, 1, requires_grad=True)), "differs from row to row"),
    "masked": (request(masked=True), "masks have no row kernel"),
    "gated, no gate": (request(spec=nk.MAMBA2), "disagree on whether there is a gate"),
    "gate, ungated": (request(gate=X), "disagree on whether there is a gate"),
    "gated layer": (request(spec=nk.NormSpec(centered=True, **GATE), gate=X), "gated layer norms have no kernel"),
    "gate in float64": (request(spec=nk.MAMBA2, gate=X.double()), "gate is torch.float64"),
    "gated, bias": (request(spec=nk.GATED_RMS, gate=X, bias=W), "with a bias or a residual"),
    "gated, trained per row": (
        request(nk.GATED_RMS, randn(4, 2, 4), (2,), gate=randn(4, 2, 4), weight=torch.ones(4, 1, 4).requires_grad_()),
        "differs from row to row",
    ),
    "own dtype": (request(spec=nk.IMAGE_GPT), "every intermediate is to be in x's dtype"),
    "unbiased": (request(spec=nk.NormSpec(statistic="unbiased")), "unbiased"),
    "outside": (request(spec=nk.NormSpec(eps="outside")), "ε is not inside the root"),
    "power": (request(spec=nk.GEMMA3N), "root='power'"),
    "divided": (request(spec=nk.DEBERTA), "root='divide'"),
    "rounded root": (request(spec=nk.ROUNDED_ROOT_RMS), "the inverse root is to be rounded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_refuses_falls_back_or_raises_with_the_reason(name: str):
    asked, reason = REFUSED[name]
    decision = choose(asked)
    assert decision.kernel is REFERENCE
    ((backend, why),) = decision.rejected
    assert backend == "cpu"
    assert reason in why
    with nk.use("cpu"):
        if name == "empty":  # there is nothing to compute
            assert choose(asked).kernel is REFERENCE
            return
        with pytest.raises(ValueError, match="'cpu' was asked for by name but cannot take this call"):
            choose(asked)


def test_a_weight_per_row_is_refused_only_where_it_is_trained():
    x, w = randn(4, 8), torch.ones(4, 1, requires_grad=True)
    with torch.no_grad():
        assert choose(request(x=x, weight=w)).kernel is CPU


def test_every_function_raises_what_it_cannot_do_by_name():
    with nk.use("cpu"):
        for call in (
            lambda: nk.rms_norm(X.double()),
            lambda: nk.normalize(X, nk.GEMMA3N, W, eps=1e-6),
            lambda: nk.add_rms_norm(X, X.double()),
            lambda: nk.gated_rms_norm(X, X.double(), W),
            lambda: nk.rms_norm(torch.empty(4, 8, device="meta")),
        ):
            with pytest.raises(ValueError, match="asked for by name but cannot take this call"):
                call()


def test_use_nests_restores_and_belongs_to_its_thread():
    assert registry.backend() == "auto"
    seen: list[str] = []
    with nk.use("reference"):
        with nk.use("cpu"):
            assert registry.backend() == "cpu"
            thread = threading.Thread(target=lambda: seen.append(registry.backend()))
            thread.start()
            thread.join()
        assert registry.backend() == "reference"
        with pytest.raises(RuntimeError, match="inner"), nk.use("cpu"):
            raise RuntimeError("inner")
        assert registry.backend() == "reference"
        with nk.use("auto"):
            assert choose(request()).kernel is CPU
    assert (seen, registry.backend()) == (["auto"], "auto")


def test_an_unknown_name_in_words():
    with pytest.raises(ValueError, match="use: unknown backend 'cuda'; one of auto, reference, cpu"), nk.use("cuda"):
        pass
    assert registry.backend() == "auto"


@pytest.mark.parametrize(
    ("name", "prints"),
    [("reference", "reference"), ("cpu", "cpu"), ("auto", "cpu"), ("gpu2", "NORMKIT_BACKEND: unknown backend 'gpu2'")],
)
def test_the_environment_decides_for_a_process(name: str, prints: str):
    code = """
import torch
from normkit.kernels.contract import Request
from normkit.kernels.registry import choose
import normkit as nk
try:
    print(choose(Request(nk.LLAMA, torch.ones(2, 4), (1,))).kernel.name)
except ValueError as error:
    print(error)
"""
    env = {**os.environ, "NORMKIT_BACKEND": name}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.startswith(prints)


def used_in_backward(forward: str, backward: str) -> set[str]:
    """Return the kinds of autograd node behind a norm whose backward runs under another backend."""
    x = randn(4, 8).requires_grad_()
    with nk.use(forward):
        y = nk.rms_norm(x)
    calls: list[str] = []
    original = CPU.backward
    object.__setattr__(CPU, "backward", lambda *a, **k: calls.append("cpu") or original(*a, **k))
    try:
        with nk.use(backward):
            y.sum().backward()
    finally:
        object.__setattr__(CPU, "backward", original)
    return set(calls) or {"reference"}


def test_a_backward_uses_what_its_forward_used():
    assert used_in_backward("cpu", "reference") == {"cpu"}
    assert used_in_backward("reference", "cpu") == {"reference"}


def test_which_named_specs_have_a_kernel():
    """The table of the documentation: everything but powers, quotients and what is formed in x's own dtype."""
    gates = {name: None if spec.gate == "none" else X for name, spec in NAMED.items()}
    without = {name for name, spec in NAMED.items() if CPU.refuses(request(spec=spec, gate=gates[name])) is not None}
    assert without == {"GEMMA3N", "ROUNDED_ROOT_RMS", "IMAGE_GPT", "DEBERTA", "SCALE_NORM"}
