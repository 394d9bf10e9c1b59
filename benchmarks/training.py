"""The training map at a size worth a GPU, in 8 minutes: width 512, 24 blocks, 4 wirings × 2 warm-ups × 3 rates.

    PYTHONPATH=src python3 benchmarks/training.py --out "$OUT"
    PYTHONPATH=src python3 benchmarks/training.py --device cpu --toy --out runs/toy    # the same path at toy size

It is `normkit lab train`, whose cost it measures first: the number of steps is the largest of `STEPS` whose plan fits
the time, so that a slower GPU trains less and leaves nothing out. OUT is a run folder like any other: measurements,
curves, verdicts and the report; the last lines printed are the verdicts. What the deadline cuts off, the same command
with --steps goes on with. Nobody has run it on a GPU yet.

Exit codes: 0 all judged, 1 the time was not enough for everything, 2 no such device or something could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 480.0
STEPS = (100, 200, 400, 800, 1600, 3200, 6400)
WIRINGS = "post,pre,deepnorm,sandwich"
LARGE = ("--depth", "24", "--width", "512", "--rows", "64", "--lr", "3e-4,1e-3,3e-3", "--seeds", "0-2")
TOY = ("--depth", "2", "--width", "32", "--rows", "4", "--lr", "1e-3,3e-3,1e-2", "--seeds", "0-1")
PLANNED = 0.8  # of what is left once the costs are known: workers start, compile and report too
ENDING = 20.0  # seconds kept for stopping, judging and the report


def main() -> int:
    """Run the script."""
    began = time.monotonic()
    options = _options()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu --toy takes the same path", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    steps = options.steps or _affordable(options, began)
    if steps is None:
        return 2
    left = options.seconds - (time.monotonic() - began)
    run = _start(options, steps)
    try:
        code = run.wait(timeout=max(0.0, left - ENDING))
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGINT)  # it keeps what it has measured, judges that and renders it
        run.wait()
        print(f"out of time after {time.monotonic() - began:.0f} s; go on with --steps {steps}", flush=True)
        return 1
    print(f"{steps} steps a run; {time.monotonic() - began:.0f} s in all; {options.out}")
    return 0 if code == 0 else 2


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--toy", action="store_true", help="two blocks of width 32")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--steps", type=int, help="of a run; the largest number that fits the time by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the GPU")
    return parser.parse_args()


def _command(options: argparse.Namespace, steps: int) -> list[str]:
    """Return the call of `normkit lab train`; warm-up takes none or a tenth of the steps."""
    size = TOY if options.toy else LARGE
    words = ["lab", "train", "--wiring", WIRINGS, *size, "--steps", str(steps), "--warmup", f"0,{steps // 10}"]
    words += ["--precision", "bfloat16", "--device", options.device, "--jobs", str(options.jobs)]
    return [sys.executable, "-m", "normkit.cli", *words, "--out", str(options.out)]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def _affordable(options: argparse.Namespace, began: float) -> int | None:
    """Return the largest number of steps whose plan fits the time, from the cost of a step; None if it fails."""
    asked = [*_command(options, STEPS[0]), "--dry-run", "--json"]
    found = subprocess.run(asked, env=_environment(), stdout=subprocess.PIPE, check=False)
    if found.returncode:
        return None
    plan = json.loads(found.stdout)
    contenders = plan["contenders"].values()
    step = sum(c["step"] for c in contenders) / len(contenders)
    judging = sum(c["run"] - STEPS[0] * c["step"] for c in contenders) / len(contenders)
    runs = plan["measurements"]  # with the bytes' frequencies, which cost nothing: one a seed too many
    seconds = PLANNED * (options.seconds - ENDING - (time.monotonic() - began))
    fitting = [n for n in STEPS if runs * (n * step + judging) <= seconds]
    print(f"{1000 * step:.1f} ms a step, {runs} runs, {seconds:.0f} s for them", flush=True)
    return max(fitting, default=STEPS[0])


def _start(options: argparse.Namespace, steps: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(_command(options, steps), env=_environment())


if __name__ == "__main__":
    raise SystemExit(main())
