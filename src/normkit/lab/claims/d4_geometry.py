"""D4: where a norm's outputs lie, and the directions of the input that it does not see.

With ε = 0 layer norm projects onto the hyperplane 1ᵀy = 0 and scales to the sphere ‖y‖ = √d; RMSNorm only scales. At x
the Jacobian is (1/σ)(I − 11ᵀ/d − x̂x̂ᵀ/d), or (1/r)(I − yyᵀ/d) with r the root mean square: projections, so their
singular values are 0 and 1/σ or 1/r, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normkit.functional import layer_norm, rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

ROWS, WIDTH = 6, 60
_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer": lambda x: layer_norm(x, eps=0.0),
    "rms": lambda x: rms_norm(x, eps=0.0),
}
ZEROS = {"layer": 2, "rms": 1}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"norm": name}) for name in _NORMS]


def _divisor(x: Tensor, name: str) -> Tensor:
    return x.std(-1, unbiased=False) if name == "layer" else x.square().mean(-1).sqrt()


def spectrum(norm: Callable[[Tensor], Tensor], row: Tensor, divisor: Tensor) -> list[float]:
    """Return the singular values of the norm's Jacobian at ``row`` times its divisor, ascending."""
    jacobian = torch.autograd.functional.jacobian(norm, row)
    assert isinstance(jacobian, Tensor)
    return [float(s) for s in torch.linalg.svdvals(jacobian * divisor).flip(0)]


def _measure(params: Params, bench: Bench) -> Values:
    name, norm = params["norm"], _NORMS[params["norm"]]
    scale = bench.draws.randn(ROWS, 1, stream="scale", dtype=torch.float64).exp()
    shift = bench.draws.randn(ROWS, 1, stream="shift", dtype=torch.float64)
    x = (scale * (bench.draws.randn(ROWS, WIDTH, dtype=torch.float64) + shift)).to(bench.settings.device)
    spectra = [spectrum(norm, row, divisor) for row, divisor in zip(x, _divisor(x, name), strict=True)]
    values: Values = {"spectrum": spectra[0], "spectra": spectra}
    for kind, y in (("float64", norm(x)), ("float32", norm(x.float()).double())):
        values[f"mean/{kind}"] = float(y.mean(-1).abs().max())
        values[f"least/{kind}"] = float(y.mean(-1).abs().median())
        values[f"radius/{kind}"] = float((y.square().mean(-1).sqrt() - 1).abs().max())
    return values


STUDY = Study(id="geometry", arms=_arms, measure=_measure, seconds=lambda params: 0.05, seeds=3)

_EXACT = 1e-12
_ROUNDING = {"float64": _EXACT, "float32": 8 * 2.0**-24}
_REASONS = {
    "float64": f"float64 rounding: sums over {WIDTH} numbers and a singular value decomposition of size {WIDTH}, "
    f"{WIDTH}²·u = 4×10⁻¹³",
    "float32": "each element is off by less than 3·u of itself, u = 2⁻²⁴, so mean and root mean square are too; twice "
    "that, and a bit",
}


def _zero(name: str, values: list[float], kind: str = "float64") -> Criterion:
    return Criterion(name, values, "at_most", 0.0, _ROUNDING[kind], _REASONS[kind], every=True)


def _spectrum(e: Evidence, role: str, zeros: int) -> list[Criterion]:
    spectra = [row for rows in e.values(role, "spectra") for row in rows]
    return [
        _zero(f"{role}: the {zeros} least singular values of the Jacobian", [max(row[:zeros]) for row in spectra]),
        _zero(
            f"{role}: distance of the others from 1, in units of 1/σ or 1/r",
            [max(abs(v - 1) for v in row[zeros:]) for row in spectra],
        ),
    ]


def _criteria(e: Evidence) -> list[Criterion]:
    kinds = list(_ROUNDING)
    return [
        *(_zero(f"layer norm, {k}: |mean of an output|", e.numbers("layer", f"mean/{k}"), k) for k in kinds),
        *(
            _zero(f"{role} norm, {k}: distance of ‖y‖/√d from 1", e.numbers(role, f"radius/{k}"), k)
            for role in ZEROS
            for k in kinds
        ),
        Criterion(
            name="RMS norm: |mean of an output|, median over rows",
            values=e.numbers("rms", "least/float64"),
            kind="above",
            target=0.0,
            tolerance=0.02,
            reason="an output's mean is μ/r with μ/σ from N(0, 1): half of all rows exceed .5; .02 is far below",
            every=True,
        ),
        *(c for role, zeros in ZEROS.items() for c in _spectrum(e, role, zeros)),
    ]


def _summary(e: Evidence) -> str:
    radius = max(v for role in ZEROS for v in e.numbers(role, "radius/float64"))
    counts = {
        role: {sum(s < _EXACT for s in row) for rows in e.values(role, "spectra") for row in rows} for role in ZEROS
    }
    layer, rms = ("/".join(map(str, sorted(counts[role]))) for role in ("layer", "rms"))
    mean = max(e.numbers("layer", "mean/float64"))
    return (
        f"|mean| ≤ {number(mean, 1)} and ‖y‖ = √d to {number(radius, 1)}; layer norm's Jacobian has {layer} zero "
        f"singular values, RMSNorm's {rms}"
    )


def _figures(e: Evidence) -> list[Chart]:
    shown = 8
    at = list(range(1, shown + 1))
    names = {"layer": "layer norm", "rms": "RMS norm"}
    return [
        Chart(
            caption=f"The {shown} smallest of {WIDTH} singular values of the Jacobian at one row, in units of 1/σ "
            "(layer norm) or 1/r (RMS norm), ε = 0, first seed.",
            alt="Layer norm has two singular values at zero, RMS norm one; all others of both are 1.",
            panels=[
                Panel(
                    "directions a norm does not see",
                    "rank, smallest first",
                    "singular value",
                    [Series(words, at, e.first(role, "spectrum")[:shown]) for role, words in names.items()],
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="D4",
        title="Centre, then scale: the geometry",
        sentence="A norm takes the mean away, which moves the centre of the distribution to the origin, and divides by "
        "the deviation, which makes the scale 1; so LayerNorm wipes out the input's shift and scale.",
        sentences=(10, 26),
        source="Article, “One form for all”, and LayerNorm, “Properties”.",
        measured=f"normkit.layer_norm and rms_norm with ε = 0 on {ROWS} rows of width {WIDTH} with random scales and "
        "means: mean and length of the outputs in float64 and float32, and all singular values of the Jacobian in "
        "float64.",
        study=STUDY,
        plays={"layer": "layer", "rms": "rms"},
        literal=Rule(
            text="Layer norm's outputs have mean 0 and length √d, and its Jacobian exactly two zero singular values; "
            "RMSNorm's have length √d and a mean, and its Jacobian one; all others are 1/σ or 1/r.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The two norms change places: one that does not centre has neither mean 0 nor a second zero.",
            plays={"layer": "rms", "rms": "layer"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="The zero directions are 1 and x̂ for layer norm, x for RMSNorm: moving x along them does not change "
            "the output, which is what being wiped out means. Everything else passes, multiplied by one number.",
            status="tested",
        ),
    ),
)
