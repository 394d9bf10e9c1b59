"""Everything that a tracer may meet: a module and inputs for a batch of any size, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.conventions import NAMED
from rows import randn

N = 12


@dataclass(frozen=True)
class Case:
    """A module and its inputs for a batch size; extreme rows are among them from four on."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]


class Call(nn.Module):
    """A function as a module, with a random weight of (N,) handed to it after its inputs."""

    def __init__(self, function: Callable[..., object], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(randn(N, seed=7, dtype=dtype))

    def forward(self, *inputs: Tensor) -> object:
        return self.function(*inputs, self.weight)


def randomized(module: nn.Module) -> nn.Module:
    """Replace every parameter by random numbers, so that a weight forgotten shows."""
    with torch.no_grad():
        for seed, p in enumerate(module.parameters()):
            p.copy_(randn(*p.shape, seed=100 + seed))
    return module


def rows(batch: int) -> tuple[Tensor, ...]:
    x = randn(batch, 3, N, seed=batch)
    if batch > 3:
        x[1, 0] *= 1e20
        x[2, 0] *= 1e-20
    return (x,)


def pair(batch: int) -> tuple[Tensor, ...]:
    return randn(batch, 3, N, seed=batch), randn(batch, 3, N, seed=batch + 1)


def heads(batch: int) -> tuple[Tensor, ...]:
    return randn(batch, 7, 4, 6, seed=batch), randn(batch, 7, 2, 6, seed=batch + 1)


def masked(batch: int) -> tuple[Tensor, ...]:
    return randn(batch, 3, N, seed=batch), torch.arange(3).expand(batch, 3) < 1 + (torch.arange(batch) % 3)[:, None]


def of_spec(spec: nk.NormSpec, dtype: torch.dtype = torch.float32) -> Call:
    """Return any convention as a module of (x) or, with a gate, (x, gate)."""
    if spec.gate != "none":
        return Call(lambda x, g, w: nk.gated_rms_norm(x, g, w, group_size=4, spec=spec), dtype)
    if spec.weight == "none":
        return Call(lambda x, w: nk.normalize(x, spec, eps=1e-6), dtype)
    return Call(lambda x, w: nk.normalize(x, spec, w, eps=1e-6), dtype)


def extra(name: str) -> dict[str, object]:
    """Return what a wiring's constructor needs besides its width and sublayer."""
    return {"depth": 6} if nk.WIRINGS[name].scaled_residual else {}


SPECS = {name: Case(lambda s=spec: of_spec(s), pair if spec.gate != "none" else rows) for name, spec in NAMED.items()}
CASES: dict[str, Case] = {
    "layer": Case(lambda: nk.LayerNorm(N), rows),
    "rms": Case(lambda: nk.RMSNorm(N, spec=nk.LLAMA), rows),
    "middle axis": Case(lambda: Call(lambda x, w: nk.rms_norm(x.mT, w[:, None], axis=1)), rows),
    "add layer": Case(lambda: Call(lambda x, r, w: nk.add_layer_norm(x, r, w, alpha=2.0)), pair),
    "add rms": Case(lambda: Call(lambda x, r, w: nk.add_rms_norm(x, r, w, branch_scale=0.5)), pair),
    "gated": Case(lambda: nk.GatedRMSNorm(N, group_size=4), pair),
    "l2": Case(lambda: Call(lambda x, w: nk.l2_norm(x) * w), rows),
    "scale": Case(lambda: nk.ScaleNorm(N), rows),
    "qk": Case(lambda: nk.QKNorm(6, 4, num_kv_heads=2), heads),
    "qk per head": Case(lambda: nk.QKNorm(6, 4, num_kv_heads=2, per_head_weight=True), heads),
    "qk full": Case(lambda: nk.QKNorm(6, 4, num_kv_heads=2, coverage="full"), heads),
    "group": Case(lambda: nk.GroupNorm(3, N), rows),
    "group, masked": Case(lambda: nk.GroupNorm(3, N), masked),
    "instance": Case(lambda: nk.InstanceNorm(N), rows),
    "batch": Case(lambda: nk.BatchNorm(N), rows),
    "batch, evaluated": Case(lambda: nk.BatchNorm(N).eval(), rows),
    "dyt": Case(lambda: nk.DyT(N), rows),
    "derf": Case(lambda: nk.Derf(N), rows),
    **{
        f"placement {name}": Case(lambda n=name: nk.placement(n)(N, nn.Linear(N, N), **extra(n)), rows)
        for name in nk.WIRINGS
    },
}


def outputs(result: object) -> tuple[Tensor, ...]:
    """Return a result as a tuple of tensors."""
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]
