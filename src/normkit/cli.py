"""The `normkit` command. Thin: parses, calls, prints."""

from __future__ import annotations

import json
import signal
from typing import Annotated, NoReturn

import typer

from normkit.bench.command import bench
from normkit.environment import describe, lines
from normkit.lab.terminal.commands import app as lab
from normkit.lab.terminal.train import train
from normkit.surgery.auditing.command import audit
from normkit.testing.command import errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Normalization for Transformers, and a lab that measures every claim about it.",
)
lab.command("train")(train)
app.add_typer(lab, name="lab")
app.command("bench")(bench)
app.command("errors")(errors)
app.command("audit")(audit)


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False) -> None:
    """Print versions, machine and a short calibration: what a report of a fault or of a time should carry.

    \b
    Examples:
      normkit env
      normkit env --json | jq .calibration
    """
    facts = describe()
    typer.echo(json.dumps(facts, indent=1) if as_json else "\n".join(lines(facts)))


@app.callback()
def _root() -> None:  # pyright: ignore[reportUnusedFunction]
    pass


def main() -> None:
    """Run the command line; SIGTERM ends it as Ctrl-C does, with exit code 130."""
    signal.signal(signal.SIGTERM, _terminated)
    app()


def _terminated(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
