"""Text for networks that are looked at before any training: windows at random places of the corpus."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.lab.claim import Bench
from normkit.lab.corpus import CONTEXT
from normkit.lab.draws import Draws


def random_windows(bench: Bench, draws: Draws, rows: int, length: int = CONTEXT) -> Tensor:
    """Return ``rows`` windows of the training text, each with one byte more to predict: (rows, length + 1), int64.

    They come from ``draws``' shared stream ``"text"``: every arm of a study reads the same text at one seed.
    """
    assert bench.corpus is not None, "the study must ask for the corpus"
    text = bench.corpus.train
    starts = torch.randint(0, len(text) - length, (rows,), generator=draws.shared("text"))
    return text[starts[:, None] + torch.arange(length + 1)].long().to(bench.settings.device)
