"""K2: four identities that let a gain or a norm move, and the parts that break each.

Write N(x) = x/rms(x), and γ for a gain. W·(γ⊙x) = (W·diag γ)·x: a gain folds into the map that reads it. |Qx| = |x|:
N commutes with a rotation Q of the stream. N(x) is x times one number per token, which a map without bias lets through:
W·N(x) = (W·x)/rms(x). And N forgets positive factors: N(W·N(x)) = N(W·x).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.functional import layer_norm, rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

TOKENS, WIDTH, OUT = 32, 48, 40


@dataclass(frozen=True)
class Parts:
    """What the identities are made of, in float64."""

    x: Tensor
    gain: Tensor
    weight: Tensor  # OUT × WIDTH
    offset: Tensor  # of a linear map: OUT
    rotation: Tensor


def _rms(x: Tensor, gain: Tensor | None = None) -> Tensor:
    return rms_norm(x, gain, eps=0.0)


def _root(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).sqrt()


Sides = Callable[[Parts], tuple[Tensor, Tensor]]

# identity → (both sides as they hold, what is changed to break it, both sides then)
IDENTITIES: dict[str, tuple[Sides, str, Sides]] = {
    "fold": (
        lambda p: (_rms(p.x, p.gain) @ p.weight.T, _rms(p.x) @ (p.weight * p.gain).T),
        "scaling the rows of W instead of its columns",
        lambda p: (_rms(p.x, p.gain) @ p.weight.T, _rms(p.x) @ (p.weight * p.gain[:OUT, None]).T),
    ),
    "rotate": (
        lambda p: (_rms(p.x @ p.rotation.T), _rms(p.x) @ p.rotation.T),
        "a gain that is not folded first",
        lambda p: (_rms(p.x @ p.rotation.T, p.gain), _rms(p.x, p.gain) @ p.rotation.T),
    ),
    "rotate-layer": (
        lambda p: (layer_norm(p.x - p.x.mean(-1, keepdim=True), eps=0.0), _rms(p.x - p.x.mean(-1, keepdim=True))),
        "LayerNorm, which subtracts a mean that a rotation does not keep",
        lambda p: (layer_norm(p.x @ p.rotation.T, eps=0.0), layer_norm(p.x, eps=0.0) @ p.rotation.T),
    ),
    "defer": (
        lambda p: (_rms(p.x) @ p.weight.T, (p.x @ p.weight.T) / _root(p.x)),
        "a bias before the division",
        lambda p: (_rms(p.x) @ p.weight.T + p.offset, (p.x @ p.weight.T + p.offset) / _root(p.x)),
    ),
    "cancel": (
        lambda p: (_rms(_rms(p.x) @ p.weight.T), _rms(p.x @ p.weight.T)),
        "a bias between the norms",
        lambda p: (_rms(_rms(p.x) @ p.weight.T + p.offset), _rms(p.x @ p.weight.T + p.offset)),
    ),
}
_NAMES = {
    "fold": "γ into W",
    "rotate": "rotation",
    "rotate-layer": "rotation, LayerNorm",
    "defer": "deferred 1/rms",
    "cancel": "two norms, one",
}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(f"{side}/{name}", {"side": side, "name": name}) for side in ("sound", "broken") for name in IDENTITIES]


def _parts(bench: Bench) -> Parts:
    def draw(name: str, *shape: int) -> Tensor:
        return bench.draws.randn(*shape, stream=name, dtype=torch.float64)

    scales = 0.2 + 3 * torch.rand(TOKENS, 1, generator=bench.draws.shared("scales"), dtype=torch.float64)
    rotation = torch.linalg.qr(draw("rotation", WIDTH, WIDTH)).Q
    parts = (
        scales * (0.5 + draw("x", TOKENS, WIDTH)),
        1 + 0.5 * draw("gain", WIDTH),
        draw("weight", OUT, WIDTH) / WIDTH**0.5,
        draw("offset", OUT),
        rotation,
    )
    return Parts(*(t.to(bench.settings.device) for t in parts))


def _measure(params: Params, bench: Bench) -> Values:
    sound, _, broken = IDENTITIES[params["name"]]
    a, b = (sound if params["side"] == "sound" else broken)(_parts(bench))
    return {"apart": float((a - b).abs().max())}


STUDY = Study(id="folding", arms=_arms, measure=_measure, seconds=lambda params: 0.01, seeds=3)


def _criteria(e: Evidence) -> list[Criterion]:
    exact = [
        Criterion(
            name=f"largest difference of the two sides, {_NAMES[name]}",
            values=e.numbers(f"sound/{name}", "apart"),
            kind="at_most",
            target=0.0,
            tolerance=1e-12,
            reason="float64: two sums of 48 products of size 5, 2·48·5·u = 5×10⁻¹⁴; ample",
            every=True,
        )
        for name in IDENTITIES
    ]
    violated = [
        Criterion(
            name=f"largest difference of the two sides, {_NAMES[name]}, with {why}",
            values=e.numbers(f"broken/{name}", "apart"),
            kind="above",
            target=0.0,
            tolerance=0.01,
            reason="outputs of size 1 that differ by a hundredth are different outputs; rounding is ten orders below",
            every=True,
        )
        for name, (_, why, _) in IDENTITIES.items()
    ]
    return [*exact, *violated]


def _summary(e: Evidence) -> str:
    sound = max(v for name in IDENTITIES for v in e.numbers(f"sound/{name}", "apart"))
    broken = min(v for name in IDENTITIES for v in e.numbers(f"broken/{name}", "apart"))
    return (
        f"{len(IDENTITIES)} identities hold to {number(sound, 1)}; with a condition broken each is off by "
        f"{number(broken, 2)} or more"
    )


def _figures(e: Evidence) -> list[Chart]:
    positions = list(range(len(IDENTITIES)))
    series = [
        Series(
            words,
            positions,
            [max(e.first(f"{side}/{name}", "apart"), 2.0**-53) for name in IDENTITIES],
            kind="bars",
        )
        for side, words in {"sound": "as stated", "broken": "with one condition broken"}.items()
    ]
    return [
        Chart(
            caption="Largest difference between the two sides of each identity (float64, first seed), as stated and "
            "with one condition broken: "
            + "; ".join(f"{_NAMES[name]}: {why}" for name, (_, why, _) in IDENTITIES.items())
            + ".",
            alt="As stated all lie near 10⁻¹⁵; with a condition broken all lie near one.",
            panels=[
                Panel(
                    "what a norm lets through",
                    "identity",
                    "largest difference",
                    series,
                    y_scale="log",
                    x_names=[_NAMES[name] for name in IDENTITIES],
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="K2",
        title="What can be folded, rotated, deferred",
        sentence="A norm is three separate things: subtract the mean, divide by the deviation, apply γ and β.",
        sentences=(10,),
        source="Article, “One form for all”. Gains and rotations: Ashkboos et al. 2024, arXiv 2401.15024 (SliceGPT); "
        "deferral: Graef et al. 2024, arXiv 2407.09577 (FlashNorm).",
        measured=f"Both sides of each identity in float64, with normkit's rms_norm and layer_norm (ε = 0), on {TOKENS} "
        f"random tokens of width {WIDTH} with scales over [.2, 3.2]: γ folded into W, a rotation of the stream, 1/rms "
        "deferred past W, a norm cancelled by the next; and each with one of its conditions broken.",
        study=STUDY,
        plays={"sound": "sound", "broken": "broken"},
        literal=Rule(
            text="Because the steps are separate, each identity holds to 10⁻¹²; with its condition broken each is off "
            "by more than .01.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The broken identities in the place of the sound ones.",
            plays={"sound": "broken", "broken": "sound"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Scaling is one number per token and commutes with every linear map; γ is a diagonal map and folds "
            "into its neighbour; centring is a projection that only maps which keep the mean commute with.",
            status="tested",
        ),
    ),
)
