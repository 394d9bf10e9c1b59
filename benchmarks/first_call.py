"""How long the first call of an operator takes: compiled into an empty cache, and loaded from it in a fresh process.

Every time is taken in a process of its own: importing torch with its own first gradient, importing normkit, and the
first forward and backward of a norm, with all they import. "Filled" is the median of five. "CPU s" is the processor
time of forward and backward together: on a busy machine the one to compare.

    python benchmarks/first_call.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPEATS = 5
CALLS = {
    "rms_norm": "nk.rms_norm(x, w)",
    "layer_norm": "nk.layer_norm(x, w, w)",
    "add_rms_norm": "sum(nk.add_rms_norm(x, x.detach(), w))",
}
CHILD = """
import json, sys, time
start = time.perf_counter()
import torch
one = torch.ones(1, requires_grad=True)
torch.autograd.grad(one * 1, one, torch.ones(1))  # which imports sympy: PyTorch's own first gradient
torch_done = time.perf_counter()
import normkit as nk
ours_done = time.perf_counter()
dtype = getattr(torch, sys.argv[2])
x, w = (torch.ones(*shape, dtype=dtype, requires_grad=True) for shape in ((4, 256), (256,)))
dy = torch.ones_like(x)
prepared, busy = time.perf_counter(), time.process_time()
with nk.use("cpu"):
    y = eval(sys.argv[1])
    forward = time.perf_counter()
    torch.autograd.grad(y, (x, w), dy)
    backward = time.perf_counter()
print(json.dumps({
    "torch": torch_done - start,
    "normkit": ours_done - torch_done,
    "forward": forward - prepared,
    "backward": backward - forward,
    "busy": time.process_time() - busy,
    "numba": float("numba" in sys.modules),
}))
"""


def measure(call: str, dtype: str, cache: Path) -> tuple[dict[str, float], str]:
    """Return seconds by part, and what was said on stderr."""
    environment = {**os.environ, "NORMKIT_CACHE": str(cache)}
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, call, dtype], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(ran.stdout), ran.stderr.strip()


def main() -> None:
    print(
        f"{'':13} {'dtype':9} {'cache':6} {'torch s':>8} {'normkit s':>10} {'forward s':>10} "
        f"{'backward s':>11} {'both, CPU s':>12}  Numba"
    )
    said: list[str] = []
    for name, call in CALLS.items():
        for dtype in ("float32", "bfloat16"):
            with tempfile.TemporaryDirectory() as folder:
                cold, message = measure(call, dtype, Path(folder))
                said.append(message)
                warm = [measure(call, dtype, Path(folder))[0] for _ in range(REPEATS)]
            median = {key: statistics.median(run[key] for run in warm) for key in cold}
            for label, times in (("empty", cold), ("filled", median)):
                numba = "imported" if times["numba"] else "not imported"
                print(
                    f"{name:13} {dtype:9} {label:6} {times['torch']:8.2f} {times['normkit']:10.2f} "
                    f"{times['forward']:10.3f} {times['backward']:11.3f} {times['busy']:12.3f}  {numba}"
                )
    print(f"said once a process where a compilation takes over a second: {said[0] or '(none took that long)'}")


if __name__ == "__main__":
    main()
