"""Everything there is to find out on a GPU, in one go of under four minutes: first whether it is right, then how fast.

    PYTHONPATH=src python3 benchmarks/gpu.py --out "$OUT"
    PYTHONPATH=src python3 benchmarks/gpu.py --device cpu --toy --out runs/toy    # the same path, interpreted, no GPU

In this order: device and versions; the tests of the fused kernels on the GPU itself, where they are held to float64 and
to the CPU's kernels, while other processes compile what is timed and check it; rows shared by clusters; the bench. What
fails to compile, is wrong, faults or takes too long is reported and the rest goes on. OUT gets bench.json, bench.csv,
bench.svg, clusters.json, table.txt, tests.log and log.txt. The last lines printed are a short table. Liger, quack and
flash-attention are timed where they are installed.

Exit codes: 0 all right, 1 something was wrong or failed, 2 no such device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_cases import BROKEN, LIBRARIES, SETS, Record, read

from normkit.bench.device import check_device
from normkit.bench.export import to_json, write_csv
from normkit.bench.measure import Measured
from normkit.bench.roofline import rooflines
from normkit.bench.table import columns, microseconds, noise_warning
from normkit.environment import describe

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 230.0
COMPILING = 0.42  # of the time at most: tests, and what is timed compiled and checked
CLUSTERS = 0.10
WRITING = 8.0  # seconds kept for files and the table
STARTING = 4.0  # seconds of a process before its first case
BYTES_OF_A_PROCESS = 14 << 30  # of GPU memory, that a process may take which compiles and checks
RIVALS = {"nn": ("nn.RMSNorm", "nn.LayerNorm", "F.rms_norm(x + r)"), "compiled": ("HF formula, compiled",)}
RIVALS |= {name: (name,) for name in LIBRARIES}


@dataclass
class Session:
    """One run of this script: where it runs, until when, and what it has to say at the end."""

    device: str
    toy: bool
    out: Path
    scratch: Path
    until: float
    wrong: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.monotonic()

    def start(self, *command: str, log: str = "log.txt", **environment: str) -> subprocess.Popen[bytes]:
        """Start a process of ours in the repository's root, writing to a log."""
        given = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        given |= {"PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | environment
        if self.toy:
            given |= {"TRITON_INTERPRET": "1", "NORMKIT_BACKEND": "gpu"}
        with (self.out / log).open("ab") as file:
            return subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=given, stdout=file, stderr=file, start_new_session=True
            )

    def cases(self, name: str, file: str, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process over some cases of a set."""
        toy = ["--toy"] if self.toy else []
        script = str(Path(__file__).with_name("gpu_cases.py"))
        command = [script, name, str(self.scratch / file), "--device", self.device, *toy, *options]
        return self.start(*command, **environment)


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return a process's exit code; None where it outlasted its time and was ended."""
    try:
        return process.wait(max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def correctness(session: Session) -> None:
    """Run the fused kernels' tests on the device while other processes compile and check what is to be timed."""
    deadline = time.monotonic() + COMPILING * session.left
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-m", "not slow"]
    if session.toy:
        tests += ["tests/kernels/fused/test_rows.py", "-k", "zero_rows"]
    else:
        tests += ["-n", "6", "--dist", "worksteal", "tests/kernels/fused"]
    device = {} if session.toy else {"NORMKIT_TEST_DEVICE": session.device.partition(":")[0]}
    running = session.start(*tests, log="tests.log", **device)
    processes = 1 if session.toy else max(1, min(8, free_memory(session.device) // BYTES_OF_A_PROCESS))
    limit = ("--prepare", "--seconds", f"{deadline - time.monotonic() - STARTING:.1f}")
    preparing = [
        session.cases("bench", f"prepared.{i}", *limit, "--first", str(i), "--every", str(processes))
        for i in range(processes)
    ]
    preparing.append(session.cases("clusters", "prepared.clusters", *limit, NORMKIT_GPU_CLUSTERS="1"))
    code = wait(running, deadline - time.monotonic())
    print(f"tests on {session.device}: {outcome_of_tests(session, code)}", flush=True)
    for process in preparing:
        wait(process, deadline - time.monotonic())
    seen = [r for path in sorted(session.scratch.glob("prepared.*")) for r in read(path)]
    for record in seen:
        note_failures(session, record)
    total = sum(len(cases(session.device, session.toy)) for cases in SETS.values())
    print(f"compiled and held to float64: {len(seen)} of {total} cases, {len(session.wrong)} complaints", flush=True)


def outcome_of_tests(session: Session, code: int | None) -> str:
    """Return pytest's last line; failures are noted."""
    text = (session.out / "tests.log").read_text(errors="replace")
    last = next((line for line in reversed(text.splitlines()) if re.search(r"\d+ (passed|failed|error)", line)), "")
    if code is None:
        session.wrong.append("tests: stopped at their time limit")
    elif code != 0:
        names = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        session.wrong.append(f"tests: exit code {code}: {', '.join(names[:8]) or 'see tests.log'}")
    return last.strip("= ") or f"no summary (exit code {code}); see tests.log"


def note_failures(session: Session, record: Record) -> None:
    """Keep what a case complained about: all of normkit's, of others only that they are wrong."""
    lines = (
        [record.why]
        if record.measured is None
        else [
            f"{name} {why}"
            for name, why in record.measured.failed.items()
            if name.startswith(("normkit", "copy")) or "wrong" in why
        ]
    )
    session.wrong += [line for why in lines if (line := f"{record.case}: {why}") not in session.wrong]


def free_memory(device: str) -> int:
    """Return the free bytes of a GPU."""
    return int(torch.cuda.mem_get_info(device)[0])


def timed(session: Session, name: str, seconds: float, **environment: str) -> list[Record]:
    """Time a set of cases, one process after another where one breaks."""
    deadline, first, file = time.monotonic() + seconds, 0, f"{name}.times"
    while (left := deadline - time.monotonic()) > STARTING:
        options = ("--first", str(first), "--seconds", f"{left - STARTING:.1f}")
        code = wait(session.cases(name, file, *options, **environment), left)
        found = read(session.scratch / file)
        if code == 0:
            break
        reached = max((r.index for r in found), default=first - 1) + 1
        if code != BROKEN:  # it died, or hung, within a case that left no record
            session.wrong.append(
                f"{name}: the process ended ({'out of time' if code is None else code}) in case {reached}"
            )
            reached += 1
        first = reached
        if first >= len(SETS[name](session.device, session.toy)):
            break
    found = read(session.scratch / file)
    for record in found:
        note_failures(session, record)
    return found


def runs_of(records: list[Record]) -> list[Measured]:
    """Return what was timed together with a copy."""
    return [r.measured for r in records if r.measured is not None and "copy" in r.measured.samples]


def table(run: list[Measured]) -> list[str]:
    """Return a line a case: µs, rate, share of the copy, the goal, and others' times as multiples of normkit's."""
    goals = {roof.case: roof for roof in rooflines(run)}
    head = ["case", "µs", "graph µs", "GB/s", "of copy", "goal", *(f"× {name}" for name in RIVALS)]
    rows = [row_of(measured, goals) for measured in run]
    return columns(head, rows)


def row_of(measured: Measured, goals: dict[Any, Any]) -> list[str]:
    """Return a case's cells."""
    case, roof = measured.case, goals.get(measured.case)
    name = f"{case.op} {case.which} {case.shape} {case.dtype}"
    if "normkit" not in measured.samples:
        return [name, "–", measured.failed.get("normkit", "not timed"), *[""] * (3 + len(RIVALS))]
    times = {n: sorted(s.seconds)[len(s.seconds) // 2] for n, s in measured.samples.items()}
    goal = "" if roof is None or roof.goal is None else f"{roof.goal:.0%} {'reached' if roof.reached else 'MISSED'}"
    graph = microseconds(times["normkit, graph"]) if "normkit, graph" in times else ""
    ours = times["normkit"]
    cells = [name, microseconds(ours), graph, f"{case.moved / ours / 1e9:.0f}"]
    cells += [f"{measured.share('normkit').median:.0%}", goal]
    for names in RIVALS.values():
        ratio = next((measured.ratio(n) for n in names if n in times), None)
        cells.append("" if ratio is None else f"{ratio.median:.2f}")
    return cells


def against_plain(run: list[Measured], clusters: list[Measured]) -> list[str]:
    """Return, for each width that a cluster holds, its share of the copy beside that of the kernels without."""
    plain = {measured.case: measured for measured in run}
    rows: list[list[str]] = []
    for measured in clusters:
        name, other = str(measured.case), plain.get(measured.case)
        if "normkit" not in measured.samples:
            rows.append([name, "–", measured.failed.get("normkit", "not timed"), ""])
            continue
        without = "" if other is None or "normkit" not in other.samples else f"{other.share('normkit').median:.0%}"
        rows.append([name, f"{measured.errors['normkit']:.2g}", f"{measured.share('normkit').median:.0%}", without])
    return columns(["in clusters", "error of allowed", "of copy", "without"], rows) if rows else []


def write(session: Session, run: list[Measured], clusters: list[Measured]) -> None:
    """Write all figures; a figure that cannot be drawn is noted, not fatal."""
    settings = {"device": session.device, "toy": session.toy, "wrong": session.wrong}
    facts = describe(calibrate=False)
    for name, part in (("bench.json", run), ("clusters.json", clusters)):
        (session.out / name).write_text(json.dumps(to_json(part, settings, facts, []), indent=1), encoding="utf-8")
    write_csv(run, session.out / "bench.csv")
    try:
        from normkit.bench.figure import write_figure

        if run:
            write_figure(run, session.out / "bench.svg")
    except Exception as error:
        session.wrong.append(f"bench.svg: {type(error).__name__}: {error}")


def report(session: Session, run: list[Measured], clusters: list[Measured], missing: int) -> list[str]:
    """Return the short table and what there is to complain about."""
    judged = [roof for roof in rooflines(run) if roof.goal is not None]
    lines = [*against_plain(run, clusters), "", *table(run), ""]
    lines.append(f"goals reached: {sum(bool(roof.reached) for roof in judged)} of {len(judged)}; not timed: {missing}")
    warning = noise_warning(run, 1, 9, None)
    lines += [] if warning is None else [warning]
    lines += [f"WRONG OR FAILED: {line[:300]}" for line in session.wrong[:12]]
    if len(session.wrong) > 12:
        lines.append(f"and {len(session.wrong) - 12} more, in bench.json")
    return lines


def main() -> None:
    """Run every stage, and print the short table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="tiny shapes; with --device cpu in Triton's interpreter")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds - WRITING
    try:
        device = check_device(given.device)
        if device == "cpu" and not given.toy:
            raise ValueError("--device cpu: the interpreter takes minutes a case; add --toy")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for log in ("log.txt", "tests.log"):
        (out / log).write_bytes(b"")
    facts = describe(calibrate=False)
    print("; ".join(f"{k} {facts[k]}" for k in ("gpus", "cuda", "torch", "triton", "python", "cores")), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        session = Session(device, given.toy, out, Path(scratch), until)
        correctness(session)
        clusters = runs_of(timed(session, "clusters", CLUSTERS * given.seconds, NORMKIT_GPU_CLUSTERS="1"))
        found = timed(session, "bench", session.left)
    run = runs_of(found)
    write(session, run, clusters)
    lines = report(session, run, clusters, len(SETS["bench"](device, given.toy)) - len(run))
    (out / "table.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    sys.exit(1 if session.wrong else 0)


if __name__ == "__main__":
    main()
