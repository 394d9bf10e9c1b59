"""U: what the article reports of the dispute over why normalization works. Read, not measured.

What such an explanation predicts can be measured. Whether a paper offers it, and whether the field has settled on
it, are facts about the literature.
"""

from __future__ import annotations

from normkit.lab.untestable import Untestable

EXPLAINED_BY_SHIFT = Untestable(
    id="U1",
    title="The explanation that came with BatchNorm",
    sentence="The paper that introduced BatchNorm explains the difficulty of training by internal covariate shift: "
    "parameters change, so every layer keeps adapting to inputs whose distribution moves.",
    sentences=(3,),
    source="Article, “The difficulty of training deep networks”; Ioffe and Szegedy 2015, PMLR 37.",
    reason="It says what a paper argues. That is settled by reading the paper; no measurement bears on it.",
    record=(
        "Ioffe and Szegedy 2015 (PMLR 37) present BatchNorm as a remedy for internal covariate shift, so the article "
        "reports them correctly.",
        "Whether the explanation is right is another sentence. Santurkar et al. 2018 (arXiv 1805.11604) take as the "
        "shift of a layer how far its gradient moves when the layers below it are updated, and find that BatchNorm "
        "does not reduce it.",
    ),
)

UNSETTLED = Untestable(
    id="U2",
    title="Why normalization works is not settled",
    sentence="Why normalization works has no fully agreed answer to this day.",
    sentences=(6,),
    source="Article, “The difficulty of training deep networks”.",
    reason="It says that a field does not agree. An experiment can weaken one explanation; it cannot show that "
    "people agree or that no better explanation will come.",
    record=(
        "Internal covariate shift: normalization steadies the distribution of every layer's inputs. Ioffe and "
        "Szegedy 2015, PMLR 37.",
        "Smoothness: along the gradient, loss and gradient change less from step to step. Santurkar et al. 2018, "
        "arXiv 1805.11604.",
        "Learning rate: what helps is the larger step that a normalized network survives. Bjorck et al. 2018, "
        "arXiv 1806.02375.",
        "Length and direction: a weight vector's length and its direction are optimized apart. Kohler et al. 2018, "
        "arXiv 1805.10694.",
        "Bias to the identity: at initialization the residual branches are scaled down, so deep networks start near "
        "the identity; SkipInit, a learnt scalar per branch, does it without a norm. De and Smith 2020, "
        "arXiv 2002.10444.",
    ),
)

CLAIMS = (EXPLAINED_BY_SHIFT, UNSETTLED)
