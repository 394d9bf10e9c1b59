"""Write the tables in docs/ from the tables in the code: `python docs/generate.py`. A test holds them equal.

`python docs/generate.py errors` measures and writes errors.md, in minutes; its last digits are the machine's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from normkit.conventions import NAMED
from normkit.coverage import COVERAGE
from normkit.kernels.rounding import result_dtype
from normkit.lab.model.zoo import ZOO
from normkit.placement import WIRINGS
from normkit.spec import NormSpec

HERE = Path(__file__).parent


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def wirings() -> str:
    """Return docs/wirings.md."""
    rows = [
        [
            f"`{row.name}`",
            f"`nk.{row.class_name}`",
            row.formula,
            "yes" if row.final_norm else "no",
            row.init.text,
            row.used_by,
            row.source,
        ]
        for row in WIRINGS.values()
    ]
    head = ["name", "module", "update of the stream", "final norm", "initialisation", "used by", "source"]
    constants = [
        [str(depth), f"{c.alpha:.4f}", f"{c.beta:.4f}"]
        for depth in (6, 12, 24, 48, 100, 1000)
        for c in [WIRINGS["deepnorm"].constants(depth, "decoder-only")]
    ]
    others = [[f"`{row.name}`", row.formula, row.final_norm, row.init, row.source] for row in ZOO.values()]
    gains = [
        [str(depth), f"{ZOO['sub-ln'].wiring.constants(depth, 'decoder-only').beta:.4f}"] for depth in (6, 12, 24, 48)
    ]
    return (
        "# Wirings\n\nGenerated from `normkit.placement.WIRINGS` and `normkit.lab.model.zoo.ZOO` by "
        "`python docs/generate.py`. Each N is a norm of its own.\n\n"
        + table(head, rows)
        + "\n\nDeepNorm's constants for a decoder-only (or encoder-only) stack:\n\n"
        + table(["layers", "α", "β"], constants)
        + "\n\n## In the lab alone\n\n"
        "These reach into a sublayer, change with depth, carry a second stream, scale a branch, or interpolate, so "
        "they are no modules\naround any sublayer. `normkit.lab.model.zoo.build_zoo(name, config, draws)` makes the "
        "lab's Transformer of L blocks with one;\n`normkit lab run H1` measures each of them.\n\n"
        + table(["name", "update of the stream", "final norm", "initialisation", "source"], others)
        + "\n\nSub-LN's gain for a decoder-only (or encoder-only) stack:\n\n"
        + table(["layers", "√ln(2L)"], gains)
        + "\n"
    )


def conventions() -> str:
    """Return docs/conventions.md."""

    def mixed(spec: NormSpec) -> str:
        weight = None if spec.weight == "none" else torch.float32
        return str(result_dtype(spec, torch.bfloat16, weight, None)).removeprefix("torch.")

    rows = [[f"`nk.{name}`", f"`{spec.code}`", mixed(spec)] for name, spec in NAMED.items()]
    coverage = [
        [
            row.name,
            "(" + ", ".join(row.axes) + ")",
            row.statistics,
            "yes" if row.causal else "no",
            "yes" if row.running else "no",
        ]
        for row in COVERAGE.values()
    ]
    head = ["norm", "statistics over", "number of statistics", "causal", "running statistics"]
    return (
        "# Conventions\n\nGenerated from `normkit.conventions` and `normkit.coverage` by `python docs/generate.py`.\n"
        "The parts of a code are explained in `normkit.NormSpec`. The last column is the dtype of the result for "
        "bfloat16 activations\nand float32 weights, as under `torch.autocast`; it is the same outside.\n\n"
        + table(["name", "code", "bfloat16 x, float32 weight"], rows)
        + "\n\n## Coverage: which elements of (N, L, C) share a statistic\n\n"
        + table(head, coverage)
        + "\n"
    )


PAGES = {"wirings.md": wirings, "conventions.md": conventions}


def errors() -> str:
    """Return docs/errors.md."""
    from normkit.testing.error_page import page
    from normkit.testing.errors import table as measure

    return page(measure())


if __name__ == "__main__":
    if sys.argv[1:] == ["errors"]:
        (HERE / "errors.md").write_text(errors())
        raise SystemExit
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
