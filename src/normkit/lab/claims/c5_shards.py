"""C5: a batch norm spread over devices must exchange statistics; what has to travel, and that it loses nothing.

Sets of numbers merge by count, mean and M2 = Σ(x − mean)² (Chan, Golub and LeVeque 1983): one count and two numbers a
channel from every shard. Backward, dx = γ/σ·(g − mean(g) − x̂·mean(g·x̂)) with means over the whole batch: two
more sums a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from normkit.functional import batch_norm, layer_norm, moments
from normkit.kernels.statistics import Moments
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series, band
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion

SHARDS = (1, 2, 3, 4, 5, 6, 7, 8)  # sequences on each of eight devices, unequal on purpose
L, C, EPS = 16, 48, 1e-5
OFFSETS = tuple(10.0**k for k in range(5))


def _arms(settings: Settings) -> list[Arm]:
    return [Arm(name, {"norm": name}) for name in ("batch", "layer")]


def packed(found: Moments) -> Tensor:
    """Return what a device sends: the count, C means, C sums of squared deviations."""
    return torch.cat([found.count[:1].to(found.mean.dtype), found.mean + found.remainder, found.m2])


def unpacked(message: Tensor) -> Moments:
    """Return the moments that a message holds."""
    mean, m2 = message[1:].chunk(2)
    count = message[0].round().to(torch.int64).expand(mean.shape)
    return Moments(count, mean, m2, torch.zeros_like(mean))


def merged(messages: Sequence[Tensor]) -> Moments:
    """Return the moments of everything that the messages tell of."""
    return reduce(Moments.merge, [unpacked(message) for message in messages])


def _batch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return batch_norm(x, None, None, weight, bias, training=True, eps=EPS)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x, weight, bias, eps=EPS)


def _backward(shards: Sequence[Tensor], cotangents: Sequence[Tensor], found: Moments, weight: Tensor) -> list[Tensor]:
    """Return each shard's dx from its own numbers, the merged statistics and two summed numbers a channel."""
    mean, root = found.mean + found.remainder, (found.variance() + EPS).sqrt()
    normed = [(x - mean) / root for x in shards]
    scaled = [g * weight for g in cotangents]
    sums = [torch.stack([g.sum((0, 1)), (g * y).sum((0, 1))]) for g, y in zip(scaled, normed, strict=True)]
    both = torch.stack(sums).sum(0) / found.count  # the second message: 2C numbers a device
    return [(g - both[0] - y * both[1]) / root for g, y in zip(scaled, normed, strict=True)]


def _synchronized(x: Tensor, parameters: tuple[Tensor, Tensor], cotangent: Tensor, truth: Tensor) -> Values:
    """Return how far shards that exchange messages stay from the whole batch, and how much they send."""
    weight, bias = parameters
    shards, cotangents = x.split(SHARDS), cotangent.split(SHARDS)
    messages = [packed(moments(shard, axes=(0, 1))) for shard in shards]
    found, whole = merged(messages), moments(x, axes=(0, 1))
    mean, var = found.mean + found.remainder, found.variance()
    y = torch.cat([batch_norm(shard, mean, var, weight, bias, training=False, eps=EPS) for shard in shards])
    (dx,) = torch.autograd.grad(_batch(x.requires_grad_(), weight, bias), x, cotangent)
    back = torch.cat(_backward([s.detach() for s in shards], cotangents, found, weight))
    return {
        "merged": max(float((mean - whole.mean).abs().max()), float((var - whole.variance()).abs().max())),
        "output": float((y - truth).detach().abs().max()),
        "gradient": float((back - dx).abs().max()),
        "numbers": messages[0].numel(),
    }


def _by_sums(shards: Sequence[Tensor]) -> Tensor:
    """Return the variance from Σx and Σx² alone, the message that does not keep its accuracy."""
    count = sum(s.shape[0] * s.shape[1] for s in shards)
    mean = torch.stack([s.sum((0, 1)) for s in shards]).sum(0) / count
    return torch.stack([s.square().sum((0, 1)) for s in shards]).sum(0) / count - mean.square()


def _offsets(x: Tensor) -> Values:
    """Return the float32 variance's relative error when numbers stand around an offset, by either message."""
    errors: dict[str, list[float]] = {"merge": [], "sums": []}
    for offset in OFFSETS:
        narrow = (x + offset).float()
        truth = moments(narrow.double(), axes=(0, 1)).variance()
        shards = narrow.split(SHARDS)
        found = merged([packed(moments(s, axes=(0, 1))) for s in shards]).variance()
        for name, got in (("merge", found), ("sums", _by_sums(shards))):
            errors[name].append(float(((got.double() - truth) / truth).abs().max()))
    return {f"offset/{name}": row for name, row in errors.items()}


def _measure(params: Params, bench: Bench) -> Values:
    device, norm = bench.settings.device, {"batch": _batch, "layer": _layer}[params["norm"]]
    x = bench.draws.randn(sum(SHARDS), L, C, dtype=torch.float64).to(device)
    cotangent = bench.draws.randn(sum(SHARDS), L, C, stream="cotangent", dtype=torch.float64).to(device)
    weight, bias = (bench.draws.randn(C, stream=s, dtype=torch.float64).to(device) for s in ("weight", "bias"))
    truth = norm(x, weight, bias)
    alone = [norm(shard, weight, bias) for shard in x.split(SHARDS)]
    gaps = [float((a - t).square().mean().sqrt()) for a, t in zip(alone, truth.split(SHARDS), strict=True)]
    values: Values = {"alone": gaps, "least": min(gaps), "most": max(gaps)}
    if params["norm"] == "batch":
        return values | _offsets(x) | _synchronized(x, (weight, bias), cotangent, truth)
    # A norm of single tokens sends nothing, and what its shards compute is already the answer.
    return values | {"merged": 0.0, "output": max(gaps), "gradient": 0.0, "numbers": 0}


STUDY = Study(id="shards", arms=_arms, measure=_measure, seconds=lambda params: 0.1, seeds=3)

_EXACT = 1e-12
_EXACT_REASON = (
    "float64 rounding: a sum over 576 numbers of order 1 is off by at most 576·u = 6×10⁻¹⁴, in outputs and "
    "gradients times weights up to 4"
)


def _criteria(e: Evidence) -> list[Criterion]:
    exact = {
        "merged": "mean and variance merged from the messages, against those of the whole batch",
        "output": "outputs of shards under the merged statistics, against the whole batch",
        "gradient": "dx from merged statistics and two more sums a channel, against autograd on the whole batch",
    }
    return [
        Criterion(
            name="rms change of the output when every device uses its own statistics, least over devices",
            values=e.numbers("crossing", "least"),
            kind="above",
            target=0.0,
            tolerance=0.01,
            reason=f"by theory near √(1/m + 1/2m) = .1 on the largest shard of m = {max(SHARDS) * L} tokens; .01 is "
            "far from that and from rounding",
            every=True,
        ),
        *(
            Criterion(words, e.numbers("crossing", key), "at_most", 0.0, _EXACT, _EXACT_REASON, every=True)
            for key, words in exact.items()
        ),
        Criterion(
            name="numbers a device sends for the forward pass of one layer",
            values=e.numbers("crossing", "numbers"),
            kind="near",
            target=2 * C + 1,
            tolerance=0.0,
            reason="a count, C means and C sums of squared deviations: counted, not estimated",
            every=True,
        ),
        Criterion(
            name="layer norm: rms change of the output on its own device",
            values=e.numbers("token", "most"),
            kind="at_most",
            target=0.0,
            tolerance=_EXACT,
            reason="a token's statistics are all on its device; only the order of its sums might differ",
            every=True,
        ),
    ]


def _summary(e: Evidence) -> str:
    least, most = min(e.numbers("crossing", "least")), max(e.numbers("crossing", "most"))
    off = max(e.numbers("crossing", "output"))
    return (
        f"own statistics change outputs by {number(least, 2)} to {number(most, 2)}; {2 * C + 1} numbers a device for "
        f"{C} channels bring them back, to {number(off, 1)}"
    )


def _figures(e: Evidence) -> list[Chart]:
    tokens = [n * L for n in SHARDS]
    law = [(1.5 * (1 / m - 1 / sum(tokens))) ** 0.5 for m in tokens]

    def offset(key: str) -> Series:
        label = {"merge": "count, mean, M2", "sums": "count, Σx, Σx²"}[key]
        rows = e.values("crossing", f"offset/{key}")
        return band(label, OFFSETS, [[max(v, 1e-9) for v in row] for row in rows])

    return [
        Chart(
            caption="Left: what a device's own statistics do to its outputs (root mean square; dashed: theory for "
            "γ of unit size). Right: the largest relative error of a float32 variance merged from eight messages, by "
            "the mean of the numbers; Σx and Σx² cancel. Bands: min–max over seeds.",
            alt="Left: the error under batch norm falls from .3 on the smallest shard to .1 on the largest, layer "
            "norm lies at zero. Right: merging mean and M2 ends near 10⁻⁵, the means' rounding; sums lose all.",
            panels=[
                Panel(
                    "no synchronization",
                    "tokens on the device",
                    "rms change of the output",
                    [
                        band("batch norm", tokens, e.values("crossing", "alone")),
                        band("layer norm", tokens, e.values("token", "alone")),
                        Series("√(3/2·(1/m − 1/M))", tokens, law, kind="reference"),
                    ],
                ),
                Panel(
                    "what to send",
                    "mean of the numbers (σ)",
                    "relative error of the variance",
                    [offset("merge"), offset("sums")],
                    x_scale="log",
                    y_scale="log",
                ),
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="C5",
        title="Devices must exchange statistics",
        sentence="In distributed training BatchNorm's statistics have to be synchronized across devices, which costs "
        "communication.",
        sentences=(19,),
        source="Article, “The limits of BatchNorm”, fifth point; Chan, Golub and LeVeque 1983 for the merge.",
        measured=f"A batch of {sum(SHARDS)} sequences of {L} tokens and {C} channels in float64, split into "
        f"{len(SHARDS)} unequal shards in one process: outputs under each shard's own statistics, and under those "
        "merged by normkit.Moments.merge from the messages, forward and backward, against the whole batch; and the "
        "length of a message.",
        study=STUDY,
        plays={"crossing": "batch", "token": "layer"},
        literal=Rule(
            text=f"Own statistics change every shard's outputs; {2 * C + 1} = 2C + 1 numbers a device (count, means, "
            "M2) make outputs those of the whole batch to 10⁻¹², and 2C more make its gradient; layer norm needs none.",
            origin="theory",
            criteria=_criteria,
        ),
        control=Control(
            text="Layer norm in batch norm's place and the reverse: there is nothing to synchronize.",
            plays={"crossing": "layer", "token": "batch"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="The statistic of a channel runs over tokens on every device. The bytes are few, 4C + 1 numbers a "
            "layer and step with the backward pass; the price is that every layer waits twice for the slowest device. "
            "That wait was not measured: one process has no devices to wait for.",
            status="conjecture",
        ),
    ),
)
