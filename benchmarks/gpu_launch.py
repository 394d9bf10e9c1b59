"""What launches cost in Python, Triton asked for each and after it was asked once: `python benchmarks/gpu_launch.py`.

Needs no GPU: compiler, driver and launch are stood in for (`normkit.kernels.gpu.dry`), the rest of Triton runs. On a
GPU its launcher in C comes on top, alike in both columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import normkit as nk
from normkit.kernels.gpu import contiguous, dry, positions, row_backward, rows


def row_calls() -> dict[str, Callable[[], object]]:
    """Return row norms of 16 × 4096 and of heads cut out of a joint projection."""
    x, w, spec = torch.randn(16, 4096).bfloat16(), torch.ones(4096).bfloat16(), nk.TORCH_RMS_NORM
    run, kept = contiguous.forward_for(spec, x.dtype, w.dtype, None, x.device), torch.empty(16, 2)
    heads, one = torch.randn(4, 16, 3, 128).bfloat16()[:, :, 1], torch.ones(128).bfloat16()
    wanted = (True, True, False)
    return {
        "RMSNorm forward": lambda: run(x, w, None, 1e-6, None, False),
        "RMSNorm backward": lambda: row_backward.backward(x, spec, w, None, x, kept, axes=(1,), wanted=wanted),
        "RMSNorm forward, strided": lambda: rows.forward(heads, spec, one, None, axes=(2,), eps=1e-6),
    }


def column_calls() -> dict[str, Callable[[], object]]:
    """Return norms across positions of 8 samples of 14 × 14 positions and 64 channels."""
    calls: dict[str, Callable[[], object]] = {}
    w, b = torch.ones(64), torch.zeros(64)
    for name, groups, per_sample, masked in (("batch", 64, False, 0), ("group", 32, True, 0), ("masked", 64, False, 1)):
        for layout, channel in (("channels last", 3), ("channels first", 1)):
            x = torch.randn((8, 14, 14, 64) if channel == 3 else (8, 64, 14, 14)).bfloat16()
            mask = x.narrow(channel, 0, 1) < 1 if masked else None
            how = {"channel": channel, "groups": groups, "per_sample": per_sample, "eps": 1e-5, "mask": mask}

            def forward(x: torch.Tensor = x, how: dict[str, object] = how) -> tuple[torch.Tensor, positions.Plan]:
                return positions.forward(x, w, b, **how)[1:3]  # type: ignore[arg-type]

            with dry.running():
                table, plan = forward()

            def backward(x: torch.Tensor = x, table: torch.Tensor = table, plan: positions.Plan = plan) -> object:
                return positions.backward(x, w, x, table, plan, wanted=(True, True, True))

            calls |= {f"{name} forward, {layout}": forward, f"{name} backward, {layout}": backward}
    return calls


def main() -> None:
    print(f"{'µs of Python':34} {'launches':>8} {'asked each time':>16} {'asked once':>11}")
    for name, call in (row_calls() | column_calls()).items():
        with dry.running(always_ask=True) as seen:
            call()
            launches = seen.launches
            asking = dry.microseconds(call)
        with dry.running():
            again = dry.microseconds(call)
        print(f"{name:34} {launches:8} {asking:16.1f} {again:11.1f}")


if __name__ == "__main__":
    main()
