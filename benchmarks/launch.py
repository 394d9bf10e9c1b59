"""Where the microseconds of one small call go: RMSNorm and LayerNorm of 1 × 4096 float32, without gradients.

Each line is timed by itself, all within the same rounds; an outer layer includes the inner ones.

    python benchmarks/launch.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import normkit as nk
from normkit.bench.table import microseconds
from normkit.bench.timing import Contender, interleave
from normkit.conventions import TORCH_RMS_NORM
from normkit.kernels import registry
from normkit.kernels.cpu import kernel, rows
from normkit.kernels.registry import Request
from normkit.ops import rows as ops

WIDTH, ROUNDS = 4096, 31


def parts(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the layers from the outside in, and two yardsticks."""
    norm, layer = nk.RMSNorm(WIDTH), nk.LayerNorm(WIDTH)
    weight, y = norm.weight, torch.zeros_like(x)
    code = rows.forward_code(TORCH_RMS_NORM, rows.Kinds(x.dtype, x.dtype, None, x.dtype))
    bare = kernel.quick(Request(TORCH_RMS_NORM, x, (x.dim() - 1,), weight))
    return {
        "nn.LayerNorm": partial(nn.LayerNorm(WIDTH), x),
        "nn.RMSNorm": partial(nn.RMSNorm(WIDTH), x),
        "nk.LayerNorm, the module": partial(layer, x),
        "nk.RMSNorm, the module": partial(norm, x),
        "  forward, without nn.Module's call": partial(norm.forward, x),
        "  forward of LayerNorm": partial(layer.forward, x),
        "    layer_norm, the function": partial(nk.layer_norm, x, layer.weight, layer.bias, eps=1e-5),
        "    weight, by attribute": partial(getattr, layer, "weight"),
        "    rms_norm, the function": partial(nk.rms_norm, x, weight, None, eps=1e-6),
        "      quick, with every guard": partial(ops.quick, x, weight, None, 1e-6, TORCH_RMS_NORM),
        "        watched": ops.watched,
        "        plain, for x": partial(ops.plain, x),
        "        backend": registry.backend,
        "        the kernel and its output": partial(bare, x, weight, None, 1e-6, None, False),
        "        the kernel, into an output": partial(bare, x, weight, None, 1e-6, y, False),
        "          full block, through ctypes": partial(rows.forward_contiguous, code, x, weight, None, 1e-6, y, None),
        "          empty_like": partial(torch.empty_like, x),
        "          data_ptr": x.data_ptr,
        "rms_norm with out=": partial(nk.rms_norm, x, weight, None, eps=1e-6, out=y),
        "add_rms_norm": partial(nk.add_rms_norm, x, x, weight),
        "y.copy_(x)": partial(y.copy_, x),
    }


def main() -> None:
    with torch.no_grad():
        named = parts(torch.randn(1, WIDTH))
        found = interleave([Contender(name, call) for name, call in named.items()], ROUNDS, seed=0)
    print(f"1 × {WIDTH} float32, median of {ROUNDS} rounds, fastest beside it")
    print(f"{'':38} {'µs':>6} {'least':>6}")
    for name, samples in found.items():
        times = sorted(samples.seconds)
        print(f"{name:38} {microseconds(times[ROUNDS // 2]):>6} {microseconds(times[0]):>6}")


if __name__ == "__main__":
    main()
