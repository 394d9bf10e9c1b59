"""`normkit bench`: parse, call, print. The table or the JSON goes to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer

from normkit.bench.device import check_device, clock_of, least_of
from normkit.bench.export import to_json, write_csv
from normkit.bench.goals import losses, means
from normkit.bench.measure import Measured, Method, measure
from normkit.bench.peers import ALWAYS, Peer, peers_named
from normkit.bench.roofline import rooflines
from normkit.bench.shapes import DTYPES, OPS, Case, parse_shape, shapes_for
from normkit.bench.table import case_block, noise_warning, summary
from normkit.environment import describe

DONE, FINDING, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130
ROUNDS, QUICK_ROUNDS = 21, 7


def bench(
    forward: Annotated[bool, typer.Option("--forward/--no-forward", help="Time the forward without gradients.")] = True,
    backward: Annotated[bool, typer.Option("--backward", help="Time the backward alone as well.")] = False,
    step: Annotated[bool, typer.Option("--step", help="Time a training step, forward and backward, as well.")] = False,
    op: Annotated[
        list[str] | None, typer.Option(help=f"Only this operator ({', '.join(OPS)}); may be repeated.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Only this shape (512x768, 1x512x32x128:heads); may be repeated.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"Only this dtype ({', '.join(DTYPES)}); may be repeated.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Only this peer, as the table names it; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where: cpu, cuda or cuda:1.")] = "cpu",
    rounds: Annotated[
        int | None, typer.Option(min=2, help=f"Samples of each contender; {ROUNDS} if not given.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of PyTorch's pool; its default if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs and of the order within each round.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help=f"Three small shapes, {QUICK_ROUNDS} rounds.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when normkit loses or misses a goal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only: every sample, in seconds.")] = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a line for each contender.")] = None,
    figure: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the shares of copy bandwidth.")] = None,
) -> None:
    """Time normkit against PyTorch, the formula eager and compiled, other libraries, and a plain copy.

    All contenders of a case run in one process, every round in another order; ratios are taken within a round, and
    their intervals cover the median with 95 %. Nothing is timed that does not agree with float64. A peer that writes
    into an output that exists is held against normkit doing the same, marked (to out=). On a GPU a sample queues its
    calls back to back and waits once; tensors of 256 MiB and more show the memory's speed, one row what a launch costs.

    Exit codes: 0 done, 1 normkit loses or misses a goal (--strict), 2 wrong usage or normkit could not run or is wrong,
    130 interrupted.

    \b
    Examples:
      normkit bench --quick
      normkit bench --backward --step --figure roofline.svg
      normkit bench --op rms --shape 512x768 --dtype bfloat16 --threads 1
      normkit bench --device cuda --backward --csv gpu.csv
      normkit bench --json > bench.json
    """
    with _refusals():
        passes = [n for n, wanted in (("forward", forward), ("backward", backward), ("step", step)) if wanted]
        device = check_device(device)
        cases = cases_of(passes, op, shape, dtype, quick, device)
        peers = peers_named(peer or [])
        _check_files(csv, figure)
    method = Method(rounds or (QUICK_ROUNDS if quick else ROUNDS), seed, least_of(device), clock_of(device))
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with _threads(threads) as used:
        run, interrupted = _run(cases, peers, method, used, show=not as_json)
    warning = noise_warning(run, used, method.rounds, load)
    warnings = [] if warning is None else [warning]
    if as_json:
        settings = {"device": device, "threads": used, "rounds": method.rounds, "seed": seed}
        settings |= {"least_seconds": method.least, "load": load}
        json.dump(to_json(run, settings, describe(calibrate=False), warnings), sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
    elif run:
        typer.echo("\n".join(summary(run)))
    for text in warnings:
        _say(text)
    with _refusals():
        _write(run, csv, figure)
    raise typer.Exit(INTERRUPTED if interrupted else _exit_code(run, strict))


def cases_of(
    passes: list[str],
    ops: list[str] | None,
    shapes: list[str] | None,
    dtypes: list[str] | None,
    quick: bool,
    device: str = "cpu",
) -> list[Case]:
    """Return the cases that were asked for.

    Raises:
        ValueError: for an unknown name, or where nothing is left to time.
    """
    for given, known, flag in ((ops, OPS, "--op"), (dtypes, tuple(DTYPES), "--dtype")):
        for name in given or ():
            if name not in known:
                raise ValueError(f"{flag} {name!r}: expected one of {', '.join(known)}")
    if not passes:
        raise ValueError("--no-forward leaves nothing to time: add --backward or --step")
    chosen = [parse_shape(text) for text in shapes] if shapes else shapes_for(device, quick)
    return [
        Case(o, which, s, d, device)
        for which in passes
        for o in ops or OPS
        for s in chosen
        for d in dtypes or ("float32", "bfloat16")
    ]


def _run(
    cases: list[Case], peers: tuple[Peer, ...], method: Method, threads: int, show: bool
) -> tuple[list[Measured], bool]:
    """Measure case by case, printing each as soon as it is known; Ctrl-C keeps what there is."""
    run: list[Measured] = []
    begun = time.monotonic()
    try:
        for i, case in enumerate(cases):
            left = f", about {(time.monotonic() - begun) / i * (len(cases) - i):.0f} s left" if i else ""
            _say(f"[{i + 1}/{len(cases)}] {case}{left}")
            try:
                measured = measure(case, peers, method)
            except torch.OutOfMemoryError:
                _say(f"warning: {case}: does not fit in the GPU's memory; --shape takes smaller ones")
                continue
            run.append(measured)
            if show:
                typer.echo("\n".join(case_block(measured, threads)))
            for name, why in measured.failed.items():
                _say(f"warning: {case}: {name} {why}")
    except KeyboardInterrupt:
        _say(f"interrupted after {len(run)} of {len(cases)} cases")
        return run, True
    return run, False


def _exit_code(run: list[Measured], strict: bool) -> int:
    if any(name in measured.failed for measured in run for name in ALWAYS):
        return COULD_NOT_RUN
    missed = bool(losses(run)) or any(goal.reached is False for goal in (*means(run), *rooflines(run)))
    return FINDING if strict and missed else DONE


@contextmanager
def _threads(wanted: int | None) -> Generator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _check_files(csv: Path | None, figure: Path | None) -> None:
    """Refuse before the measuring what could not be written after it."""
    for flag, path in (("--csv", csv), ("--figure", figure)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no folder {path.parent}")
    if figure is not None and figure.suffix != ".svg":
        raise ValueError(f"--figure {figure}: expected a file that ends in .svg")
    if figure is not None and find_spec("matplotlib") is None:
        raise ValueError("--figure needs matplotlib: pip install 'normkit[lab]'")


def _write(run: list[Measured], csv: Path | None, figure: Path | None) -> None:
    if csv is not None:
        write_csv(run, csv)
    if figure is not None and run:
        from normkit.bench.figure import write_figure

        write_figure(run, figure)


@contextmanager
def _refusals() -> Generator[None]:
    """Turn what a user can do something about into one line and exit code 2."""
    try:
        yield
    except ValueError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or 'system'}: {error.strerror or error}")


def _fail(text: str) -> NoReturn:
    _say(f"error: {text}")
    raise typer.Exit(COULD_NOT_RUN)


def _say(text: str) -> None:
    typer.echo(text, err=True)
