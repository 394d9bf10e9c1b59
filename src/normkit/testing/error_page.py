"""The error table as text: for the terminal, and for docs/errors.md."""

from __future__ import annotations

from collections.abc import Sequence

from normkit.testing.errors import QUANTITIES, Cell
from normkit.testing.ulp import Error

HEAD = """# Errors

Written by `python docs/generate.py errors`; `normkit errors` prints the same figures for the machine it runs on
(`--json` for programs, `--quick` for fewer widths). Inputs are seeded, so they repeat.

Each cell is the largest (mean) error against float64, in ULP of the output's dtype. An error is measured in the ULP
of the numbers that a result is made of: of y, x̂·γ (with x̂ at least 1 for centred norms) or β, whichever is
larger; of a gradient, the sum of the absolute values of the terms it adds up. Elementwise ULP would say nothing
where terms cancel: an element that equals the mean has x̂ = 0, of which any rounding is infinitely many ULP. Where
nothing cancels the two are the same. A correctly rounded result has at most 0.5. Specs that round before they weigh
(LLAMA, T5) declare two roundings in half types, so up to about 1.5 of y, and of dw, which sees the rounded x̂, is
what they ask for. The reference's dx rounds where autograd of the models' own code does; the fused kernels' dx is
rounded once.

*Random* rows have widths 1, 3, 127, 768, 1000 and 4096. *Adversarial* rows, widths 1000 and 4096, are 1e4 ± .005,
mean 2000, 256 with one 255, one outlier of 1e3, constant, zero, 1e-20, 1e18, and 1e-42, whose results are
subnormal. There, numbers are multiples of 1.4e-45 and 1/√ε multiplies what rounding left of the mean: a few hundred
of those multiples are the large figures under dw of centred float32 norms, 1e-43 in size. Every figure lies within
the bound derived in `normkit.testing.truth` and `normkit.testing.gates`; `tests/testing/test_errors.py` holds it there.
"""


def cell_text(error: Error) -> str:
    """Return largest (mean), three digits each."""
    return f"{error.largest:.3g} ({error.mean:.2g})"


def grid(cells: Sequence[Cell], backend: str, *, hard: bool) -> list[list[str]]:
    """Return one table as rows of text: operator, dtype, and a column per quantity."""
    found: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in cells:
        if cell.backend == backend:
            found.setdefault((cell.operator, cell.dtype), {})[cell.quantity] = cell
    rows = [["operator", "dtype", *QUANTITIES]]
    for (operator, dtype), line in found.items():
        texts = [cell_text(line[q].hard if hard else line[q].random) if q in line else "–" for q in QUANTITIES]
        rows.append([operator, dtype, *texts])
    return rows


def sections(cells: Sequence[Cell]) -> list[tuple[str, list[list[str]]]]:
    """Return titles with tables, in reading order."""
    backends = list(dict.fromkeys(cell.backend for cell in cells))
    kinds = (("random rows", False), ("adversarial rows", True))
    return [(f"{backend}, {kind}", grid(cells, backend, hard=hard)) for backend in backends for kind, hard in kinds]


def page(cells: Sequence[Cell]) -> str:
    """Return docs/errors.md."""
    parts = [HEAD]
    for title, rows in sections(cells):
        lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
        parts.append(
            f"## {title[0].upper()}{title[1:]}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
        )
    return "\n".join(parts)


def text(cells: Sequence[Cell]) -> str:
    """Return the tables in columns, with what each shows above it."""
    parts = ["Error against float64, largest (mean), in ULP of the output's dtype."]
    for title, rows in sections(cells):
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        parts.append("\n".join([title, *lines]))
    return "\n\n".join(parts)
