"""Fused kernels of either machine, held to the same truth; `make test` runs the folder twice."""

from __future__ import annotations

from fused import INTERPRETED
from interpreter import round_like_hardware

if INTERPRETED:
    round_like_hardware()
