"""What holds for every kernel that is compiled for a GPU."""

from __future__ import annotations

import re
from typing import Any

WIDE_LOAD, WIDE_STORE = r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"


def check_arithmetic(used: Any, name: str) -> None:
    """Fail unless sums are float32 in an order of their own, and roots and quotients IEEE's.

    ``used`` is what `normkit.kernels.gpu.resources` reports.
    """
    # From compute capability 10.0 on bfloat16 may be added to float32 without a conversion: add.rn.f32.bf16.
    assert not used.count(r"\b(add|sub|mul|fma)\.(?!\S*f32\.)\S*f16"), f"{name}: statistics and products are float32"
    assert not used.count(r"(rsqrt|sqrt|div|rcp)\.approx"), f"{name}: roots and quotients are IEEE's"
    assert not used.count(r"\b(atom|red)\."), f"{name}: partials have a fixed order"
    assert not used.count(r"ld\.local|st\.local"), name
    # sums.py: one addition has no order that a layout of threads could change.
    assert max(used.sums(), default=1) <= 2, f"{name}: a sum of more than two has the order of its layout"
    # The compiler says of one element that it may change places.
    moved = re.findall(r"allow_reorder\b[^:]*: tensor<((?:\d+x)+)", used.ttgir)
    assert set("".join(moved)) <= {"1", "x"}, f"{name}: terms change places"
