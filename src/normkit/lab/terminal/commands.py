"""`normkit lab …`: parse, call, print. Data go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console

from normkit.environment import usable_cores
from normkit.lab.claims import UnknownClaimError, located, select
from normkit.lab.corpus import CorpusError, load_corpus
from normkit.lab.language import Words, words
from normkit.lab.runs.engine import Order, Result, run
from normkit.lab.runs.interrupts import Interrupts
from normkit.lab.runs.judged import read_run, to_json
from normkit.lab.runs.lines import RunError
from normkit.lab.runs.plan import make_plan
from normkit.lab.settings import Settings
from normkit.lab.terminal.compare import compare
from normkit.lab.terminal.progress import BarView, LineView
from normkit.lab.terminal.tables import comparison, plan_line, plan_table, seconds, table, verdict_table
from normkit.lab.untestable import Entry
from normkit.lab.verdict import Verdict

app = typer.Typer(no_args_is_help=True, help="Measure the article's claims and read the verdicts.")

DONE, CLAIM_FAILS, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130

Full = Annotated[bool, typer.Option("--full/--quick", help="Wide grids and deep models, or what minutes allow.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Lang = Annotated[str, typer.Option("--lang", metavar="en|zh", help="Language of the report and of the verdicts.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


@app.command("list")
def list_(full: Full = False, as_json: AsJson = False) -> None:
    """List the claims: what they say, the article's sentences they cover, and their cost on one core.

    Claims that share a study share its cost: it is measured once. "full only" is what --quick does not measure.

    \b
    Examples:
      normkit lab list
      normkit lab list --full
      normkit lab list --json | jq '.[] | select(.seconds < 5).id'
    """
    settings = Settings(mode="full" if full else "quick")
    claims = [_listed(module, claim, settings) for claim, module in located()]
    if as_json:
        _print_json(claims)
        return
    costs = ["full only" if c["full_only"] and not full else seconds(c["seconds"]) for c in claims]
    rows = [
        [c["id"], ", ".join(map(str, c["sentences"])), cost, c["title"]] for c, cost in zip(claims, costs, strict=True)
    ]
    _print(table(["claim", "sentences", "cost", "title"], rows))


@app.command("run")
def run_(
    claims: Annotated[list[str] | None, typer.Argument(metavar="[CLAIM]...", help="Which; all if none.")] = None,
    full: Full = False,
    corpus: Annotated[str | None, typer.Option(metavar="PATH", help="Text to train on: a file or a folder.")] = None,
    seeds: Annotated[str, typer.Option(help="Such as 0-4, 100-104 or 0,2,5.")] = "0-4",
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Run folder; runs/quick or runs/full.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Workers; one per core if not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Start the folder afresh; old files move aside.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when a claim fails.")] = False,
    lang: Lang = "en",
    as_json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
) -> None:
    """Measure claims into a run folder, judge them, and keep its report up to date.

    Measurements that the folder has already are not made again, so a run that was stopped or killed goes on where
    it was. The same claims, code and settings give the same bits, whatever --jobs is. Claims that take minutes are
    measured with --full only; the plan names them.

    Exit codes: 0 done, 1 a claim fails (--strict), 2 wrong usage or something could not run, 130 interrupted.

    \b
    Examples:
      normkit lab run
      normkit lab run A1 A2 --out runs/first
      normkit lab run --seeds 100-104 --out runs/other-seeds
      normkit lab run F3 --full --corpus ~/books --json > verdicts.json
      normkit lab run --lang zh
    """
    with _refusals():
        language = words(lang)
        chosen = select(located(), claims or [])
        numbers = parse_seeds(seeds)
        _check_device(device)
        text = load_corpus(corpus)
        mode = "full" if full else "quick"
        settings = Settings(mode, numbers, text.name, text.sha256, text.bytes, device)
        _check_mode(chosen, settings, bool(claims))
        order = Order(chosen, settings, out or Path("runs") / mode, jobs or usable_cores(), force, language.language)
        if dry_run:
            _print_plan(order, as_json)
            return
        result = _watched(order, language)
    if as_json:
        _print_json([to_json(judged) for judged in result.judged])
    else:
        _print(verdict_table(result.judged, language))
    raise typer.Exit(_exit_code(result, strict))


@app.command("report")
def report(
    run_folder: RunFolder,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to copy it and its figures.")] = None,
    lang: Lang = "en",
    png: Annotated[
        bool, typer.Option("--png", help="Figures as PNG files, too: light theme, 96 dots an inch.")
    ] = False,
) -> None:
    """Render the report of a run folder again, its figures as SVG files beside it, and print where it is.

    With --out the page goes there as well, and its folder of figures beside it: figures/A1-1.svg is the figure that the
    page calls so.

    \b
    Examples:
      normkit lab report runs/quick
      normkit lab report runs/quick --lang zh
      normkit lab report runs/quick --png
      normkit lab report runs/full --out paper/report.html
    """
    with _refusals():
        language = words(lang).language
        stored = read_run(run_folder)
        _note_other_code(run_folder)
        try:
            from normkit.lab.report import write_report
            from normkit.lab.report.files import copy_report
        except ModuleNotFoundError as error:
            raise RunError(f"the report needs {error.name}: pip install 'normkit[lab]'") from error
        for text in stored.notices:
            _note(text)
        path = write_report(run_folder, language, png)
        if out is not None:
            path = copy_report(path, out)
        typer.echo(path)


@app.command("compare")
def compare_(
    a: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    b: Annotated[Path, typer.Argument(metavar="RUN", help="Another one.")],
    everything: Annotated[bool, typer.Option("--all", help="List what is the same, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what differs between two runs: verdicts, and criteria with the paired interval over the seeds they share.

    \b
    Examples:
      normkit lab compare runs/quick runs/other-seeds
      normkit lab compare runs/before runs/after --all
    """
    with _refusals():
        found = compare(a, b, [claim for claim, _ in located()])
    if as_json:
        _print_json(found)
        return
    _print([f"a: {a}", f"b: {b}", *(f"settings: {text}" for text in found["settings"]), ""])
    _print(comparison(found["claims"], everything))


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds such as ``0-4``, ``100-104`` or ``0,2,5-7``.

    Raises:
        ValueError: for anything else, for none and for one that occurs twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ValueError(f"--seeds {text!r}: expected numbers and ranges such as 0-4 or 0,2,5, got {part!r}")
        seeds.extend(range(int(first), int(last or first) + 1))
        if dash and int(last) < int(first):
            raise ValueError(f"--seeds {text!r}: the range {part!r} ends before it begins")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {text!r}: a seed occurs twice; it would count as two independent draws")
    return tuple(seeds)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {device!r} cannot be used here: {reason}. `normkit env` lists GPUs") from None


def _check_mode(chosen: Sequence[tuple[Entry, str]], settings: Settings, named: bool) -> None:
    """Say which of the claims asked for by name a quick run does not measure; refuse when that leaves none."""
    left = [claim.id for claim, _ in chosen if claim.study is not None and claim.study.skipped(settings)]
    if not (named and left):
        return
    are = "is" if len(left) == 1 else "are"
    text = f"{', '.join(left)} {are} measured in a full run only: `normkit lab run {' '.join(left)} --full`"
    if len(left) == len(chosen):
        raise ValueError(f"nothing to measure in a quick run; {text}")
    _note(text)


def _watched(order: Order, language: Words) -> Result:
    """Run, with a bar on a terminal and plain lines anywhere else."""
    console = Console(stderr=True)
    view = BarView(console, language) if console.is_terminal else LineView(_say, language)
    with Interrupts() as interrupts:
        try:
            return run(order, view, interrupts)
        finally:
            view.close()


def _exit_code(result: Result, strict: bool) -> int:
    if result.interrupted:
        _say("interrupted; what was measured is kept, the same command goes on from here")
        return INTERRUPTED
    if result.could_not_run:
        _say(f"could not run: {', '.join(result.could_not_run)} (workers.log in the run folder has the tracebacks)")
        return COULD_NOT_RUN
    failed = any(j.judgement is not None and j.judgement.verdict is Verdict.FAILS for j in result.judged)
    return CLAIM_FAILS if strict and failed else DONE


def _note_other_code(folder: Path) -> None:
    """Say which measurements of a run today's code would make again."""
    stored = read_run(folder)
    known = {m.study for m in stored.measurements}
    entries = [(claim, module) for claim, module in located() if claim.study is not None and claim.study.id in known]
    plan = make_plan([c for c, _ in entries], [m for _, m in entries], stored.settings, set(stored.keys.items()))
    old = sum(cell.id in stored.keys for cell in plan.missing)
    if old:
        _note(f"{old} measurements were made by other code than today's; `normkit lab run` makes them again")


def _print_plan(order: Order, as_json: bool) -> None:
    stored: set[Any] = set()
    if (order.out / "settings.json").exists():
        there = read_run(order.out)
        stored = set(there.keys.items())
    plan = make_plan([c for c, _ in order.claims], [m for _, m in order.claims], order.settings, stored)
    if not as_json:
        _print([*plan_table(plan), plan_line(plan, order.jobs)])
        return
    _print_json(
        [
            {
                "study": step.study.id,
                "claims": [claim.id for claim in step.claims],
                "measurements": len(step.cells),
                "cached": len(step.cached),
                "seconds": step.seconds,
            }
            for step in plan.steps
        ]
    )


def _listed(module: str, claim: Entry, settings: Settings) -> dict[str, Any]:
    plan, study = make_plan([claim], [module], settings), claim.study
    return {
        "id": claim.id,
        "title": claim.title,
        "sentence": claim.sentence,
        "sentences": list(claim.sentences),
        "seconds": round(plan.seconds(jobs=1), 2),
        "seeds": min(study.seeds, len(settings.seeds)) if study else 0,
        "study": study.id if study else None,
        "full_only": bool(study and study.full_only),
        "mode": settings.mode,
    }


@contextmanager
def _refusals() -> Generator[None]:
    """Turn what a user can do something about into one line and exit code 2."""
    try:
        yield
    except (RunError, CorpusError, UnknownClaimError, ValueError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or 'system'}: {error.strerror or error}")


def _fail(text: str) -> NoReturn:
    _say(f"error: {text}")
    raise typer.Exit(COULD_NOT_RUN)


def _note(text: str) -> None:
    _say(f"note: {text}")


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _print(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)


def _print_json(data: Any) -> None:
    json.dump(data, sys.stdout, indent=1, allow_nan=False)
    sys.stdout.write("\n")


# What other commands of the lab share with these.
refusals, check_device, exit_code = _refusals, _check_device, _exit_code
fail, note, say, print_lines, print_json = _fail, _note, _say, _print, _print_json
