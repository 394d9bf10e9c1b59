"""C3: running statistics meet another domain, or other lengths: a training–inference discrepancy that is predicted.

Tokens come from a vocabulary by Zipf's law, as embeddings plus sinusoidal positions; another domain gives the same
tokens other frequencies, other lengths bring other positions. Mean μ and variance v of every channel are then
known, and with them the discrepancies of Wang et al. 2022, mean_j |μ_run − μ_B|/σ_B and mean_j |σ_run/σ_B − 1|: between
domains they are those of the two distributions; at home only sampling noise is left. A running mean with momentum a is
off by √(a/(2 − a)) of a batch's own error, so at home the first discrepancy is √(2/π)·√((1 + a/(2 − a))·v/m)/σ_B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval
from normkit.modules import BatchNorm, LayerNorm

VOCABULARY, C, MOMENTUM = 512, 64, 0.1
SEQUENCES, SHORT, LONG = 32, 32, 128
STEPS, SHOWN = 100, 8  # training batches; batches that the discrepancy is a mean over


def _arms(settings: Settings) -> list[Arm]:
    domains = {"home": ("home", SHORT), "domain": ("other", SHORT), "length": ("home", LONG)}
    return [
        Arm(f"{norm}/{name}", {"norm": norm, "tokens": tokens, "length": length})
        for norm in ("batch", "layer")
        for name, (tokens, length) in domains.items()
    ]


@dataclass(frozen=True)
class Domain:
    """Tokens with frequencies at positions 0 … length − 1; what a channel's numbers are distributed as."""

    embedding: Tensor
    frequencies: Tensor
    length: int

    def positions(self) -> Tensor:
        """Return the sinusoids of Vaswani et al., (length, C)."""
        rate = 1e4 ** (-torch.arange(0, C, 2, dtype=torch.float64) / C)
        angle = torch.arange(self.length, dtype=torch.float64)[:, None] * rate
        return torch.stack([angle.sin(), angle.cos()], -1).reshape(self.length, C).to(self.embedding)

    def batch(self, generator: torch.Generator) -> Tensor:
        """Draw (SEQUENCES, length, C)."""
        draws = torch.multinomial(self.frequencies.cpu(), SEQUENCES * self.length, True, generator=generator)
        return self.embedding[draws.to(self.embedding.device)].view(SEQUENCES, self.length, C) + self.positions()

    def mean(self) -> Tensor:
        """Return the expected value of every channel."""
        return self.frequencies @ self.embedding + self.positions().mean(0)

    def token_variance(self) -> Tensor:
        """Return the variance that comes from the drawn tokens: positions are all there every time."""
        return self.frequencies @ (self.embedding - self.frequencies @ self.embedding).square()

    def deviation(self) -> Tensor:
        """Return the standard deviation of every channel."""
        return (self.token_variance() + self.positions().var(0, unbiased=False)).sqrt()


def _domain(bench: Bench, tokens: str, length: int) -> Domain:
    device = bench.settings.device
    rank = torch.arange(1, VOCABULARY + 1, dtype=torch.float32)
    if tokens == "other":
        rank = rank[torch.randperm(VOCABULARY, generator=bench.draws.shared("ranks"))]
    frequencies = (1 / rank) / (1 / rank).sum()
    return Domain(bench.draws.randn(VOCABULARY, C, stream="embedding").to(device), frequencies.to(device), length)


def _discrepancy(mean: Tensor, deviation: Tensor, here: Tensor, spread: Tensor) -> tuple[float, float]:
    """Return mean_j |μ − μ_here|/σ_here and mean_j |σ/σ_here − 1|."""
    return float(((mean - here) / spread).abs().mean()), float((deviation / spread - 1).abs().mean())


def at_home(domain: Domain) -> float:
    """Return the first discrepancy that sampling alone makes."""
    noise = (1 + MOMENTUM / (2 - MOMENTUM)) * domain.token_variance() / (SEQUENCES * domain.length)
    return float((math.sqrt(2 / math.pi) * noise.sqrt() / domain.deviation()).mean())


def _measure(params: Params, bench: Bench) -> Values:
    device = bench.settings.device
    home, there = _domain(bench, "home", SHORT), _domain(bench, params["tokens"], params["length"])
    norm = (BatchNorm(C, momentum=MOMENTUM) if params["norm"] == "batch" else LayerNorm(C)).to(device)
    train, show = bench.draws.shared("training"), bench.draws.own("shown")
    found: list[tuple[float, float]] = []
    gaps: list[float] = []
    with torch.no_grad():
        for _ in range(STEPS):
            norm(home.batch(train))
        kept = {name: value.clone() for name, value in norm.named_buffers()}
        for _ in range(SHOWN):
            x = there.batch(show)
            gaps.append(float((norm.eval()(x) - norm.train()(x)).square().mean().sqrt()))
            norm.load_state_dict(kept, strict=False)
            if isinstance(norm, BatchNorm):
                own = x.var((0, 1), unbiased=False).sqrt()
                run = kept["running_mean"], kept["running_var"].sqrt()
                found.append(_discrepancy(*run, x.mean((0, 1)), own))
    mean, deviation = (math.fsum(column) / SHOWN for column in zip(*found, strict=True)) if found else (0.0, 0.0)
    law = _discrepancy(home.mean(), home.deviation(), there.mean(), there.deviation())
    return {
        "mean": mean,
        "deviation": deviation,
        "output": math.fsum(gaps) / SHOWN,
        "law/mean": law[0],
        "law/deviation": law[1],
        "noise": at_home(home),
    }


STUDY = Study(id="running_statistics", arms=_arms, measure=_measure, seconds=lambda params: 0.3, seeds=3)

AWAY = ("domain", "length")


def _criteria(e: Evidence) -> list[Criterion]:
    noise = e.numbers("norm/home", "noise")
    home = Criterion(
        name="at home: |μ_run − μ_B|/σ_B over what sampling noise makes of it",
        values=[v / n for v, n in zip(e.numbers("norm/home", "mean"), noise, strict=True)],
        kind="near",
        target=1.0,
        tolerance=0.8,
        reason="Zipf's most frequent tokens make all channels err together, so an error's size varies by "
        "√(2·Σp²)/2 = .13 with Σp² = .036; six of those",
        every=True,
    )
    far = [
        Criterion(
            name=f"another {name}: |μ_run − μ_B|/σ_B, in units of the noise at home",
            values=[v / n for v, n in zip(e.numbers(f"norm/{name}", "mean"), noise, strict=True)],
            kind="above",
            target=1.0,
            tolerance=1.0,
            reason="twice what sampling alone makes of it; three times at double tolerance",
            every=True,
        )
        for name in AWAY
    ]
    outputs = [
        Criterion(
            name=f"another {name}: rms distance between outputs of inference and training, over that at home",
            values=[a / b if b else math.nan for a, b in _pairs(e, name)],
            kind="above",
            target=1.0,
            tolerance=1.0,
            reason="twice the distance at home, which is sampling noise; three times at double tolerance",
            every=True,
        )
        for name in AWAY
    ]
    still = Criterion(
        name="layer norm: rms distance between outputs of inference and training, everywhere",
        values=[max(row) for row in zip(*(e.numbers(f"token/{n}", "output") for n in ("home", *AWAY)), strict=True)],
        kind="at_most",
        target=0.0,
        tolerance=0.0,
        reason="exact: both modes do the same",
        every=True,
    )
    return [home, *far, *outputs, still]


def _pairs(e: Evidence, name: str) -> list[tuple[float, float]]:
    return list(zip(e.numbers(f"norm/{name}", "output"), e.numbers("norm/home", "output"), strict=True))


def _summary(e: Evidence) -> str:
    home, domain, length = (interval(e.numbers(f"norm/{n}", "mean")).mean for n in ("home", *AWAY))
    return (
        f"running means are off by {number(home, 2)} σ at home, {number(domain, 2)} σ in another domain, "
        f"{number(length, 2)} σ at length {LONG} instead of {SHORT}"
    )


def _figures(e: Evidence) -> list[Chart]:
    places = ("home", *AWAY)
    names = ["at home", "other domain", f"{LONG} tokens"]

    def rows(role: str, key: str) -> list[list[float]]:
        return [list(row) for row in zip(*(e.numbers(f"{role}/{p}", key) for p in places), strict=True)]

    def among(values: list[list[float]], label: str) -> Series:
        """Return points with bars: between words no line may run."""
        return replace(band(label, range(3), values), kind="points")

    def panel(title: str, label: str, key: str) -> Panel:
        first = [e.first("norm/home", "noise") if (p, key) == ("home", "mean") else e.first(f"norm/{p}", f"law/{key}")
                 for p in places]  # fmt: skip
        laws = Series("from the distributions", range(3), first, kind="points")
        return Panel(title, "batches from", label, [among(rows("norm", key), "measured"), laws], x_names=names)

    gaps = [among(rows(role, "output"), label) for role, label in (("norm", "batch"), ("token", "layer"))]
    return [
        Chart(
            caption=f"A batch norm trained on {STEPS} batches of length {SHORT}, on {SHOWN} new ones: distance of its "
            "running statistics from the batch's, and of its outputs in the two modes. Bars: min–max over seeds; "
            "squares: first seed's distributions.",
            alt="All three distances of batch norm are small at home and several times as large in another domain and "
            "at another length; layer norm's outputs do not differ between the modes at all.",
            panels=[
                panel("means", "mean |μ_run − μ_B|/σ_B", "mean"),
                panel("deviations", "mean |σ_run/σ_B − 1|", "deviation"),
                Panel("outputs", "batches from", "rms distance, inference to training", gaps, x_names=names),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="C3",
        title="Running statistics do not travel",
        sentence="Training and inference disagree: inference relies on a running mean and variance, but a language "
        "model meets inputs of very different lengths and domains, and fixed running statistics hardly represent them.",
        sentences=(17,),
        source="Article, “The limits of BatchNorm”, third point; the distances are those of Wang et al. 2022, "
        "arXiv 2210.05153.",
        measured=f"normkit.BatchNorm({C}) with momentum {MOMENTUM} after {STEPS} batches of {SEQUENCES} sequences of "
        f"{SHORT} Zipf-distributed tokens (embedding plus sinusoidal position), on {SHOWN} new batches from there, "
        f"from a domain with other token frequencies, and of length {LONG}: distance of running from batch statistics, "
        "and of the outputs in inference from those in training; the same outputs for normkit.LayerNorm.",
        study=STUDY,
        plays={"norm": "batch", "token": "layer"},
        literal=Rule(
            text="At home the running mean is as far off as sampling noise makes it; in another domain and at another "
            "length statistics and outputs are off by more than twice as much; layer norm's outputs by nothing.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="Layer norm, which remembers nothing, in batch norm's place.",
            plays={"norm": "layer", "token": "batch"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="What is remembered is the average over the training distribution. The distances away from home are "
            "those between the distributions themselves, so no momentum and no longer training removes them.",
            status="tested",
        ),
    ),
)
