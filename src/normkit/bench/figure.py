"""A roofline-like figure: share of the copy's bandwidth, a panel a pass, operator and dtype.

On a CPU it goes over the bytes moved; on a GPU, whose large cases all move as many, over the width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normkit.bench.measure import Measured
from normkit.bench.peers import Copy, CopyAgain, Normkit, NormkitInto
from normkit.bench.shapes import BEYOND_CACHES

# Okabe and Ito's colours that reach 3 : 1 on white, told apart by marker and dash as well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56606B")
_MARKERS = "osD^vPX*"
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


def write_figure(run: Sequence[Measured], path: Path) -> None:
    """Draw the run into an SVG file, whose text stays text.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    wide = [m for m in run if m.case.gpu and m.case.plane >= BEYOND_CACHES]
    run = wide or run
    rows = list(dict.fromkeys((m.case.which, m.case.op) for m in run))
    dtypes = list(dict.fromkeys(m.case.dtype for m in run))
    looks = {name: i for i, name in enumerate(_names(run))}
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "normkit", "font.size": 9.0}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(1.6 + 3.4 * len(dtypes) + 1.2, 0.9 + 2.5 * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), len(dtypes), squeeze=False, sharex=True, sharey=True)
        for i, (which, op) in enumerate(rows):
            for j, dtype in enumerate(dtypes):
                chosen = [m for m in run if (m.case.which, m.case.op, m.case.dtype) == (which, op, dtype)]
                _panel(grid[i][j], chosen, looks, over_width=bool(wide))
                grid[i][j].set_title(f"{op}, {which}, {dtype}", loc="left", fontsize=9.0)
        figure.supxlabel("elements of a row" if wide else "bytes that must move")
        figure.supylabel("share of copy bandwidth")
        shown = {line.get_label(): line for axes in grid.flat for line in axes.lines if line.get_label() in looks}
        figure.legend([shown[n] for n in looks], list(looks), loc="outside right upper", frameon=False)
        FigureCanvasSVG(figure).print_svg(str(path), metadata={"Date": None, "Title": "Share of copy bandwidth"})


def _names(run: Sequence[Measured]) -> list[str]:
    """Return who is drawn: normkit first, the yardstick not at all, since it is the line at 1."""
    seen = dict.fromkeys(name for m in run for name in m.samples)
    ours = [name for name in (Normkit.name, NormkitInto.name) if name in seen]
    return ours + [name for name in seen if name not in (*ours, Copy.name, CopyAgain.name)]


def _panel(axes: Any, run: Sequence[Measured], looks: dict[str, int], over_width: bool) -> None:
    axes.set_xscale("log", base=2)
    axes.axhline(1.0, color="#56606B", linewidth=1.0, linestyle=(0, (4, 3)))
    for name, i in looks.items():
        points = [(m.case.shape.width if over_width else m.case.moved, m.share(name)) for m in run if name in m.samples]
        points.sort(key=lambda point: point[0])
        if not points:
            continue
        x, y = [at for at, _ in points], [share.median for _, share in points]
        colour = _COLOURS[i % len(_COLOURS)]
        axes.plot(
            x, y, color=colour, marker=_MARKERS[i % len(_MARKERS)], markersize=4.5, linewidth=1.3,
            linestyle=_DASHES[i % len(_DASHES)], label=name,
        )  # fmt: skip
        axes.vlines(x, [s.low for _, s in points], [s.high for _, s in points], color=colour, linewidth=0.9)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}" if over_width else _bytes(value))
    axes.grid(axis="y", color="#E3E6EA", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
