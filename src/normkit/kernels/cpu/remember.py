"""Moving running statistics by a batch's moments: what some twenty small operators do otherwise."""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normkit.kernels.cpu.columns import F, store_upto
from normkit.kernels.cpu.simd import add, div, f64_word, mul, splat, word
from normkit.kernels.cpu.sums import f4, jit, load_upto

# Words of the argument block.
WIDTH, MOMENTS, COUNT, MEAN, VARIANCE, MOMENTUM = range(6)


def remember_kernel() -> Callable[[Any], None]:
    """Return the entry point: old·(1 − m) + new·m of the mean and the unbiased variance, each step rounded."""

    @jit
    def moved(at: Any, new: Any, keep: Any, share: Any, left: Any) -> Any:
        store_upto(at, add(mul(load_upto(at, left, F), keep), mul(new, share)), left, F)

    def kernel(q):  # type: ignore[no-untyped-def]
        channels, moments = word(q, WIDTH), word(q, MOMENTS)
        share, keep = splat(f4(f64_word(q, MOMENTUM))), splat(f4(1.0 - f64_word(q, MOMENTUM)))
        size, c = splat(f4(word(q, COUNT)) - f4(1)), 0
        while c < channels:
            left, at = channels - c, moments + 4 * c
            mean = add(load_upto(at, left, F), load_upto(at + 4 * channels, left, F))
            moved(word(q, MEAN) + 4 * c, mean, keep, share, left)
            moved(word(q, VARIANCE) + 4 * c, div(load_upto(at + 8 * channels, left, F), size), keep, share, left)
            c += 16

    return kernel
