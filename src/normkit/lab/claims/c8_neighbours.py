"""C8: what the other tokens of a batch do to one token's output. A statistic of the token alone lets them do nothing.

The others are replaced by numbers of another mean and scale, so that a batch norm must notice: one channel's output
then goes from (x − μ)/σ to (x − μ′)/σ′.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normkit.functional import batch_norm, layer_norm, rms_norm
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

N, L, C, EPS = 4, 9, 44, 1e-5
OTHER_MEAN, OTHER_SCALE = 2.0, 3.0
DTYPES = (torch.float32, torch.bfloat16)
CHANGES = ("replaced", "exchanged", "padded", "spoilt")
_WORDS = {
    "replaced": "replaced",
    "exchanged": "in another order",
    "padded": "zero",
    "spoilt": "not a number",
}
_NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "batch": lambda x, w, b: batch_norm(x, None, None, w, b, training=True, eps=EPS),
    "layer": lambda x, w, b: layer_norm(x, w, b, eps=EPS),
    "rms": lambda x, w, b: rms_norm(x, w, b, eps=EPS),
}


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"norm": name}) for name in _NORMS]


def _changed(tokens: Tensor, other: Tensor, order: Tensor) -> dict[str, Tensor]:
    """Return (N·L, C) tokens with all but the first changed, by name of the change."""
    own = tokens[:1]
    rest = {
        "replaced": other[1:],
        "exchanged": tokens[1:][order],
        "padded": torch.zeros_like(tokens[1:]),
        "spoilt": torch.full_like(tokens[1:], torch.nan),
    }
    return {name: torch.cat([own, new]) for name, new in rest.items()}


def _measure(params: Params, bench: Bench) -> Values:
    norm, device = _NORMS[params["norm"]], bench.settings.device
    tokens = bench.draws.randn(N * L, C).to(device)
    other = OTHER_MEAN + OTHER_SCALE * bench.draws.randn(N * L, C, stream="others").to(device)
    weight, bias = (bench.draws.randn(C, stream=name).to(device) for name in ("weight", "bias"))
    order = torch.randperm(N * L - 1, generator=bench.draws.shared("order")).to(device)
    values: Values = {}
    for dtype in DTYPES:
        kind = str(dtype)[6:]
        w, b = weight.to(dtype), bias.to(dtype)
        before = norm(tokens.to(dtype).view(N, L, C), w, b)[0, 0]
        for name, new in _changed(tokens.to(dtype), other.to(dtype), order).items():
            after = norm(new.view(N, L, C), w, b)[0, 0]
            moved = (after != before).sum()  # true for NaN as well
            values[f"bits/{name}/{kind}"] = int(moved)
            change = (after.double() - before.double()).square().mean().sqrt()
            values[f"change/{name}/{kind}"] = float(change) if bool(change.isfinite()) else None
    return values


STUDY = Study(id="neighbours", arms=_arms, measure=_measure, seconds=lambda params: 0.02, seeds=3)

_TOKENWISE = ("layer", "rms")


def _criteria(e: Evidence) -> list[Criterion]:
    kinds = [str(dtype)[6:] for dtype in DTYPES]
    moved = [
        Criterion(
            name=f"across the batch, others {_WORDS['replaced']}, {kind}: rms change of a token's output",
            values=e.numbers("across", f"change/replaced/{kind}"),
            kind="above",
            target=0.0,
            tolerance=0.1,
            reason=f"replacing N(0, 1) by N({OTHER_MEAN:g}, {OTHER_SCALE:g}²) takes x to (x − 2)/3, a change of "
            "rms √(4/9 + 4/9) = .94 under weights of unit size; a ninth of that is far above any rounding",
            every=True,
        )
        for kind in kinds
    ]
    still = [
        Criterion(
            name=f"{role} norm, {kind}: elements of the token's output with other bits, all changes of the others",
            values=_bits(e, role, kind),
            kind="at_most",
            target=0.0,
            tolerance=0.0,
            reason="exact: the same numbers in the same order of summation have the same bits",
            every=True,
        )
        for role in _TOKENWISE
        for kind in kinds
    ]
    return [*moved, *still]


def _bits(e: Evidence, role: str, kind: str) -> list[float]:
    rows = [e.numbers(role, f"bits/{name}/{kind}") for name in CHANGES]
    return [max(column) for column in zip(*rows, strict=True)]


def _summary(e: Evidence) -> str:
    least = min(e.numbers("across", "change/replaced/float32"))
    most = max(max(_bits(e, role, "float32")) for role in _TOKENWISE)
    return (
        f"other neighbours change a token's output under batch norm by {number(least, 2)} rms or more; under layer "
        f"and RMS norm {number(most)} of {C} elements"
    )


def _figures(e: Evidence) -> list[Chart]:
    finite = ("replaced", "exchanged", "padded")  # NaN has no height: its row is in the alternative text
    at = list(range(len(finite)))

    def heights(role: str) -> list[float]:
        return [float(e.first(role, f"change/{name}/float32")) for name in finite]

    spoilt = {role: int(e.first(role, "bits/spoilt/float32")) for role in ("across", *_TOKENWISE)}
    names = {"across": "batch norm", "layer": "layer norm", "rms": "RMS norm"}
    lost = ", ".join(f"{spoilt[role]} under {words}" for role, words in names.items())
    return [
        Chart(
            caption=f"Change of one token's output when the {N * L - 1} others of its batch change (float32, first "
            f"seed). Where the others are not a number, so many of its {C} elements become so too: {lost}.",
            alt="Batch norm's output changes by order 1 when the others are replaced or become padding and hardly "
            "when they only change places; layer and RMS norm's stays at zero every time.",
            panels=[
                Panel(
                    "what the neighbours do",
                    "the other tokens",
                    "rms change of the output",
                    [Series(words, at, heights(role), kind="points") for role, words in names.items()],
                    x_names=[_WORDS[name] for name in finite],
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="C8",
        title="A token's neighbours do not reach it",
        sentence="When the content of a batch changes, BatchNorm's statistics change; a Transformer needs a norm that "
        "depends on nothing but a single token's own features, and that is LayerNorm.",
        sentences=(20, 23),
        source="Article, “The limits of BatchNorm”, its conclusion and the end of its code.",
        measured=f"One token of a batch of {N}·{L} tokens with {C} channels, in float32 and bfloat16, with random "
        "weight and bias, through normkit's batch_norm (training), layer_norm and rms_norm: its output before and "
        "after all other tokens are replaced, reordered, set to zero, and set to NaN, compared bit by bit.",
        study=STUDY,
        plays={"across": "batch", "layer": "layer", "rms": "rms"},
        literal=Rule(
            text="With other neighbours batch norm gives the token another output, by more than .1 rms; layer and RMS "
            "norm give it the same bits whatever the others are, NaN included.",
            origin="sentence",
            criteria=_criteria,
        ),
        control=Control(
            text="Batch norm and layer norm change places.",
            plays={"across": "layer", "layer": "batch", "rms": "rms"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="A batch norm sees its neighbours through two numbers a channel: their order hardly moves it, their "
            "content does, and one NaN anywhere reaches every token.",
            status="tested",
        ),
    ),
)
