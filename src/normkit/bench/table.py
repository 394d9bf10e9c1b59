"""The run as people read it: a block a case, the means against their goals, what was lost, and what the noise hides."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from normkit.bench.goals import ALLOWED, Mean, Share, last_level_cache, losses, means, shares
from normkit.bench.measure import Measured
from normkit.bench.peers import Copy, CopyAgain, Normkit
from normkit.bench.ratios import Ratio
from normkit.bench.roofline import Roofline, rooflines
from normkit.environment import usable_cores

_HEAD = ("contender", "µs", "× normkit", "of copy")
_GPU_HEAD = (*_HEAD, "GB/s")


def case_block(measured: Measured, threads: int) -> list[str]:
    """Return a case: its heading, a line a contender, a line for each that is missing."""
    case = measured.case
    where = case.device if case.gpu else f"{threads} thread{'s' if threads > 1 else ''}"
    heading = f"{case.op} · {case.which} · {case.shape} · {case.dtype} · moves {amount(case.moved)} · {where}"
    head = _GPU_HEAD if case.gpu else _HEAD
    rows = [[_marked(measured, n), *_cells(measured, n)] for n in measured.samples if n != CopyAgain.name]
    why: dict[str, list[str]] = {}
    for name, reason in {**measured.absent, **measured.failed}.items():
        why.setdefault(reason, []).append(name)
    rows += [["; ".join(names), "–", reason, *[""] * (len(head) - 3)] for reason, names in why.items()]
    return [heading, *columns(head, rows), ""]


def _marked(measured: Measured, name: str) -> str:
    return f"{name} (to out=)" if name in measured.samples and measured.base(name) != Normkit.name else name


def _cells(measured: Measured, name: str) -> tuple[str, ...]:
    times = sorted(measured.samples[name].seconds)
    middle = times[len(times) // 2]
    ratio = measured.ratio(name)
    if name == Normkit.name or ratio is None:
        against = "1" if name == Normkit.name else "–"
    else:
        against = against_one(ratio, measured.noise.again)
    cells = microseconds(middle), against, f"{100 * measured.share(name).median:.0f} %"
    if not measured.case.gpu:
        return cells
    moved = measured.case.copied if name == Copy.name else measured.case.moved
    return *cells, f"{moved / middle / 1e9:.0f}"


def against_one(ratio: Ratio, floor: float) -> str:
    """Return a ratio with as many digits as its interval supports, or what can be said where it may be 1."""
    if ratio.differs(floor):
        return plus_minus(ratio)
    if ratio.high <= ALLOWED and ratio.low >= 1 / ALLOWED:
        return f"no difference ({ratio.median:.2f})"
    return f"not decided ({ratio.low:.2g} to {ratio.high:.2g})"


def plus_minus(ratio: Ratio) -> str:
    """Return the median ± half its interval, both to the interval's first digit; the interval itself where it is wide.

    Example:
        >>> plus_minus(Ratio(4.123, 4.01, 4.22)), plus_minus(Ratio(12.3, 10.0, 16.0)), plus_minus(Ratio(2.0, 1.1, 5.0))
        ('4.1 ± 0.1', '12 ± 3', '2 (1.1 to 5)')
    """
    half = (ratio.high - ratio.low) / 2
    if not half > 0:
        return f"{ratio.median:.3g}"
    if half > ratio.median / 3:
        return f"{ratio.median:.2g} ({ratio.low:.2g} to {ratio.high:.2g})"
    decimals = min(4, max(0, -math.floor(math.log10(half))))
    if round(half, decimals) == 0:
        return f"{ratio.median:.{decimals}f}"
    return f"{ratio.median:.{decimals}f} ± {half:.{decimals}f}"


def microseconds(seconds: float) -> str:
    """Return a time in µs with three digits."""
    value = 1e6 * seconds
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def amount(size: float) -> str:
    """Return bytes as people read them."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines; the first column to the left, numbers to the right, reasons as long as they are."""
    short = [row for row in rows if row[1] != "–"]
    widths = [max(len(row[i]) for row in (head, *(rows if i == 0 else short))) for i in range(len(head))]
    return [
        "  ".join(
            f"{cell:<{width}}" if i == 0 or (row[1] == "–" and i == 2) else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, ["─" * width for width in widths], *rows)
    ]


def summary(run: Sequence[Measured]) -> list[str]:
    """Return the end of the table: means, shares, losses."""
    lines: list[str] = []
    found = means(run)
    if found:
        lines.append("normkit is faster by, in the geometric mean:")
        lines += columns(("pass, operator, peer", "mean", "cases", "goal"), [_mean_row(mean) for mean in found])
        lines.append("")
    held = shares(run, last_level_cache())
    if held:
        lines.append("Share of the copy's bandwidth into a given output:")
        head = ("dtype, data", "lowest", "mean", "cases", "goal")
        lines += columns(head, [_share_row(share) for share in held])
        lines.append("")
    roofs = rooflines(run)
    if roofs:
        lines.append("Share of the copy's bandwidth, tensors beyond any cache:")
        lines += columns(("operator, pass, shape", "share", "a row", "goal"), [_roof_row(r) for r in roofs])
        lines.append("")
    lost = losses(run)
    lines.append(f"Slower than a peer by more than {100 * (ALLOWED - 1):.0f} %: {len(lost) or 'nowhere'}")
    lines += [f"  {loss.measured.case}: {loss.peer} takes {plus_minus(loss.ratio)} of normkit's time" for loss in lost]
    return lines


def _goal(goal: float | None, reached: bool | None, text: str) -> str:
    return "" if goal is None else f"≥ {text} {'reached' if reached else 'MISSED'}"


def _mean_row(mean: Mean) -> list[str]:
    goal = _goal(mean.goal, mean.reached, "" if mean.goal is None else f"{mean.goal:g}")
    return [f"{mean.which} {mean.op}, {mean.peer}", plus_minus(mean.ratio), str(mean.cases), goal]


def _share_row(share: Share) -> list[str]:
    where = "within the last-level cache" if share.cached else "beyond the cache"
    lowest = f"{100 * share.lowest:.0f} % ({share.where})"
    goal = "" if share.goal is None else _goal(share.goal, share.reached, f"{100 * share.goal:.0f} %")
    return [f"{share.dtype}, {where}", lowest, f"{100 * share.mean:.0f} %", str(share.cases), goal]


def _roof_row(roof: Roofline) -> list[str]:
    case, goal = roof.case, "" if roof.goal is None else f"{100 * roof.goal:.0f} %"
    name = f"{case.op} {case.which} {case.shape} {case.dtype}"
    held = "" if roof.held is None else "held" if roof.held else "split"
    return [name, f"{100 * roof.share.median:.0f} %", held, _goal(roof.goal, roof.reached, goal)]


def noise_warning(run: Sequence[Measured], threads: int, rounds: int, load: float | None) -> str | None:
    """Return what was noisy and what to do about it, or None on a quiet machine."""
    noisy = [measured for measured in run if measured.noise.noisy]
    if not noisy:
        return None
    worst = [measured.noise for measured in noisy]
    remedies = ["close other programs" + ("" if load is None else f" (load average {load:.1f} before the run)")]
    remedies.append(f"take more rounds (--rounds {2 * rounds + 1}, now {rounds})")
    cores = usable_cores()
    if noisy[0].case.gpu:
        remedies[0] = "let nothing else use the GPU (nvidia-smi lists what does)"
    elif threads > 1:
        remedies.append("use one thread (--threads 1), which waits for no other")
    elif cores > 1 and hasattr(os, "sched_getaffinity"):
        remedies.append("pin the process (taskset -c 0 normkit bench …)")
    return (
        f"warning: the machine was noisy in {len(noisy)} of {len(run)} cases. Times of the same copy spread by up to "
        f"{100 * max(n.spread for n in worst):.0f} % between rounds, drifted by up to "
        f"{100 * max(n.drift for n in worst):.0f} %, and two copies differed by up to "
        f"{100 * max(n.again for n in worst):.0f} %. To see smaller differences: {'; '.join(remedies)}."
    )
