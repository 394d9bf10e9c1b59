"""`normkit errors`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def errors(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer widths.")] = False,
) -> None:
    """Print every operator's error against float64 in ULP: y and gradients, random and adversarial rows.

    The fused kernels are compiled on first use, which takes minutes the first time and seconds from then on.

    \b
    Examples:
      normkit errors --quick
      normkit errors --json | jq '.[] | select(.share > 0.9)'
    """
    from normkit.testing.error_page import text
    from normkit.testing.errors import table

    cells = table(quick=quick)
    typer.echo(json.dumps([asdict(cell) for cell in cells], indent=1) if as_json else text(cells))
