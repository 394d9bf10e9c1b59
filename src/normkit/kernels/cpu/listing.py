"""Listing the positions that a mask lets through, and cutting them into chunks, in one walk over its bytes.

The same in ATen is some thirty small operators, which each start with cold caches (see column_launch.py).
"""

# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normkit.kernels.cpu.reading import byte_at
from normkit.kernels.cpu.simd import put_word, word
from normkit.kernels.cpu.sums import jit

# Words of the argument block. All that is written is int64.
FLAGS, RUNS, LENGTH, CHUNK, LISTED, BEGINS, COUNTS, BOUNDS, SIZES, TOTALS = range(10)


def listing_kernel() -> Callable[[Any], None]:
    """Return the entry point that fills the tables of `normkit.kernels.cpu.chunks`, run by run.

    ``TOTALS`` receives how many positions and chunks there are, and the most chunks of a run.
    """

    @jit
    def listed_from(at: Any, length: Any, first: Any, listed: Any, n: Any) -> Any:
        for p in range(length):
            put_word(listed + 8 * n, first + p)  # the next one that counts writes over it
            n += min(byte_at(at + p), 1)
        return n

    def kernel(q):  # type: ignore[no-untyped-def]
        length, chunk, n, chunks, most = word(q, LENGTH), word(q, CHUNK), 0, 0, 0
        for r in range(word(q, RUNS)):
            i, before = n, chunks
            n = listed_from(word(q, FLAGS) + r * length, length, r * length, word(q, LISTED), n)
            put_word(word(q, BOUNDS) + 8 * r, chunks)
            put_word(word(q, SIZES) + 8 * r, n - i)
            while i < n:
                put_word(word(q, BEGINS) + 8 * chunks, i)
                put_word(word(q, COUNTS) + 8 * chunks, min(chunk, n - i))
                i, chunks = i + chunk, chunks + 1
            most = max(most, chunks - before)
        put_word(word(q, BOUNDS) + 8 * word(q, RUNS), chunks)
        put_word(word(q, TOTALS), n)
        put_word(word(q, TOTALS) + 8, chunks)
        put_word(word(q, TOTALS) + 16, most)

    return kernel
