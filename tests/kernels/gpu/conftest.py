"""What is compiled for GPUs that are not there. Triton's interpreter compiles nothing: not with it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from fused import INTERPRETED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = ""
    if INTERPRETED:
        why = "TRITON_INTERPRET is set: nothing is compiled"
    elif find_spec("triton") is None:
        why = "triton is not installed"
    for item in items:
        if why and "kernels/gpu" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=why))
