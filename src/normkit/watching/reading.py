"""What is kept of one norm in one forward."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """One norm (or one attention) in one forward.

    Args:
        step: number of the forward, from 0.
        name: the module's name.
        training: whether the model was in training mode.
        position: what the norm is for, as `audit` says; ``"attention"`` for an attention; empty where unknown.
        order: its place among the readings of its step.
        x_rms, x_mean, x_max: √mean(x²), mean and largest magnitude of what came in.
        y_rms: √mean(y²) of what came out.
        stream_rms: √mean(s²) of the residual stream there; None away from it.
        share: √mean((s − s′)²) / √mean(s²) where s′ is the stream at the norm before: how much the sublayer between
            them contributes; None at the first norm and away from the stream.
        gradient: ‖∂loss/∂y‖₂, summed over the norm's calls; None before a backward and where none arrived.
        largest_logit: of an attention, the largest score (scaled, before the mask's infinities) that was seen.
        finite: no NaN or infinity in x and y.
        dtype: of what came in.
    """

    step: int
    name: str
    training: bool
    position: str = ""
    order: int = 0
    x_rms: float = math.nan
    x_mean: float = math.nan
    x_max: float = math.nan
    y_rms: float = math.nan
    stream_rms: float | None = None
    share: float | None = None
    gradient: float | None = None
    largest_logit: float | None = None
    finite: bool = True
    dtype: str = ""
