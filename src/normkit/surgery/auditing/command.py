"""`normkit audit`: parse, call, print. The report or the JSON goes to stdout, everything else to stderr."""

from __future__ import annotations

from typing import Annotated

import typer

from normkit.surgery.auditing.checkpoint import RefusedError
from normkit.surgery.auditing.load import load

DONE, FINDING, COULD_NOT_RUN = 0, 1, 2


def audit(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint folder, a config .json, or module:function.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    as_table: Annotated[bool, typer.Option("--table", help="List the norms in a table instead of a tree.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python files that a checkpoint brings along.")
    ] = False,
) -> None:
    """List every norm of a model: what it computes, where it sits, and what is wrong with it.

    MODEL is a local folder with config.json and safetensors, a config file of transformers (its model gets random
    weights), or a function that returns a model, or a model and an example input. Nothing is fetched.

    Exit codes: 0 nothing dangerous, 1 something is dangerous, 2 the model could not be loaded.

    \b
    Examples:
      normkit audit ./checkpoint
      normkit audit config.json --table
      normkit audit mypackage.models:build --json | jq '.findings[].what'
    """
    from normkit.surgery.auditing.loaded import audit_loaded

    try:
        found = audit_loaded(load(model, trust_remote_code))
    except RefusedError as refused:
        typer.echo(f"error: {refused}", err=True)
        raise typer.Exit(COULD_NOT_RUN) from None
    if as_json:
        typer.echo(found.to_json())
    else:
        from rich.console import Console

        from normkit.surgery.auditing.report import report

        Console(highlight=False).print(report(found, as_table))
    raise typer.Exit(FINDING if found.dangerous else DONE)
