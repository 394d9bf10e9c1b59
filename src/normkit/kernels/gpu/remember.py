"""Moving running statistics by a batch's moments: one launch for what some twenty small operators do otherwise."""

# Triton's language, which Python's types do not describe.
# pyright: basic, reportArgumentType=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _move(at, new, share, live):
    """Blend in float64, where the moments of rescaled channels fit, and round once."""
    old = tl.load(at, mask=live, other=0.0).to(tl.float64)
    tl.store(at, (old * (1.0 - share) + new * share).to(tl.float32), mask=live)


@triton.jit(do_not_specialize=["momentum"])
def remember(table, squares, ranks, mean, variance, total, channels, momentum, G: tl.constexpr, LISTED: tl.constexpr):
    """old·(1 − m) + new·m of mean and unbiased variance; ``momentum`` is m's bits, as a float argument is a float32."""
    c = tl.program_id(0) * G + tl.arange(0, G)
    live = c < channels
    share = momentum.to(tl.int64).to(tl.float64, bitcast=True)
    count = total
    if LISTED:
        count = tl.load(ranks + total - 1)
    scale = tl.load(table + 3 * channels + c, mask=live, other=1.0).to(tl.float64)
    middle = tl.load(table + c, mask=live, other=0.0).to(tl.float64) / scale
    rest = tl.load(table + channels + c, mask=live, other=0.0).to(tl.float64) / scale
    square = tl.load(squares + c, mask=live, other=0.0).to(tl.float64) / (scale * scale)
    _move(mean + c, middle + rest, share, live)
    _move(variance + c, square / (count.to(tl.float64) - 1.0), share, live)
