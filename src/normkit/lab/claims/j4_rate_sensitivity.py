"""J4: what QK-norm does to how much a network's end depends on its learning rate.

Sensitivity is Wortsman et al.'s: over a sweep of learning rates, the mean of min(loss, loss before training) less the
best loss of the sweep. A network that trains equally well at every rate has 0; one that trains at a single rate and
learns nothing at the others has nearly all of what there is to learn.
"""

from __future__ import annotations

import math

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.claims.f3_map import values_of
from normkit.lab.corpus import HELDOUT_TELLS
from normkit.lab.figures import Chart, Figure, Panel, Series, band
from normkit.lab.grid.figures import outcome_map
from normkit.lab.grid.reading import Side
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.inside import look_inside
from normkit.lab.model.training import Schedule, heldout_loss, plateau_of, train_model
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.numbers import estimate
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

LAYERS, WIDTH, STEPS, ROWS = 4, 32, 100, 4
SWEEP = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
RATES = tuple(f"warmup-0/lr-{lr:g}" for lr in SWEEP)
UNTRAINED = "untrained"
LABELS = {"with": "QK-norm", "without": "no QK-norm"}
LOOKED_AT = 8  # windows on which the largest logit is read


def _arms(settings: Settings) -> list[Arm]:
    trained = [
        Arm(f"{name}/{rate}", {"qk_norm": name == "with", "lr": lr, "steps": STEPS})
        for name in LABELS
        for rate, lr in zip(RATES, SWEEP, strict=True)
    ]
    return [*trained, Arm(UNTRAINED, {"qk_norm": False, "lr": 0.0, "steps": 0})]


def _measure(params: Params, bench: Bench) -> Values:
    """Train, judge, and look for the largest attention logit of all blocks afterwards."""
    assert bench.corpus is not None
    config = TransformerConfig(layers=LAYERS, width=WIDTH, qk_norm=params["qk_norm"])
    model = build(config, bench.draws).to(bench.settings.device)
    start = heldout_loss(model, bench.corpus)
    if not params["steps"]:
        return {"heldout": start, "start": start, "outcome": plateau_of(bench.corpus, ROWS).outcome(start)}
    windows = random_windows(bench, bench.draws, LOOKED_AT)
    fresh = max(look_inside(model, windows).logits)
    schedule = Schedule(params["lr"], steps=params["steps"], rows=ROWS)
    run = train_model(model, schedule, bench.corpus, bench.draws, bench.settings.device)
    logit = math.nan if run.outcome == "diverged" else max(look_inside(model, windows).logits)
    return values_of(run) | {
        "start": start,
        "fresh logit": fresh,
        "logit": logit if math.isfinite(logit) else None,
    }


STUDY = Study(
    id="rate_sensitivity",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 2.0 if params["steps"] else 0.3,
    seeds=3,
    corpus=True,
    full_only=True,
)


def reached(e: Evidence, role: str) -> list[list[float]]:
    """Return, per seed, what each rate of the sweep comes to: held-out loss, or the loss before training if lower.

    A run that diverged is where it started.
    """
    columns: list[list[float]] = []
    for rate in RATES:
        pairs = zip(e.values(f"{role}/{rate}", "heldout"), e.numbers(f"{role}/{rate}", "start"), strict=True)
        columns.append([start if loss is None else min(float(loss), start) for loss, start in pairs])
    return [list(row) for row in zip(*columns, strict=True)]


def sensitivity(e: Evidence, role: str) -> list[float]:
    """Return, per seed, the mean over the sweep of what it comes to, less the best of it."""
    return [sum(row) / len(row) - min(row) for row in reached(e, role)]


def largest(e: Evidence, role: str) -> list[float]:
    """Return, per seed, the largest logit after training at any rate of the sweep that did not diverge."""
    columns = [e.values(f"{role}/{rate}", "logit") for rate in RATES if e.arm(f"{role}/{rate}") != UNTRAINED]
    return [max((v for v in row if v is not None), default=math.nan) for row in zip(*columns, strict=True)]


def _criteria(e: Evidence) -> list[Criterion]:
    pairs = zip(sensitivity(e, "with"), sensitivity(e, "without"), strict=True)
    flatter = Criterion(
        name="sensitivity to the learning rate with QK-norm minus that without, paired (nats/byte)",
        values=[a - b for a, b in pairs],
        kind="below",
        target=0.0,
        tolerance=0.01,
        reason=HELDOUT_TELLS,
    )
    logits = zip(largest(e, "with"), largest(e, "without"), strict=True)
    lower = Criterion(
        name="ln of the largest logit after training, with QK-norm over without",
        values=[math.log(a / b) for a, b in logits],
        kind="below",
        target=0.0,
        tolerance=math.log(1.25),
        reason="a logit within a quarter of another would not be called bounded; doubled, that is a factor of 1.6",
    )
    return [flatter, lower]


def _summary(e: Evidence) -> str:
    told = [f"{estimate(sensitivity(e, role))} {words}" for role, words in (("with", "with"), ("without", "without"))]
    logits = [estimate(largest(e, role)) for role in ("with", "without")]
    return f"sensitivity {told[0]}, {told[1]} nats/byte; largest logit {logits[0]} and {logits[1]}"


def _figures(e: Evidence) -> list[Figure]:
    def logits(role: str) -> Series:
        found: list[tuple[float, list[float]]] = []
        for rate, lr in zip(RATES, SWEEP, strict=True):
            row = [float(v) for v in e.values(f"{role}/{rate}", "logit") if v is not None]
            if row:
                found.append((lr, row))
        means = [sum(row) / len(row) for _, row in found]
        return Series(
            LABELS[role], [lr for lr, _ in found], means, [min(r) for _, r in found], [max(r) for _, r in found]
        )

    told = {role: estimate(sensitivity(e, role)) for role in LABELS}
    chart = Chart(
        caption=f"{LAYERS} blocks after {STEPS} steps at each rate of the sweep: held-out loss (where a run diverged "
        "or got worse, the loss before training), and the largest attention logit of those that did not diverge. "
        "Bands: min–max over seeds.",
        alt=f"Loss over the learning rate and largest logit over it, a line for each. Sensitivity: "
        f"{told['with']} nats per byte with QK-norm, {told['without']} without.",
        panels=[
            Panel(
                "what training comes to",
                "learning rate",
                "held-out loss (nats/byte)",
                [band(LABELS[role], SWEEP, reached(e, role)) for role in LABELS],
                x_scale="log",
            ),
            Panel(
                "attention",
                "learning rate",
                "largest logit",
                [logits(role) for role in LABELS],
                x_scale="log",
                y_scale="log",
            ),
        ],
    )
    return [outcome_map(e, {LABELS[role]: Side(role, RATES) for role in LABELS}), chart]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="J4",
        title="QK-norm and the learning rate",
        sentence="Queries and keys get a norm of their own after the projection: it bounds attention's logits, and a "
        "network trains alike over a wider range of learning rates.",
        sentences=(46,),
        source="Article, “QK-Norm”; Wortsman et al. 2023, arXiv 2309.14322, whose measure of sensitivity this is.",
        measured=f"Pre-Norm networks of {LAYERS} blocks (width {WIDTH}, SwiGLU, RMSNorm, RoPE, Xavier), with and "
        f"without QK-norm per head, the same weights and batches, {STEPS} steps of {ROWS} × 64 bytes of real text at "
        f"{', '.join(f'{lr:g}' for lr in SWEEP)}, no warm-up. Sensitivity: mean over the sweep of held-out loss, or of "
        "the loss before training where that is lower, less the best of the sweep. Largest logit of all blocks on "
        f"{LOOKED_AT} windows after training.",
        study=STUDY,
        plays={"with": "with", "without": "without"},
        literal=Rule(
            text="With QK-norm the sensitivity is lower by more than 0.01 nats, and without it the largest logit after "
            "training at any rate is higher by more than a quarter.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The arms swapped: what is more sensitive must not pass for less.",
            plays={"with": "without", "without": "with"},
        ),
        planted=Control(
            text="At the sweep's two largest rates the runs without QK-norm are taken to have learnt nothing: the same "
            "judgement must find that QK-norm widens the range.",
            plays={
                "with": "with",
                "without": "without",
                **{f"without/{rate}": UNTRAINED for rate in RATES[-2:]},
            },
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Large rates let queries and keys grow, and scores with their product; a saturated softmax passes "
            "hardly a gradient. QK-norm takes their size out of the scores (J1).",
            status="conjecture",
        ),
    ),
)
