"""One training run: the same bits for the same seed, and a judgement that looks at held-out text only."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.lab.corpus import CONTEXT, HELDOUT_WINDOWS, Corpus, bigram_entropy, unigram_entropy
from normkit.lab.draws import Draws
from normkit.lab.model.transformer import TransformerConfig, build

Outcome = Literal["trained", "stuck", "diverged"]
CURVE = 10  # steps per point of the curve


@dataclass(frozen=True)
class Schedule:
    """How a network is trained: Adam(β = .9, .98; ε = 1e-8), no weight decay, no clipping.

    Args:
        lr: the learning rate after warm-up; it stays constant.
        warmup: steps over which it rises linearly, step s of them (from 1) running at lr·s/warmup; 0 for none.
        steps: updates in all.
        rows: windows in a batch, each of `CONTEXT` bytes.
    """

    lr: float
    warmup: int = 0
    steps: int = 200
    rows: int = 16

    def lr_at(self, step: int) -> float:
        """Return the learning rate of update ``step``, counted from 0."""
        return self.lr * min(1.0, (step + 1) / self.warmup) if self.warmup else self.lr


@dataclass(frozen=True)
class Plateau:
    """What the text alone gives away, on the bytes that runs are judged on. Entropies and losses in nats per byte.

    Args:
        unigram: entropy of the judged bytes: no model that ignores its context can do better on them.
        margin: a tenth of what the byte before tells about a byte (unigram minus bigram entropy of the training
            text). A model that has gained less has learnt little beyond how often each byte occurs.
        noise: standard deviation of one point of a curve for no other reason than that batches differ: that of the
            loss of the training text's byte frequencies.
    """

    unigram: float
    margin: float
    noise: float

    def outcome(self, heldout: float) -> Outcome:
        """Name what a held-out loss amounts to."""
        if not math.isfinite(heldout):
            return "diverged"
        return "trained" if heldout < self.unigram - self.margin else "stuck"


@dataclass(frozen=True)
class Run:
    """What one training run came to.

    Args:
        curve: training loss, the mean of every `CURVE` steps; it ends where the run diverged.
        excess: the same minus the loss of the training text's byte frequencies on the same batches, which takes
            out how hard those batches happened to be.
        heldout: mean loss on the fixed held-out windows; None after divergence.
        outcome: ``"trained"``, ``"stuck"`` (at the unigram plateau or above) or ``"diverged"`` (a loss that is not
            finite).
        diverged_at: the step, counted from 0, of the first loss that is not finite, or None.
        plateau: what the outcome was judged by.
    """

    curve: list[float]
    excess: list[float]
    heldout: float | None
    outcome: Outcome
    diverged_at: int | None
    plateau: Plateau


def train(config: TransformerConfig, schedule: Schedule, corpus: Corpus, draws: Draws, device: str = "cpu") -> Run:
    """Train a network on ``corpus.train`` and judge it on ``corpus.heldout``.

    Batches and initial weights come from ``draws``' shared streams: arms of one study see the same batches in the
    same order, and start from the same weights wherever shapes agree.
    """
    return train_model(build(config, draws), schedule, corpus, draws, device)


def train_model(
    model: nn.Module,
    schedule: Schedule,
    corpus: Corpus,
    draws: Draws,
    device: str = "cpu",
    told: Callable[[int, list[float]], None] | None = None,
    during: AbstractContextManager[object] | None = None,
    backward: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> Run:
    """Train any module that maps bytes (N, T) to logits (N, T, 256), as `train` does; it is changed in place.

    Args:
        model: where training starts.
        schedule, corpus, draws, device: as in `train`.
        told: called after every `CURVE` steps with the number of steps made and their losses.
        during: held while the model trains, and left before it is judged.
        backward: puts the gradient of a batch's loss into the parameters and returns the loss, detached;
            `whole_batch` if not given.
    """
    plateau = plateau_of(corpus, schedule.rows)
    frequencies = _log_frequencies(corpus).to(device)
    model = model.to(device).train()
    windows = batches(corpus, schedule, draws).to(device)
    optimizer = torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=schedule.lr, betas=(0.9, 0.98), fused=True
    )
    backward = backward or whole_batch
    losses: list[Tensor] = []
    baseline = -frequencies[windows[:, :, 1:]].mean(dim=(1, 2))
    with during or nullcontext():
        for step, window in enumerate(windows):
            for group in optimizer.param_groups:
                group["lr"] = schedule.lr_at(step)
            optimizer.zero_grad()
            losses.append(backward(model, window))
            optimizer.step()
            # Reading a loss waits for the device, so it is read once a point; what follows a NaN is NaN anyway.
            if step % CURVE == CURVE - 1:
                point: list[float] = torch.stack(losses[-CURVE:]).tolist()
                if told is not None:
                    told(step + 1, point)
                if not math.isfinite(point[-1]):
                    break
    return _judged(model, torch.stack(losses).cpu(), baseline.cpu(), corpus, plateau)


def whole_batch(model: nn.Module, window: Tensor) -> Tensor:
    """Put the gradient of the mean loss of ``window`` into the parameters; return that loss, detached."""
    loss = next_byte_loss(model, window)
    loss.backward()
    return loss.detach()


def frequencies_loss(corpus: Corpus) -> float:
    """Return the mean held-out loss of one who knows how often each byte occurs in the training text, and no more."""
    return float(-_log_frequencies(corpus).double()[heldout_windows(corpus)[:, 1:]].mean())


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of every byte of ``windows`` (N, T + 1) but the first of each."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: nn.Module, corpus: Corpus, rows: int = 32) -> float:
    """Return the mean loss over the fixed held-out windows, in evaluation mode."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    chunks = heldout_windows(corpus).to(device).split(rows)
    total = sum(next_byte_loss(model, chunk).double() * len(chunk) for chunk in chunks)
    model.train(was_training)
    return float(total) / HELDOUT_WINDOWS


def heldout_windows(corpus: Corpus) -> Tensor:
    """Return windows (`HELDOUT_WINDOWS`, `CONTEXT` + 1) spread evenly over the held-out text; never random."""
    last = len(corpus.heldout) - (CONTEXT + 1)
    starts = torch.linspace(0, last, HELDOUT_WINDOWS, dtype=torch.float64).long()
    return _windows(corpus.heldout, starts)


@lru_cache(maxsize=4)
def plateau_of(corpus: Corpus, rows: int) -> Plateau:
    """Derive from the text what a run has to beat; see `Plateau`."""
    unigram = unigram_entropy(heldout_windows(corpus)[:, 1:])
    whole = len(corpus.train) // CONTEXT * CONTEXT
    per_window = -_log_frequencies(corpus)[corpus.train[:whole].long()].view(-1, CONTEXT).mean(1)
    return Plateau(unigram, margin_of(corpus), float(per_window.std()) / (rows * CURVE) ** 0.5)


def margin_of(corpus: Corpus) -> float:
    """Return a tenth of what the previous byte tells about a byte, in nats."""
    return (unigram_entropy(corpus.train) - bigram_entropy(corpus.train)) / 10


def _log_frequencies(corpus: Corpus) -> Tensor:
    """Return ln p of the training text's bytes, one count added to each so that unseen bytes cost something finite."""
    counts = torch.bincount(corpus.train.long(), minlength=256).double() + 1
    return (counts / counts.sum()).log().float()


def batches(corpus: Corpus, schedule: Schedule, draws: Draws) -> Tensor:
    """Return the windows (steps, rows, `CONTEXT` + 1) of every step: the same for all arms of a study and seed."""
    last = len(corpus.train) - (CONTEXT + 1)
    starts = torch.randint(0, last + 1, (schedule.steps, schedule.rows), generator=draws.shared("batches"))
    return _windows(corpus.train, starts)


def _windows(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[..., None] + torch.arange(CONTEXT + 1)].long()


def _judged(model: nn.Module, losses: Tensor, baseline: Tensor, corpus: Corpus, plateau: Plateau) -> Run:
    finite = int(losses.isfinite().long().cumprod(0).sum())
    diverged_at = finite if finite < len(losses) else None
    heldout = heldout_loss(model, corpus) if diverged_at is None else math.nan
    points = finite // CURVE
    curve = losses[: points * CURVE].view(points, CURVE).mean(1)
    excess = curve - baseline[: points * CURVE].view(points, CURVE).mean(1)
    return Run(
        curve.tolist(),
        excess.tolist(),
        heldout if math.isfinite(heldout) else None,
        plateau.outcome(heldout),
        diverged_at,
        plateau,
    )
