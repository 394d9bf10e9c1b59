"""Which fused kernels a test run holds to the truth: the CPU's, or with TRITON_INTERPRET=1 the GPU's, interpreted."""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
BACKEND = "gpu" if INTERPRETED else "cpu"
LONG = [pytest.mark.slow] if INTERPRETED else []  # where the interpreter takes seconds and a compiled kernel none
