"""X2: Post-Norm is called more expressive. Without saying what of, that is not a measurement."""

from __future__ import annotations

from normkit.lab.untestable import Untestable

MORE_EXPRESSIVE = Untestable(
    id="X2",
    title="Post-Norm is more expressive",
    sentence="Since every layer's output is forced back to a fixed scale, Post-Norm has the greater expressive power.",
    sentences=(),
    source="Article, “Post-Norm”.",
    reason="It names no quantity. As sets of functions, neither wiring is shown to contain the other, and a better "
    "loss after training speaks of optimization and data as much as of what could be expressed. The fixed scale "
    "itself is measured elsewhere.",
    record=(
        "Where a deep Post-Norm model can be trained at all, it often ends better than Pre-Norm: Liu et al. 2020, "
        "arXiv 2004.08249, whose initialization makes that training possible.",
        "Pre-Norm layers come to resemble each other as the stream grows, which is one way to say that Post-Norm uses "
        "its depth better: Xie et al. 2023, arXiv 2304.14802 (ResiDual).",
        "The opposite is on record as well: at great depth Pre-Norm both trains and translates better. Wang et al. "
        "2019, arXiv 1906.01787.",
    ),
)

CLAIMS = (MORE_EXPRESSIVE,)
