"""Every public name is documented, and every example in a docstring runs as printed."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import normkit


def submodules() -> list[str]:
    found = pkgutil.walk_packages(normkit.__path__, "normkit.")
    return ["normkit", *sorted(m.name for m in found)]


# What imports Triton at its head; the others of the package say that it is missing.
NEEDS_TRITON = re.compile(r"^(import|from) triton|^from normkit\.kernels\.gpu\.(?!kernel|settings)", re.M)


# These try a norm in every pair of dtypes, each with kernels of its own: half a minute to compile for examples that
# print what a norm is and not how it was computed.
PROBES = {"normkit.surgery.audit", "normkit.surgery.identify", "normkit.testing.check"}


@pytest.mark.parametrize("name", submodules())
def test_examples_run_as_printed(name: str) -> None:
    if name.startswith("normkit.kernels.gpu.") and find_spec("triton") is None:
        path = Path(normkit.__path__[0]).parent / (name.replace(".", "/") + ".py")
        if NEEDS_TRITON.search(path.read_text()):
            pytest.skip("triton is not installed: there is none for this platform")
    torch.manual_seed(0)
    with normkit.use("reference") if name in PROBES else nullcontext():
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def public() -> list[tuple[str, object]]:
    names = [n for n in vars(normkit) if not n.startswith("_")]
    values = [(n, getattr(normkit, n)) for n in names]
    return [(n, v) for n, v in values if not isinstance(v, ModuleType) and (inspect.isclass(v) or callable(v))]


@pytest.mark.parametrize(("name", "value"), public(), ids=[n for n, _ in public()])
def test_public_names_carry_an_example(name: str, value: object) -> None:
    doc = inspect.getdoc(value) or ""
    inherits = inspect.isclass(value) and issubclass(value, normkit.Residual) and value is not normkit.Residual
    plain = name in {"Coverage", "Wiring", "Explanation"}  # rows of a table: nothing to run
    assert inherits or plain or ">>>" in doc, f"{name} has no example"
    assert len(doc) > 40
