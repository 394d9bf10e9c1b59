"""I3: what many mixing matrices in a row do to a stream of several lanes.

Hyper-connections carry n copies of the residual stream and mix them by a matrix at every sublayer. The path of the
identity through a stack is then a product of matrices, and a product of matrices that are near the identity need not
be. A doubly stochastic matrix has rows and columns that sum to 1, and so has every product of such: it averages
lanes, and neither amplifies nor loses what they carry in common.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import estimate, number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

LANES, STEPS, SPREAD = 4, 60, 0.3
PRODUCTS = 16  # averaged in one measurement, gains by their logarithm
ROUNDS = {"free": 0, "projected": 500, "twenty": 20}


def sinkhorn(logits: Tensor, rounds: int) -> Tensor:
    """Return exp(logits) with columns and rows normalised in turn, rows last: doubly stochastic in the limit."""
    m = logits.exp()
    for _ in range(rounds):
        m = m / m.sum(-2, keepdim=True)
        m = m / m.sum(-1, keepdim=True)
    return m


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"rounds": rounds}) for name, rounds in ROUNDS.items()]


def _gain(m: Tensor) -> Tensor:
    """Return every matrix's largest absolute row or column sum: the most a lane receives, forward or backward."""
    return torch.maximum(m.abs().sum(-1).amax(-1), m.abs().sum(-2).amax(-1))


def _measure(params: Params, bench: Bench) -> Values:
    noise = SPREAD * bench.draws.randn(STEPS, PRODUCTS, LANES, LANES, dtype=torch.float64)
    eye = torch.eye(LANES, dtype=torch.float64)
    # The same noise: added to the identity, or to the logits of a matrix that is mostly the identity.
    mixers = sinkhorn(noise + 4 * eye, params["rounds"]) if params["rounds"] else eye + noise
    product = eye.expand(PRODUCTS, LANES, LANES)
    gains: list[float] = []
    for mixer in mixers:
        product = mixer @ product
        gains.append(float(_gain(product).log10().mean()))
    return {
        "log gain": gains,
        "rows off": float((product.sum(-1) - 1).abs().max()),
        "columns off": float((product.sum(-2) - 1).abs().max()),
        "least entry": float(mixers.min()),
    }


STUDY = Study(id="hyper_connections", arms=_arms, measure=_measure, seconds=lambda params: 0.05, seeds=5)


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name=f"log₁₀ of the product's largest gain, {STEPS} free matrices",
            values=[row[-1] for row in e.values("free", "log gain")],
            kind="above",
            target=1.0,
            tolerance=0.5,
            reason="“explodes” as tenfold at least; doubled, the tolerance asks for a hundredfold",
        ),
        *(
            Criterion(
                name=f"largest deviation of the product's {what} sums from 1, projected",
                values=e.numbers("projected", f"{what}s off"),
                kind="at_most",
                target=0.0,
                tolerance=1e-12,
                reason=f"{STEPS} products and sums of {LANES} terms in float64 add {STEPS} times a few units of "
                f"1.1×10⁻¹⁶, 3×10⁻¹⁴, and each of {STEPS} factors starts from sums as exact as its last division",
                every=True,
            )
            for what in ("row", "column")
        ),
        Criterion(
            name="least entry of a projected matrix",
            values=e.numbers("projected", "least entry"),
            kind="at_least",
            target=0.0,
            tolerance=0.0,
            reason="averages have weights that are not negative",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    free = estimate([row[-1] for row in e.values("free", "log gain")])
    off, short = (
        number(max(*e.numbers(role, "rows off"), *e.numbers(role, "columns off")), 2)
        for role in ("projected", "twenty")
    )
    rounds = ROUNDS["twenty"]
    kept = f"projected, sums stay 1 within {off}, after {rounds} rounds {short}"
    return f"gain of {STEPS} free matrices 10^({free}); {kept}"


def _gains(e: Evidence, role: str) -> list[list[float]]:
    return [[10.0**v for v in row] for row in e.values(role, "log gain")]


def _figures(e: Evidence) -> list[Chart]:
    steps = list(range(1, STEPS + 1))
    return [
        Chart(
            caption=f"Largest absolute row or column sum of the product of the first l mixing matrices of {LANES} "
            "lanes. Bands: min–max over seeds.",
            alt="Free matrices' product grows exponentially; that of doubly stochastic ones stays on one.",
            panels=[
                Panel(
                    "the identity's path",
                    "matrices multiplied",
                    "largest gain",
                    [
                        band("free (HC)", steps, _gains(e, "free")),
                        band("projected (mHC)", steps, _gains(e, "projected")),
                        Series("1", steps, [1.0] * STEPS, kind="reference"),
                    ],
                    y_scale="log",
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="I3",
        title="Lanes mixed by doubly stochastic matrices keep their size",
        sentence="The residual stream is a highway without interruption. Hyper-connections replace its identity by "
        "mixing matrices; projecting these onto doubly stochastic ones is said to keep it.",
        sentences=(39,),
        source="Article, “Pre-Norm”, of the highway; manifold-constrained hyper-connections, arXiv 2512.24880.",
        measured=f"Products of {STEPS} random {LANES}×{LANES} matrices in float64: the identity plus noise of "
        f"deviation {SPREAD}, or the same noise in the logits of a matrix near the identity after Sinkhorn–Knopp, "
        f"{ROUNDS['projected']} rounds of it and, shown beside, {ROUNDS['twenty']}. Random matrices, not trained ones.",
        study=STUDY,
        plays={"free": "free", "projected": "projected", "twenty": "twenty"},
        literal=Rule(
            text="The free product's largest gain exceeds 10 in the geometric mean; the projected product has rows and "
            "columns that sum to 1 to rounding, from matrices without negative entries.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="The arms swapped: free matrices must not pass for projected ones.",
            plays={"free": "projected", "projected": "free", "twenty": "twenty"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Doubly stochastic matrices are closed under multiplication. What such a product does lose is the "
            "lanes' difference: averages of averages become alike. The usual twenty rounds end before the columns have "
            "converged where a matrix is near the identity, since each multiplies the error by the square of its "
            "second singular value, which is near 1; sixty factors add such errors up.",
            status="tested",
        ),
    ),
)
