"""`normkit lab train`: parse, estimate, run, print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from normkit.environment import usable_cores
from normkit.lab.corpus import Corpus, load_corpus
from normkit.lab.grid.estimate import Cost, available_bytes, costs, process_bytes
from normkit.lab.grid.options import TOLERANCE, Grid
from normkit.lab.grid.study import STUDY
from normkit.lab.grid.study import __name__ as STUDY_MODULE
from normkit.lab.grid.verdicts import claims, label
from normkit.lab.language import Words
from normkit.lab.runs.engine import Order, Result, run
from normkit.lab.runs.interrupts import Interrupts
from normkit.lab.runs.judged import CellId, read_run, to_json
from normkit.lab.runs.plan import Plan, make_plan
from normkit.lab.runs.ranks import join, leave, processes, rank, run_together
from normkit.lab.settings import Settings
from normkit.lab.terminal.commands import (
    check_device,
    exit_code,
    note,
    parse_seeds,
    print_json,
    print_lines,
    refusals,
    say,
)
from normkit.lab.terminal.following import FollowingView
from normkit.lab.terminal.progress import BarView, LineView
from normkit.lab.terminal.tables import seconds, table, verdict_table

T = TypeVar("T")


def train(
    wiring: Annotated[str, typer.Option(help="Wirings to compare, such as pre,post,deepnorm.")] = "",
    norm: Annotated[str, typer.Option(help="Norms in each of them, such as rms,layer.")] = "rms",
    model: Annotated[
        list[str] | None, typer.Option(metavar="MODULE:CALLABLE", help="A model of your own; may be repeated.")
    ] = None,
    depth: Annotated[int, typer.Option(help="Blocks.")] = 6,
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = 64,
    heads: Annotated[int, typer.Option(help="Heads of attention; 0 for heads about 32 wide.")] = 0,
    lr: Annotated[str, typer.Option(help="Learning rates; each contender is judged at its best.")] = "1e-3,3e-3",
    warmup: Annotated[str, typer.Option(help="Steps of linear warm-up.")] = "0",
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 200,
    rows: Annotated[int, typer.Option(help="Windows of 64 bytes in a step.")] = 16,
    shards: Annotated[
        int, typer.Option(help="Parts of a batch whose gradients are computed apart; torchrun: one a process.")
    ] = 0,
    precision: Annotated[str, typer.Option(help="float32, or bfloat16 for autocast to it.")] = "float32",
    tolerance: Annotated[float, typer.Option(help="Least difference that counts, in nats per byte.")] = TOLERANCE,
    corpus: Annotated[str | None, typer.Option(metavar="PATH", help="Text to train on: a file or a folder.")] = None,
    seeds: Annotated[str, typer.Option(help="Such as 0-2 or 0,2,5; one seed decides nothing.")] = "0-2",
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Run folder.")] = Path("runs/train"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Workers; one per core, or one on a GPU.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Start the folder afresh; old files move aside.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print plan, memory and time, and stop.")] = False,
) -> None:
    """Train wirings, norms and models of your own side by side, and judge each against the first.

    Every wiring with every norm, and every model, is a contender; it is trained at every warm-up and learning rate and
    compared at its own best. A model of your own is a function without arguments that returns a new torch.nn.Module.
    Called on byte ids (N, T) it returns logits (N, T, 256), alone, first in a tuple, or as .logits or ["logits"].

    Plan, memory and time are estimated first, on a few steps of each contender. While runs train, the folder's
    curves.jsonl grows a line every ten steps. A run that was stopped or killed goes on where it was; the same options
    and code give the same bits, whatever --jobs is. Under torchrun every batch is split among its processes, and on the
    CPU the bits are those of one process with --shards set to their number.

    Exit codes: 0 done, 2 wrong usage or something could not run, 130 interrupted.

    \b
    Examples:
      normkit lab train --wiring pre,post,deepnorm --lr 1e-3,3e-3,1e-2 --dry-run
      normkit lab train --wiring pre,post --norm rms,layer --depth 12 --width 256 --warmup 0,200 --corpus ~/books
      normkit lab train --wiring pre --model my_package.models:build --out runs/mine
      torchrun --nproc-per-node 2 -m normkit.cli lab train --wiring pre,post --width 512
    """
    with refusals():
        grid = Grid(
            wirings=_names(wiring),
            norms=_names(norm) if wiring else (),
            models=tuple(model or ()),
            lrs=_numbers("--lr", lr, float),
            warmups=_numbers("--warmup", warmup, int),
            steps=steps,
            rows=rows,
            depth=depth,
            width=width,
            heads=heads,
            shards=shards or processes(),
            precision=precision,
            tolerance=tolerance,
        )
        numbers = parse_seeds(seeds)
        check_device(device)
        text = load_corpus(corpus)
        if grid.models and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # workers look for modules where this process does
        settings = Settings("full", numbers, text.name, text.sha256, text.bytes, device, grid.to_text())
        workers = jobs or (1 if device != "cpu" else usable_cores())
        if processes() > 1:
            _together(grid, Order([], settings, out, processes(), force), text, as_json, dry_run)
        order, plan, estimate = _estimated(grid, settings, text, Order([], settings, out, workers, force))
        if not (dry_run and as_json):
            (print_lines if dry_run else _say_lines)(_told(grid, plan, order, estimate))
        if dry_run:
            if as_json:
                print_json(_as_json(plan, order, estimate))
            return
        result = _followed(order)
    _print_verdicts(result, as_json, out)


def _print_verdicts(result: Result, as_json: bool, out: Path) -> NoReturn:
    for m in read_run(out).measurements:
        for flag in m.values.get("flags", ()):
            say(f"flag: {m.arm} seed {m.seed}: {flag}")
    if as_json:
        print_json([to_json(judged) for judged in result.judged])
    else:
        print_lines(verdict_table(result.judged, Words("en")))
    raise typer.Exit(exit_code(result, strict=False))


def _together(grid: Grid, order: Order, text: Corpus, as_json: bool, dry_run: bool) -> NoReturn:
    """Do all this as one of several processes under ``torchrun``; process 0 speaks."""
    if grid.shards != processes():
        raise ValueError(f"--shards {grid.shards}: torchrun started {processes()} processes, one for each part")
    if rank() == 0:
        order, plan, estimate = _estimated(grid, order.settings, text, order)
        (print_lines if dry_run else _say_lines)(_told(grid, plan, order, estimate))
    else:
        order = replace(order, claims=[(claim, STUDY_MODULE) for claim in claims(order.settings)])
    if dry_run:
        raise typer.Exit()
    join(order.settings.device)
    try:
        result = run_together(order, text, LineView(say), say)
    finally:
        leave()
    if result is None:
        raise typer.Exit()
    _print_verdicts(result, as_json, order.out)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(option: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    try:
        return tuple(kind(part) for part in _names(text))
    except ValueError:
        what = "whole numbers such as 0,200" if kind is int else "numbers such as 1e-3,3e-3"
        raise ValueError(f"{option} {text!r}: expected {what}") from None


def _estimated(grid: Grid, settings: Settings, text: Corpus, order: Order) -> tuple[Order, Plan, dict[str, Cost]]:
    """Measure what each contender costs, and plan with that."""
    found = costs(grid, text, settings.device)

    def planned(params: Any) -> float:
        if "lr" not in params:
            return 0.0
        name = f"model/{params['model']}" if "model" in params else f"{params['wiring']}/{params['norm']}"
        return found[name].run

    study = replace(STUDY, seconds=planned)
    asked = [(replace(claim, study=study), STUDY_MODULE) for claim in claims(settings)]
    stored: set[tuple[CellId, str]] = set()
    if not order.force and (order.out / "settings.json").exists():
        there = read_run(order.out)
        stored = set(there.keys.items())
    plan = make_plan([claim for claim, _ in asked], [module for _, module in asked], settings, stored)
    return replace(order, claims=asked), plan, found


def _told(grid: Grid, plan: Plan, order: Order, found: dict[str, Cost]) -> list[str]:
    """Return plan, memory and time as lines."""
    runs = plan.cells - len(order.settings.seeds)  # the bytes' frequencies are counted, not trained
    sizes = {
        "contender": len(grid.contenders),
        "warm-up": len(grid.warmups),
        "learning rate": len(grid.lrs),
        "seed": len(order.settings.seeds),
    }
    rows = [
        [label(name), _count(c.parameters), size(c.state), size(c.saved), _step(c.step), seconds(c.run)]
        for name, c in found.items()
    ]
    need, free = _memory(order, found), available_bytes(order.settings.device)
    lines = [
        " × ".join(f"{n} {word}{'s' if n > 1 else ''}" for word, n in sizes.items())
        + f" = {runs} runs of {grid.steps} steps",
        *table(["contender", "parameters", "weights and Adam", "for the backward", "a step", "a run"], rows),
        f"memory: about {size(need)} with {order.jobs} worker{'s' if order.jobs > 1 else ''}"
        + (f", {size(free)} free" if free is not None else ""),
        f"time: about {seconds(plan.seconds(order.jobs))} for {len(plan.missing)} measurements, "
        f"{plan.cells - len(plan.missing)} are there already",
    ]
    if free is not None and need > free:
        lines.append("note: that is more memory than is free; lower --jobs, --rows or --width")
    return lines


def _memory(order: Order, found: dict[str, Cost]) -> int:
    most = max(cost.state + cost.saved for cost in found.values())
    base = process_bytes() if order.settings.device == "cpu" else 0
    return order.jobs * (most + base)


def _as_json(plan: Plan, order: Order, found: dict[str, Cost]) -> dict[str, Any]:
    return {
        "contenders": {name: vars(cost) for name, cost in found.items()},
        "measurements": plan.cells,
        "cached": plan.cells - len(plan.missing),
        "seconds": plan.seconds(order.jobs),
        "bytes": _memory(order, found),
        "jobs": order.jobs,
    }


def _followed(order: Order) -> Result:
    console = Console(stderr=True)
    view = BarView(console) if console.is_terminal else LineView(say)
    with Interrupts() as interrupts:
        try:
            return run(order, FollowingView(view, order.out), interrupts)
        finally:
            view.close()


def _say_lines(lines: Sequence[str]) -> None:
    for line in lines:
        if line.startswith("note: "):
            note(line.removeprefix("note: "))
        else:
            say(line)


def _step(value: float) -> str:
    return f"{1000 * value:.3g} ms" if value < 1 else seconds(value)


def _count(number: int) -> str:
    return f"{number / 1e6:.3g} M" if number >= 1e6 else f"{number:,}"


def size(amount: int) -> str:
    """Return bytes as people read them.

    Example:
        >>> size(3 * 2**20), size(5 * 2**30 // 2)
        ('3 MiB', '2.5 GiB')
    """
    return f"{amount / 2**30:.2g} GiB" if amount >= 2**30 else f"{amount / 2**20:.3g} MiB"
