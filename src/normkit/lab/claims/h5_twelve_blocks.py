"""Twelve blocks under every compromise between Post-Norm and Pre-Norm: what each comes to, and how it looks inside.

All start from the same draws and read the same batches; none has a warm-up. Each is trained at both ends of a decade of
learning rates and judged at its better one. Arms are named contender/warm-up/rate. Every network is looked into before
its first step and after its last, on the same text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from normkit.lab.claim import Arm, Bench, Params, Study, Values
from normkit.lab.claims.f3_map import values_of
from normkit.lab.draws import Draws
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.inside import deletion_costs, look_inside
from normkit.lab.model.training import Schedule, train_model
from normkit.lab.model.transformer import Transformer, TransformerConfig
from normkit.lab.model.zoo import build_zoo
from normkit.lab.settings import Settings

LAYERS, WIDTH, STEPS, ROWS = 12, 32, 100, 4
RATES = (1e-3, 1e-2)
LOOKED_AT = 8  # windows of training text
JUDGED_BY = 64  # held-out windows on which blocks are left out


@dataclass(frozen=True)
class Contender:
    """How a network of the table is made, and what it is called."""

    label: str
    wiring: str = "pre"
    norm: str = "rms"
    qk_norm: bool = False
    scaled: bool = False


CONTENDERS: dict[str, Contender] = {
    "pre": Contender("Pre-Norm"),
    "post": Contender("Post-Norm", wiring="post"),
    "deepnorm": Contender("DeepNorm", wiring="deepnorm"),
    "sandwich": Contender("Sandwich", wiring="sandwich"),
    "reordered": Contender("branch alone", wiring="reordered"),
    "reordered-qk": Contender("branch alone, QK-norm", wiring="reordered", qk_norm=True),
    "mix-ln": Contender("Mix-LN", wiring="mix-ln"),
    "lns": Contender("LayerNorm Scaling", wiring="lns"),
    "keel": Contender("KEEL", wiring="keel"),
    "dyt": Contender("DyT", norm="dyt"),
    "derf": Contender("Derf", norm="derf"),
    "pre-scaled": Contender("Pre-Norm, scaled init", scaled=True),
    "lns-scaled": Contender("LayerNorm Scaling, scaled init", wiring="lns", scaled=True),
}
SHORTENED = ("pre", "lns", "mix-ln", "deepnorm")  # contenders whose blocks are left out one by one


def made(contender: Contender, draws: Draws) -> Transformer:
    """Return the fresh network. A scaled init divides every sublayer's last map by √(2L), as GPT-2 has it."""
    config = TransformerConfig(layers=LAYERS, width=WIDTH, norm=contender.norm, qk_norm=contender.qk_norm)
    model = build_zoo(contender.wiring, config, draws)
    if contender.scaled:
        with torch.no_grad():
            for name, linear in model.weights().items():
                if name.endswith(("/output", "/down")):
                    linear.weight /= (2 * LAYERS) ** 0.5
    return model


def _arms(settings: Settings) -> list[Arm]:
    return [
        Arm(f"{name}/warmup-0/lr-{lr:g}", {"contender": name, "lr": lr, "steps": STEPS})
        for name in CONTENDERS
        for lr in RATES
    ]


def _measure(params: Params, bench: Bench) -> Values:
    assert bench.corpus is not None
    model = made(CONTENDERS[params["contender"]], bench.draws).to(bench.settings.device)
    windows = random_windows(bench, bench.draws, LOOKED_AT)
    fresh = look_inside(model, windows)
    schedule = Schedule(params["lr"], steps=params["steps"], rows=ROWS)
    run = train_model(model, schedule, bench.corpus, bench.draws, bench.settings.device)
    values = values_of(run) | {f"fresh {key}": row for key, row in asdict(fresh).items()}
    if run.outcome != "diverged":
        values |= {f"trained {key}": row for key, row in asdict(look_inside(model, windows)).items()}
        if params["contender"] in SHORTENED:
            values["deletion"] = deletion_costs(model, bench.corpus, JUDGED_BY)
    return values


STUDY = Study(
    id="twelve_blocks",
    arms=_arms,
    measure=_measure,
    seconds=lambda params: 5.0 if params["contender"] in SHORTENED else 4.4,
    seeds=3,
    corpus=True,
    full_only=True,
)
