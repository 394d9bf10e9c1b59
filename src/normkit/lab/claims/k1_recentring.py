"""K1: LayerNorm in a Pre-Norm network can be turned into RMSNorm, and that into one coordinate less, exactly.

Whatever a branch adds to the stream, its mean over the channels is subtracted again by every LayerNorm that reads it.
Take the mean off what is written (embedding, output maps and their biases) and the stream has mean zero; LayerNorm of
it is RMSNorm. A vector of mean zero has d − 1 free coordinates: the last is minus the sum of the others, so with s
that sum the mean square is (Σx² + s²)/d, and a map W that read x reads x without its last coordinate as
W[:, :−1] − W[:, −1:].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normkit.functional import layer_norm, rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.draws import Draws
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.modules import LayerNorm
from normkit.surgery import fold_

BLOCKS, WIDTH, HIDDEN, OUT, TOKENS, EPS = 4, 48, 96, 32, 64, 1e-5
ARMS = {
    "recentred": "RMSNorm, writers recentred",
    "compressed": "d − 1 coordinates",
    "fold": "nk.fold_",
    "rms": "RMSNorm, nothing recentred",
}


@dataclass(frozen=True)
class Stack:
    """A Pre-Norm network of MLP blocks without gains: x ← x + down·relu(up·N(x)) + bias, logits head·N(x)."""

    first: Tensor
    up: list[Tensor]
    down: list[Tensor]
    bias: list[Tensor]
    head: Tensor

    @classmethod
    def draw(cls, draws: Draws, device: str) -> Stack:
        """Draw all weights with variance 1/fan-in, and biases of .3: nothing in it has mean zero."""

        def weight(name: str, rows: int, columns: int) -> Tensor:
            return draws.randn(rows, columns, stream=name, dtype=torch.float64).to(device) / columns**0.5

        blocks = range(BLOCKS)
        return cls(
            1 + draws.randn(TOKENS, WIDTH, stream="x", dtype=torch.float64).to(device),
            [weight(f"up {i}", HIDDEN, WIDTH) for i in blocks],
            [weight(f"down {i}", WIDTH, HIDDEN) for i in blocks],
            [0.3 * draws.randn(WIDTH, stream=f"bias {i}", dtype=torch.float64).to(device) for i in blocks],
            weight("head", OUT, WIDTH),
        )

    def recentred(self) -> Stack:
        """Take the mean over the channels off everything that is written to the stream."""
        return replace(
            self,
            first=self.first - self.first.mean(-1, keepdim=True),
            down=[w - w.mean(0, keepdim=True) for w in self.down],
            bias=[b - b.mean() for b in self.bias],
        )

    def compressed(self) -> Stack:
        """Drop the last channel of a stream of mean zero."""
        return Stack(
            self.first[:, :-1],
            [w[:, :-1] - w[:, -1:] for w in self.up],
            [w[:-1] for w in self.down],
            [b[:-1] for b in self.bias],
            self.head[:, :-1] - self.head[:, -1:],
        )

    def logits(self, norm: str) -> Tensor:
        """Run it with ``"layer"``, ``"rms"``, or ``"compressed"``: rms_norm of a stream that lacks its last channel."""
        x = self.first
        for up, down, bias in zip(self.up, self.down, self.bias, strict=True):
            x = x + torch.relu(_normed(x, norm) @ up.T) @ down.T + bias
        return _normed(x, norm) @ self.head.T


def _normed(x: Tensor, norm: str) -> Tensor:
    if norm == "layer":
        return layer_norm(x, eps=EPS)
    if norm == "rms":
        return rms_norm(x, eps=EPS)
    last = -x.sum(-1, keepdim=True)
    return rms_norm(torch.cat([x, last], -1), eps=EPS)[..., :-1]


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"arm": name}) for name in ARMS]


class Network(nn.Module):
    """The same kind of stack as a module, with γ, β and biases everywhere, for `fold_` to work on."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.enter = nn.Linear(OUT, WIDTH)
        self.norms = nn.ModuleList(LayerNorm(WIDTH) for _ in range(BLOCKS + 1))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(BLOCKS))
        self.downs = nn.ModuleList(nn.Linear(HIDDEN, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, OUT)
        with torch.no_grad():
            for name, p in self.double().named_parameters():
                drawn = draws.randn(*p.shape, stream=name, dtype=torch.float64)
                p.copy_(drawn / p.shape[1] ** 0.5 if p.dim() == 2 else 0.3 * drawn + (name.startswith("norms") * 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, OUT) to logits (T, OUT)."""
        x = self.enter(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs):  # noqa: B905 (one norm more, before the head)
            x = x + down(torch.relu(up(norm(x))))
        return self.head(self.norms[-1](x))


def _folded(bench: Bench) -> tuple[Tensor, Tensor, int]:
    """Return a network's logits before and after `fold_`, and how many LayerNorms became RMSNorms."""
    with torch.random.fork_rng(devices=[]):  # constructors draw too; the caller's generator must not notice
        model = Network(bench.draws).to(bench.settings.device).eval()
    x = bench.draws.randn(TOKENS, OUT, stream="x", dtype=torch.float64).to(bench.settings.device)
    with torch.no_grad():
        before = model(x)
        report = fold_(model, x)
        return before, model(x), sum(f.what == "mean" for f in report.folded)


def _measure(params: Params, bench: Bench) -> Values:
    arm = params["arm"]
    norms = BLOCKS
    if arm == "fold":
        before, after, norms = _folded(bench)
    else:
        stack = Stack.draw(bench.draws, bench.settings.device)
        before = stack.logits("layer")
        if arm == "rms":
            after = stack.logits("rms")
        elif arm == "recentred":
            after = stack.recentred().logits("rms")
        else:
            after = stack.recentred().compressed().logits("compressed")
    return {"moved": float((after - before).abs().max() / before.abs().max()), "norms": norms}


STUDY = Study(
    id="recentring",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 0.5 if params["arm"] == "fold" else 0.01,
    seeds=3,
)

_EXACT = ("recentred", "compressed", "fold")


def _criteria(e: Evidence) -> list[Criterion]:
    exact = [
        Criterion(
            name=f"logits moved, as a share of the largest, {ARMS[role]}",
            values=e.numbers(role, "moved"),
            kind="at_most",
            target=0.0,
            tolerance=1e-10,
            reason="float64: four blocks of sums of a hundred products, each good to 10⁻¹⁴, through norms that may "
            "amplify them tenfold; ample",
            every=True,
        )
        for role in _EXACT
    ]
    return [
        *exact,
        Criterion(
            name="LayerNorms that fold_ turned into RMSNorms",
            values=e.numbers("fold", "norms"),
            kind="near",
            target=BLOCKS + 1,
            tolerance=0.0,
            reason=f"exact: one in each of {BLOCKS} blocks and one before the head",
            every=True,
        ),
        Criterion(
            name=f"logits moved, as a share of the largest, {ARMS['rms']}",
            values=e.numbers("rms", "moved"),
            kind="above",
            target=0.0,
            tolerance=0.01,
            reason="a stream with a mean of the size of its deviation must show: a hundredth is far above rounding",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    worst = {role: number(max(e.numbers(role, "moved")), 1) for role in ARMS}
    return (
        f"logits move by {worst['recentred']} (recentred), {worst['compressed']} (d − 1), {worst['fold']} (fold_, "
        f"{e.first('fold', 'norms')} norms); without recentring by {worst['rms']}"
    )


def _figures(e: Evidence) -> list[Chart]:
    positions = list(range(len(ARMS)))
    moved = [max(e.first(role, "moved"), 2.0**-53) for role in ARMS]
    return [
        Chart(
            caption="How far logits move when LayerNorm becomes RMSNorm, as a share of the largest logit (float64, "
            "first seed).",
            alt="The three exact conversions end near 10⁻¹⁵; RMSNorm without recentring moves the logits by "
            f"{number(moved[-1], 1)} of the largest.",
            panels=[
                Panel(
                    "LayerNorm turned into RMSNorm",
                    "conversion",
                    "largest change / largest logit",
                    [Series("", positions, moved, kind="bars")],
                    y_scale="log",
                    x_names=list(ARMS.values()),
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="K1",
        title="LayerNorm without its centring",
        sentence="The norms share one formula and separate steps: centring, scaling, affine. RMSNorm leaves the "
        "centring out.",
        sentences=(10,),
        source="Article, “One form for all” and RMSNorm; the conversion: Jiang et al. 2023, arXiv 2305.14858.",
        measured=f"A Pre-Norm stack of {BLOCKS} MLP blocks (width {WIDTH}, biases, inputs of mean 1) in float64 with "
        "normkit's layer_norm; the same with rms_norm after the mean was taken off all that writes the stream; with "
        "one coordinate dropped; and nk.fold_ on such a network with γ, β and biases throughout.",
        study=STUDY,
        plays={name: name for name in ARMS},
        literal=Rule(
            text="Centring can be moved into the weights: the recentred stack with RMSNorm, the same with d − 1 "
            "coordinates, and fold_ give the same logits (10⁻¹⁰). Left out without that, logits move by over .01.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="RMSNorm without recentring in the place of the recentred stack.",
            plays={**{name: name for name in ARMS}, "recentred": "rms", "rms": "recentred"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Subtracting the mean is linear, so it can be done to the weights once instead of to every token. "
            "Dividing by the deviation is not, and stays.",
            status="tested",
        ),
    ),
)
