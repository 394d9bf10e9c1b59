"""The cases that `benchmarks/gpu.py` times, those first that tell most, and the process that times them.

A process of its own, because a kernel that faults takes its process's GPU with it: each case is on disk before the next
one starts, and whoever started the process starts another for the rest.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from normkit.bench.device import check_device, clock_of, least_of
from normkit.bench.measure import Measured, Method, measure
from normkit.bench.peers import ALWAYS, Peer, peers_named
from normkit.bench.shapes import GPU_SHAPES, Case, Shape
from normkit.bench.table import microseconds

LIBRARIES = ("Liger", "quack", "flash-attention")
PEERS = ("normkit, graph", "nn.RMSNorm", "nn.LayerNorm", "F.rms_norm(x + r)", "HF formula, compiled", *LIBRARIES)
LAUNCH, WIDE = GPU_SHAPES[:2], GPU_SHAPES[2:]
TOY = (Shape((1, 256)), Shape((1, 4, 2, 64), heads=True), Shape((3, 200)))
ROUNDS, TOY_ROUNDS = 9, 2
BROKEN = 3  # exit code: the GPU answers this process no more


@dataclass(frozen=True)
class Record:
    """What became of a case: its times, or why there are none."""

    index: int
    case: Case
    measured: Measured | None
    why: str = ""


def bench_cases(device: str, toy: bool) -> list[Case]:
    """Return every case, in the order in which a run that is cut short would miss them least."""
    if toy:
        return [Case(op, which, s, "bfloat16", device) for op in ("rms", "layer") for which in BOTH for s in TOY[1:]]
    some = [s for s in WIDE if s.width in (64, 1024, 4096, 8192, 65536)]
    groups = [
        ("rms", "bfloat16", ("forward", "backward"), WIDE),
        ("rms", "bfloat16", ("forward", "step"), LAUNCH),
        ("rms", "float32", ("forward", "backward"), WIDE),
        ("layer", "bfloat16", ("forward", "backward"), some),
        ("add_rms", "bfloat16", ("forward", "backward"), some),
        ("rms", "bfloat16", ("step",), WIDE),
        ("layer", "float32", ("forward", "backward"), some),
        ("rms", "float32", ("step",), WIDE),
    ]
    return [
        Case(op, which, s, dtype, device) for op, dtype, passes, shapes in groups for which in passes for s in shapes
    ]


def cluster_cases(device: str, toy: bool) -> list[Case]:
    """Return the widths that a cluster of multiprocessors holds and no single one does."""
    if toy:
        return [Case("rms", which, TOY[2], "bfloat16", device) for which in BOTH]
    widths = {"forward": (32768, 65536), "backward": (16384, 32768, 65536)}
    return [
        Case(op, which, s, dtype, device)
        for op, dtype in (("rms", "bfloat16"), ("rms", "float32"), ("layer", "bfloat16"))
        for which, those in widths.items()
        for s in WIDE
        if s.width in those
    ]


BOTH = ("forward", "backward")
SETS = {"bench": bench_cases, "clusters": cluster_cases}


def read(path: Path) -> list[Record]:
    """Return the records that processes have written so far; one that was cut off is left out."""
    found: list[Record] = []
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    found.append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):
                    break
    return found


def peers_for(name: str, toy: bool) -> tuple[Peer, ...]:
    """Return who is timed: everybody in the bench, normkit and the copy where clusters are held against none."""
    if name == "clusters":
        return tuple(peer for peer in peers_named(["nn.RMSNorm"]) if peer.name in ALWAYS)
    return peers_named(["nn.RMSNorm", "nn.LayerNorm"] if toy else list(PEERS))


def records(cases: list[tuple[int, Case]], peers: tuple[Peer, ...], method: Method, seconds: float) -> Iterator[Record]:
    """Time cases while there is time for another; a case that fails as a whole is a record with its reason."""
    begun = time.monotonic()
    for done, (i, case) in enumerate(cases):
        gone = time.monotonic() - begun
        if gone + 1.5 * gone / max(done, 1) > seconds:
            return
        try:
            yield Record(i, case, measure(case, peers, method))
        except Exception as error:
            yield Record(i, case, None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def said(record: Record) -> str:
    """Return a line for the log."""
    if record.measured is None:
        return f"{record.case}: FAILED {record.why}"
    failed = "".join(f"; {name} {why}" for name, why in record.measured.failed.items())
    seconds = record.measured.samples["normkit"].seconds if "normkit" in record.measured.samples else ()
    taken = f"normkit {microseconds(sorted(seconds)[len(seconds) // 2])} µs" if seconds else "checked"
    return f"{record.case}: {taken}{failed}"


def usable(device: str) -> bool:
    """Free what the last case took, and say whether the device still answers."""
    gc.collect()
    if device == "cpu":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def main() -> None:
    """Time (or with --prepare only compile and check) every N-th case from --first on, and append records to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    device = check_device(given.device)
    if given.toy and device == "cpu":
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        import_module("interpreter").round_like_hardware()
    cases = list(enumerate(SETS[given.set](device, given.toy)))[given.first :: given.every]
    method = Method(TOY_ROUNDS if given.toy else ROUNDS, 0, least_of(device), clock_of(device))
    if given.prepare:
        method = Method(0, 0, 0.0, clock_of(device))
    with given.file.open("ab") as file:
        for record in records(cases, peers_for(given.set, given.toy), method, given.seconds):
            pickle.dump(record, file)
            file.flush()
            print(f"[{record.index}] {said(record)}", flush=True)
            if not usable(device):
                sys.exit(BROKEN)


if __name__ == "__main__":
    main()
