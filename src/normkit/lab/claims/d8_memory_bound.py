"""D8: a norm against a copy of the same numbers, fused into one sweep and operator by operator.

A fused norm reads the activations from memory once and writes them once, as a copy does. The article's LayerNorm, run
operator by operator, reads them for the mean and for the variance and reads and writes them for each of − μ, /√,
·γ and + β: ten sweeps where a copy makes two.

All contestants run in every block, in an order drawn for it; a block gives one ratio of least times, and the median
over blocks is the measurement. On a CPU the clock is the thread's own, which stands while a neighbour has the core.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from normkit.functional import layer_norm, rms_norm
from normkit.kernels.registry import use
from normkit.lab.claim import Arm, Bench, Claim, Control, Evidence, Explanation, Params, Rule, Study, Values
from normkit.lab.figures import Chart, Panel, Series
from normkit.lab.numbers import number
from normkit.lab.settings import Settings
from normkit.lab.verdict import Criterion, interval

TOKENS, WIDTH, BLOCKS = 8192, 1024, 5  # 32 MiB of float32 in and as much out: more than a core's own caches
EPS = 1e-5
BYTES = 2 * 4 * TOKENS * WIDTH  # read once, written once
CALLS = {"copy": 4, "fused": 4, "rms": 4, "chain": 1}  # in a block; the slow one stands far from any rule
CONTESTANTS = ("copy", "fused", "rms", "chain")
_NAMES = {"copy": "copy", "fused": "LayerNorm, fused", "rms": "RMSNorm, fused", "chain": "LayerNorm, by operators"}

Runs = dict[str, Callable[[], object]]


def _arms(settings: Settings) -> list[Arm]:
    real = {name: name for name in CONTESTANTS}
    return [Arm("real", real), Arm("swapped", {**real, "fused": "chain", "chain": "fused"})]


def by_operators(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the article's LayerNorm, one operator after the other."""
    mean = x.mean(dim=-1, keepdim=True)
    var = x.var(dim=-1, unbiased=False, keepdim=True)
    return (x - mean) / torch.sqrt(var + EPS) * weight + bias


def contestants(x: Tensor, weight: Tensor, bias: Tensor) -> Runs:
    """Return what is timed, by name. Fused means normkit's fastest backend, whatever NORMKIT_BACKEND says."""
    out = torch.empty_like(x)

    def fused() -> object:
        with use("auto"):
            return layer_norm(x, weight, bias, eps=EPS, out=out)

    def rms() -> object:
        with use("auto"):
            return rms_norm(x, weight, eps=EPS, out=out)

    return {
        "copy": lambda: out.copy_(x),
        "fused": fused,
        "rms": rms,
        "chain": lambda: by_operators(x, weight, bias),
    }


def _seconds(run: Callable[[], object], device: str) -> float:
    """Return the time of one call: of this thread on a CPU, by the wall on a device that works on its own."""
    if not device.startswith("cuda"):
        start = time.thread_time()
        run()
        return time.thread_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _measure(params: Params, bench: Bench) -> Values:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads wait for the slowest: with one busy neighbour the wait is what gets timed
    try:
        with torch.no_grad():
            return _compare(params, bench)
    finally:
        torch.set_num_threads(threads)


def _compare(params: Params, bench: Bench) -> Values:
    device = bench.settings.device
    x = bench.draws.randn(TOKENS, WIDTH).to(device)
    weight, bias = (bench.draws.randn(WIDTH, stream=s).to(device) for s in ("weight", "bias"))
    found = contestants(x, weight, bias)
    runs = {role: found[params[role]] for role in CONTESTANTS}
    for run in runs.values():
        run()  # the first calls allocate and pick kernels
    block = [role for role in CONTESTANTS for _ in range(CALLS[params[role]])]
    generator = bench.draws.own("order")
    least: list[dict[str, float]] = []
    for _ in range(BLOCKS):
        least.append(dict.fromkeys(CONTESTANTS, math.inf))
        for i in torch.randperm(len(block), generator=generator).tolist():
            least[-1][block[i]] = min(least[-1][block[i]], _seconds(runs[block[i]], device))

    def ratio(a: str, b: str) -> float:
        return statistics.median(times[a] / times[b] for times in least)

    return {
        "fused/copy": ratio("fused", "copy"),
        "chain/fused": ratio("chain", "fused"),
        "rms/fused": ratio("rms", "fused"),
        **{f"ms/{role}": 1e3 * statistics.median(times[role] for times in least) for role in CONTESTANTS},
    }


STUDY = Study(id="memory_bound", arms=_arms, measure=_measure, seconds=lambda params: 1.1, seeds=5, timing=True)


def _logarithms(e: Evidence, key: str) -> list[float]:
    return [math.log(ratio) for ratio in e.numbers("machine", key)]  # ratios average as logarithms


def _criteria(e: Evidence) -> list[Criterion]:
    return [
        Criterion(
            name="ln of fused LayerNorm's time over that of a copy",
            values=_logarithms(e, "fused/copy"),
            kind="at_most",
            target=math.log(2),
            tolerance=math.log(1.5),
            reason="memory-bound: moving the numbers takes half of the time or more; the speed of a copy itself "
            "differs by half between levels of cache and neighbours' loads",
        ),
        Criterion(
            name="ln of the time of separate operators over that of the fused kernel",
            values=_logarithms(e, "chain/fused"),
            kind="above",
            target=math.log(1.5),
            tolerance=math.log(1.2),
            reason="ten sweeps against two would be a factor 5; a cache that serves some of them may leave less, "
            "but one and a half must remain, by more than a shared machine's noise",
        ),
        Criterion(
            name="ln of fused RMSNorm's time over fused LayerNorm's",
            values=_logarithms(e, "rms/fused"),
            kind="at_most",
            target=math.log(1.05),
            tolerance=math.log(1.1),
            reason="it does less work on the same bytes; a twentieth for the clock, a tenth for a shared machine",
        ),
    ]


def _typical(e: Evidence, key: str) -> float:
    return math.exp(interval(_logarithms(e, key)).mean)


def _summary(e: Evidence) -> str:
    rates = {role: BYTES / interval(e.numbers("machine", f"ms/{role}")).mean / 1e6 for role in ("copy", "fused")}
    return (
        f"fused LayerNorm {number(_typical(e, 'fused/copy'), 2)} × a copy ({number(rates['fused'], 2)} of "
        f"{number(rates['copy'], 2)} GB/s), separate operators {number(_typical(e, 'chain/fused'), 2)} × fused, RMS/LN "
        f"{number(_typical(e, 'rms/fused'), 2)}"
    )


def _figures(e: Evidence) -> list[Chart]:
    positions = list(range(len(CONTESTANTS)))
    rows = [e.numbers("machine", f"ms/{role}") for role in CONTESTANTS]
    middle = [interval(row).mean for row in rows]
    told = ", ".join(f"{_NAMES[r]} {number(m, 2)}" for r, m in zip(CONTESTANTS, middle, strict=True))
    return [
        Chart(
            caption=f"Time of a call on {TOKENS} × {WIDTH} float32 numbers, one thread (mean over seeds of "
            f"the median over {BLOCKS} blocks).",
            alt=f"Milliseconds: {told}.",
            panels=[
                Panel(
                    "a norm beside a copy",
                    "what is run",
                    "time of a call (ms)",
                    [Series("", positions, middle, kind="bars")],
                    x_names=[_NAMES[role] for role in CONTESTANTS],
                )
            ],
        )
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="D8",
        title="Norms are memory-bound, fusing pays",
        sentence="LayerNorm computes little and reads and writes the activations in full several times: it is bound by "
        "memory. Merging its steps into one kernel saves memory traffic.",
        sentences=(28, 32),
        source="Article, LayerNorm, last paragraph of “Properties”; RMSNorm, “Engineering details”, third point.",
        measured=f"On {TOKENS} × {WIDTH} float32 numbers and one thread: a copy, normkit's fused layer_norm and "
        "rms_norm into a given output, and the article's LayerNorm run operator by operator; ratios of processor "
        f"times within {BLOCKS} blocks in random order, the median over blocks.",
        study=STUDY,
        plays={"machine": "real"},
        literal=Rule(
            text="Fused LayerNorm takes no more than twice a copy's time (memory-bound), separate operators take over "
            "1.5 times the fused kernel's (several passes), and fused RMSNorm no more than 1.05 times fused "
            "LayerNorm's.",
            origin="sentence",
            criteria=_criteria,
        ),
        control=Control(
            text="The fused kernel and the separate operators change places.",
            plays={"machine": "swapped"},
        ),
        summary=_summary,
        figures=_figures,
        explanation=Explanation(
            text="Ten sweeps over the activations instead of two, and new memory for every intermediate result, which "
            "the system has to provide page by page.",
            status="conjecture",
        ),
    ),
)
