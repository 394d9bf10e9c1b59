"""Peak memory of forward and backward, against what it must be: y, dx, row statistics and partial weight gradients.

x, dy and the weight exist before; what is added at the peak is read from the system's high-water mark of resident
memory (Linux), in a process of its own for each contender, after a small call has compiled and loaded everything.

    python benchmarks/memory.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk

ROWS, WIDTH = 8192, 4096
CONTENDERS = ("nk.RMSNorm", "nn.RMSNorm", "nk.LayerNorm", "nn.LayerNorm", "nk.add_rms_norm", "F.rms_norm(x + r)")


def resident(field: str) -> int:
    """Return VmRSS or VmHWM in bytes."""
    match = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return 1024 * int(match.group(1))


def step(name: str, rows: int, dtype: torch.dtype) -> int:
    """Run a forward and a backward; return what the peak lies above the memory before."""
    x = torch.randn(rows, WIDTH).to(dtype).requires_grad_()
    dy, module = torch.ones(rows, WIDTH, dtype=dtype), None
    if name in ("nk.add_rms_norm", "F.rms_norm(x + r)"):
        residual = torch.ones(rows, WIDTH, dtype=dtype).requires_grad_()
        weight = torch.ones(WIDTH, dtype=dtype, requires_grad=True)
        ds = torch.ones(rows, WIDTH, dtype=dtype)
        leaves, upstream = (x, residual, weight), (dy, ds)
    else:
        kinds = {
            "nk.RMSNorm": nk.RMSNorm,
            "nn.RMSNorm": nn.RMSNorm,
            "nk.LayerNorm": nk.LayerNorm,
            "nn.LayerNorm": nn.LayerNorm,
        }
        module = kinds[name](WIDTH, dtype=dtype)
        leaves, upstream = (x, *module.parameters()), (dy,)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = resident("VmRSS")
    if module is not None:
        outputs = (module(x),)
    elif name == "nk.add_rms_norm":
        outputs = nk.add_rms_norm(x, residual, weight)
    else:
        s = x + residual
        outputs = (F.rms_norm(s, (WIDTH,), weight, 1e-6), s)
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    peak = resident("VmHWM") - before
    assert all(g.shape == leaf.shape for g, leaf in zip(gradients, leaves, strict=True))
    return peak


def needed(name: str, item: int) -> int:
    """Return y, dx (and the sum), statistics of each row, partials of the weight gradients."""
    planes = 3 if name in ("nk.add_rms_norm", "F.rms_norm(x + r)") else 2
    centred = "LayerNorm" in name
    statistics, partials = ROWS * 4 * (4 if centred else 2), 64 * WIDTH * 4 * (2 if centred else 1)
    return planes * ROWS * WIDTH * item + statistics + partials


def main() -> None:
    if len(sys.argv) == 3:
        name, dtype = sys.argv[1], getattr(torch, sys.argv[2])
        step(name, 256, dtype)  # more elements than the thread threshold, so that everything is loaded
        print(step(name, ROWS, dtype))
        return
    print(f"{ROWS} × {WIDTH}; what forward and backward add to x, dy and the weight, in MiB")
    print(f"{'':18} {'dtype':9} {'peak':>7} {'needed':>7} {'ratio':>6}")
    for kind, item in (("float32", 4), ("bfloat16", 2)):
        for name in CONTENDERS:
            ran = subprocess.run([sys.executable, __file__, name, kind], check=True, capture_output=True, text=True)
            peak, need = int(ran.stdout), needed(name, item)
            print(f"{name:18} {kind:9} {peak / 2**20:7.1f} {need / 2**20:7.1f} {peak / need:6.2f}")


if __name__ == "__main__":
    main()
