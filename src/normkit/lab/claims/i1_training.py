"""I1b: DyT, Derf and SeeDNorm in a norm's place, 200 steps into the training of a small language model.

They differ from RMSNorm in what scale does to output and gradient (I1). Whether that costs anything is for training to
say, and this says it of the beginning only: two blocks, 200 steps, one learning rate, α from 1, the best of 0.01, 0.1,
0.3, 0.5, 1 and 2 in one run of each before.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.corpus import CONTEXT, HELDOUT_TELLS
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.model.seednorm import SeeDNorm
from normkit.lab.model.training import CURVE, Schedule, train_model
from normkit.lab.model.transformer import TransformerConfig, build, put_norms
from normkit.lab.numbers import estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion
from normkit.modules import Derf, DyT, RMSNorm

LAYERS, WIDTH, STEPS, LR = 2, 64, 200, 3e-3
ALPHA, UNTUNED = 1.0, 0.01
KINDS: dict[str, Callable[..., nn.Module]] = {"rms": RMSNorm, "seed": SeeDNorm, "dyt": DyT, "derf": Derf}
LABELS = {"rms": "RMSNorm", "seed": "SeeDNorm", "dyt": "DyT", "derf": "Derf"}


def _arms(settings: Settings) -> list[Arm]:
    rows = 4 if settings.mode == "quick" else 12
    return [
        *(Arm(kind, {"kind": kind, "alpha": None, "rows": rows}) for kind in ("rms", "seed")),
        *(Arm(kind, {"kind": kind, "alpha": ALPHA, "rows": rows}) for kind in ("dyt", "derf")),
        Arm("untuned", {"kind": "dyt", "alpha": UNTUNED, "rows": rows}),
    ]


def _measure(params: Params, bench: Bench) -> Values:
    assert bench.corpus is not None
    make, alpha = KINDS[params["kind"]], params["alpha"]

    def norm(width: int) -> nn.Module:
        return make(width) if alpha is None else make(width, alpha=alpha)

    model = put_norms(build(TransformerConfig(layers=LAYERS, width=WIDTH), bench.draws), norm)
    schedule = Schedule(LR, steps=STEPS, rows=params["rows"])
    run = train_model(model, schedule, bench.corpus, bench.draws, bench.settings.device)
    learnt = [float(m.alpha.detach()) for m in model.modules() if isinstance(m, DyT)]
    return {"heldout": run.heldout, "curve": run.curve, "outcome": run.outcome, "learnt alpha": learnt}


STUDY = Study(
    id="pointwise_training",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: STEPS * (0.003 + 0.001 * params["rows"]),
    seeds=5,
    corpus=True,
    full_only=True,
)


def _behind(e: Evidence, role: str) -> list[float]:
    return e.paired(role, "rms", "heldout")


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"{LABELS[role]}: held-out loss minus RMSNorm's after {STEPS} steps, paired (nats/byte)",
            values=_behind(e, role),
            kind="at_most",
            target=0.05,
            tolerance=0.01,
            reason=HELDOUT_TELLS,
        )
        for role in ("dyt", "derf", "seed")
    ]


def _summary(e: Evidence) -> str:
    parts = ", ".join(f"{LABELS[role]} {estimate(_behind(e, role))}" for role in ("dyt", "derf", "seed"))
    return f"held-out loss over RMSNorm's {estimate(e.numbers('rms', 'heldout'))}: {parts} nats/byte"


def _figures(e: Evidence) -> list[Chart]:
    def curve(role: str) -> Series:
        rows = e.values(role, "curve")
        points = min(map(len, rows))
        return band(LABELS[role], [CURVE * (i + 0.5) for i in range(points)], [row[:points] for row in rows])

    roles = ("rms", "seed", "dyt", "derf")
    ends = "; ".join(f"{LABELS[r]} {estimate(e.numbers(r, 'heldout'))}" for r in roles)
    return [
        Chart(
            caption=f"Training loss, the mean of every {CURVE} steps. Bands: min–max over seeds.",
            alt=f"Falling curves, one for each function. Held-out losses after {STEPS} steps: {ends}.",
            panels=[Panel("the first 200 steps", "step", "training loss (nats/byte)", [curve(r) for r in roles])],
        )
    ]


_PLAYS = {"rms": "rms", "dyt": "dyt", "derf": "derf", "seed": "seed"}

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="I1b",
        title="Training with DyT, Derf or SeeDNorm in a norm's place",
        sentence="Norms before every sublayer fix the scale that it reads. It is said that they can be left out: DyT, "
        "Derf and SeeDNorm, with α tuned, are to train as well as RMSNorm, within 0.05 nats.",
        sentences=(9,),
        source="Article, “Normalization and the residual stream”, of what norms are for; Zhu et al. 2025, arXiv "
        "2503.10622; Chen et al. 2025, arXiv 2512.10938; arXiv 2510.22777.",
        measured=f"Pre-Norm networks of {LAYERS} blocks (width {WIDTH}, SwiGLU, RoPE, Xavier), the same weights and "
        f"batches under each function in the place of every norm; {STEPS} steps of 12 × {CONTEXT} bytes of real text, "
        f"Adam at {LR:g}; α starts from {ALPHA:g}, the best of six in a run of each. "
        "Held-out loss. What long training comes to is not measured.",
        study=STUDY,
        plays=_PLAYS,
        literal=Rule(
            text=f"After {STEPS} steps the held-out loss under each of the three is at most 0.05 nats above RMSNorm's.",
            origin="sentence",
            criteria=_criteria,
        ),
        control=Control(
            text="α untuned, a hundredth of what DyT starts from: sublayers are handed next to nothing.",
            plays={**_PLAYS, "dyt": "untuned", "derf": "untuned"},
        ),
        planted=Control(
            text="RMSNorm itself in the three's place: what is as good as RMSNorm must pass.",
            plays=dict.fromkeys(_PLAYS, "rms"),
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="DyT starts from outputs smaller than a norm's, and from gradients that end where entries are large; "
            "α, one number a layer, takes time to learn the scale that a norm reads off each token. Reports of equal "
            "loss are of runs hundreds of times as long, so this may be a late start rather than a worse end.",
            status="conjecture",
        ),
    ),
)
