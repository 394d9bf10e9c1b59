"""Which fused kernels a test run holds to the truth, and on which device.

The CPU's by themselves; with TRITON_INTERPRET=1 the GPU's, interpreted on the CPU; with NORMKIT_TEST_DEVICE=cuda the
GPU's on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
DEVICE = os.environ.get("NORMKIT_TEST_DEVICE", "cpu")
BACKEND = "gpu" if INTERPRETED or DEVICE != "cpu" else "cpu"
LONG = [pytest.mark.slow] if INTERPRETED else []  # where the interpreter takes seconds and a compiled kernel none


def costly(test: Callable[..., None]) -> Callable[..., None]:
    """Leave a test to the slow ones where its kernels, which no other test needs, are compiled for seconds."""
    return test if INTERPRETED else pytest.mark.slow(test)
