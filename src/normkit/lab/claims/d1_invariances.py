"""D1: what a norm cannot see. Exact with ε = 0, so float64 settles it to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.conventions import TORCH_LAYER_NORM, TORCH_RMS_NORM
from normkit.functional import normalize
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

TOKENS, FEATURES, WIDTH = 64, 32, 48
SHIFT, SCALES = 10.0, (1e-3, 0.5, 7.0, 1e3)
OFFSETS = tuple(10.0**k for k in range(-1, 5))
NORMS = ("layer", "rms", "batch")
_NAMES = {"layer": "layer", "rms": "RMS", "batch": "batch"}
# Does the output stay the same? Layer, RMS and batch norm of a = W·x.
TABLE: dict[str, tuple[bool, bool, bool]] = {
    "weight matrix scaled": (True, True, True),
    "weight matrix shifted, one vector added to every row": (True, False, False),
    "one row of the weight matrix scaled": (False, False, True),
    "all inputs scaled": (True, True, True),
    "all inputs shifted by one vector": (False, False, True),
    "a single input scaled": (True, True, False),
}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"norm": name}) for name in NORMS]


def _norm(a: Tensor, name: str) -> Tensor:
    spec = TORCH_RMS_NORM if name == "rms" else TORCH_LAYER_NORM
    return normalize(a, spec, axes=0 if name == "batch" else -1, eps=0.0)


def _changed(x: Tensor, weight: Tensor, vector: Tensor) -> dict[str, Tensor]:
    """Return a = W·x after each change of `TABLE`."""
    first_row, first_input = weight.clone(), x.clone()
    first_row[0] *= 3
    first_input[0] *= 3
    return {
        "weight matrix scaled": x @ (3 * weight).T,
        "weight matrix shifted, one vector added to every row": x @ (weight + vector).T,
        "one row of the weight matrix scaled": x @ first_row.T,
        "all inputs scaled": (3 * x) @ weight.T,
        "all inputs shifted by one vector": (x + vector) @ weight.T,
        "a single input scaled": first_input @ weight.T,
    }


def _measure(params: Params, bench: Bench) -> Values:
    name, device = params["norm"], bench.settings.device
    x = bench.draws.randn(TOKENS, FEATURES, dtype=torch.float64).to(device)
    weight = bench.draws.randn(WIDTH, FEATURES, stream="weight", dtype=torch.float64).to(device)
    vector = bench.draws.randn(FEATURES, stream="vector", dtype=torch.float64).to(device)
    a = x @ weight.T
    y = _norm(a, name)

    def change(other: Tensor, sign: float = 1.0) -> float:
        return float((_norm(other, name) - sign * y).abs().max())

    unit = a / a.std()
    unshifted = {dtype: _norm(unit.to(dtype), name) for dtype in (torch.float32, torch.float64)}
    return {
        "shift": change(a + SHIFT),
        "scale": max(change(alpha * a) for alpha in SCALES),
        "flip": max(change(-alpha * a, sign=-1.0) for alpha in SCALES),
        **{f"table/{row}": change(other) for row, other in _changed(x, weight, vector).items()},
        **{
            f"offset/{str(dtype)[6:]}": [float((_norm(unit.to(dtype) + c, name) - start).abs().max()) for c in OFFSETS]
            for dtype, start in unshifted.items()
        },
    }


STUDY = Study(id="invariances", arms=_arms, measure=_measure, seconds=lambda params: 0.005, seeds=3)

_EXACT = 1e-12
_EXACT_REASON = (
    "float64 rounding: sums of 32 to 64 products and numbers of size 10 beside a deviation near 6, u = "
    "1.1×10⁻¹⁶: 64·u·(1 + 10) = 8×10⁻¹⁴, outputs up to 4"
)
_CHANGED_REASON = "outputs of unit variance change by order 1; 10⁻² lies far from that and from rounding"


def _stays(e: Evidence, role: str, key: str, words: str) -> Criterion:
    return Criterion(words, e.numbers(role, key), "at_most", 0.0, _EXACT, _EXACT_REASON, every=True)


def _literal(e: Evidence) -> list[Criterion]:
    return [
        _stays(e, "norm", "shift", f"change under x + {SHIFT:g}·1"),
        _stays(e, "norm", "scale", "change under α·x, α = 10⁻³ … 10³"),
        _stays(e, "norm", "flip", "distance of LN(−α·x) from −LN(x)"),
    ]


def _table(e: Evidence) -> list[Criterion]:
    return [
        _stays(e, role, f"table/{row}", f"{role} norm, {row}: change")
        if stays
        else Criterion(
            f"{role} norm, {row}: change",
            e.numbers(role, f"table/{row}"),
            "above",
            0.0,
            0.01,
            _CHANGED_REASON,
            every=True,
        )
        for row, cells in TABLE.items()
        for role, stays in zip(NORMS, cells, strict=True)
    ]


def _summary(e: Evidence) -> str:
    shift, scale = (number(max(e.numbers("norm", key)), 1) for key in ("shift", "scale"))
    return f"float64, ε = 0: output moves by {shift} under a shift of {SHIFT:g}, {scale} under scales 10⁻³ … 10³"


def _table_summary(e: Evidence) -> str:
    cells = [(e.numbers(r, f"table/{k}"), s) for k, row in TABLE.items() for r, s in zip(NORMS, row, strict=True)]
    stay = max(v for values, stays in cells if stays for v in values)
    move = min(v for values, stays in cells if not stays for v in values)
    return (
        f"{sum(s for _, s in cells)} of {len(cells)} cells are invariant, to {number(stay, 1)}; the others change by "
        f"{number(move, 2)} or more"
    )


def _figures(e: Evidence) -> list[Chart]:
    return [
        Chart(
            caption="Change of the output when c standard deviations are added to every feature (first "
            "seed, ε = 0). Dashed: half a unit in the last place of c, the rounding of x + c itself.",
            alt="On double logarithmic axes the float32 errors rise in proportion to c, close to the "
            f"dashed line, up to {e.first('norm', 'offset/float32')[-1]:.0e} at ten thousand; the float64 errors do "
            "the same nine orders lower.",
            panels=[
                Panel(
                    "shift invariance in finite precision",
                    "shift c (standard deviations)",
                    "largest change of the output",
                    [
                        Series("float32", OFFSETS, e.first("norm", "offset/float32"), kind="points"),
                        Series("float64", OFFSETS, e.first("norm", "offset/float64"), kind="points"),
                        Series("c·2⁻²⁴", OFFSETS, [c * 2**-24 for c in OFFSETS], kind="reference"),
                        Series("c·2⁻⁵³", OFFSETS, [c * 2**-53 for c in OFFSETS], kind="reference"),
                    ],
                    x_scale="log",
                    y_scale="log",
                )
            ],
        )
    ]


def _table_figures(e: Evidence) -> list[Chart]:
    floor = 2.0**-53  # no zero on a logarithmic axis
    rows = list(range(len(TABLE)))
    series = [
        Series(f"{_NAMES[r]} norm", rows, [max(floor, e.first(r, f"table/{k}")) for k in TABLE], kind="bars")
        for r in NORMS
    ]
    names = ["W scaled", "W shifted", "row of W scaled", "data scaled", "data shifted", "one input scaled"]
    return [
        Chart(
            caption="Change of N(W·x) under six changes of weights or data (first seed, ε = 0, float64).",
            alt="Each bar ends either near 10⁻¹⁵, invariant, or near 1, not invariant.",
            panels=[Panel("invariances", "what is changed", "largest change", series, y_scale="log", x_names=names)],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="D1",
        title="LayerNorm ignores shift and scale",
        sentence="LN(x + c·1) = LN(x): adding a constant to all components changes nothing; and LN(αx) = "
        "LN(x) for α > 0.",
        sentences=(24, 25),
        source="Article, LayerNorm, “Properties”.",
        measured=f"LayerNorm with ε = 0 in float64 of {TOKENS} rows of {WIDTH} numbers, against the same "
        f"rows plus {SHIFT:g}, times α, and times −α. What ε does to the second equation is claim D2.",
        study=STUDY,
        plays={"norm": "layer"},
        literal=Rule(
            text="The output moves by no more than 10⁻¹² under the shift and under α = 10⁻³ … 10³, and "
            "changes its sign, to 10⁻¹², under −α (which is why the sentence needs α > 0).",
            origin="sentence",
            criteria=_literal,
        ),
        control=Control(text="RMSNorm in its place: without centring the shift must show.", plays={"norm": "rms"}),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Subtracting the mean removes what is common to all components, dividing by the deviation "
            "what multiplies them. RMSNorm, which only divides, keeps the second property and loses the "
            "first.",
            status="tested",
        ),
    ),
    Claim(
        id="D1b",
        title="The table of invariances",
        sentence="Invariance to shift and scale, the two properties above, said of weights, data and "
        "single inputs, and of RMS and batch norm beside LayerNorm.",
        sentences=(24, 25),
        source="Article, LayerNorm, “Properties”; Zhang and Sennrich 2019, arXiv 1910.07467, table of invariances.",
        measured="Layer, RMS and batch norm with ε = 0 in float64 of a = W·x, after scaling or shifting "
        "the weight matrix, one of its rows, all inputs or a single one.",
        study=STUDY,
        plays={name: name for name in NORMS},
        literal=Rule(
            text="Each of the 18 cells is invariant to 10⁻¹² or changes by more than 10⁻², as algebra "
            "says: centring forgives a shift of the weights, per-channel statistics one of the data, "
            "per-token statistics the scale of a single input.",
            origin="theory",
            criteria=_table,
        ),
        control=Control(
            text="Each norm in its neighbour's place: the wrong column must not fit.",
            plays={"layer": "rms", "rms": "batch", "batch": "layer"},
        ),
        summary=_table_summary,
        figures=_table_figures,
        explanation=Explanation(
            text="A change is invisible exactly when it acts alike on all elements that share a statistic.",
            status="tested",
        ),
    ),
)
