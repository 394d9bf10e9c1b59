"""Who is timed. Adding a peer is adding a class here: a name, why it cannot take a case, and its forward.

Backward and training step are made from the forward for all of them alike, through autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normkit as nk
from normkit.bench import gpu_peers
from normkit.bench.peer import CPU, GPU, Peer, Prepared
from normkit.bench.shapes import EPS, Case, Inputs
from normkit.kernels import registry
from normkit.kernels.contract import Request


class Copy(Peer):
    """The yardstick: one tensor read, one written, by PyTorch's own copy, whatever the pass."""

    name = "copy"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return y.copy_(x). On a GPU x has no gaps: its copy of strided heads is slower than the memory."""
        x = inputs.x.detach()
        return Prepared(partial(inputs.y.copy_, x.contiguous() if case.gpu else x))


class CopyAgain(Copy):
    """The yardstick once more: what tells the two apart is noise."""

    name = "copy again"


class Normkit(Peer):
    """The module (for the add variant the function), which is what every ratio is taken against."""

    name = "normkit"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return a module's call, with its fresh output."""
        _require_kernel(case, inputs)
        if inputs.residual is not None:
            return Prepared(partial(nk.add_rms_norm, inputs.x, inputs.residual, inputs.weight, eps=EPS[case.op]))
        kind = nk.LayerNorm if case.op == "layer" else nk.RMSNorm
        return Prepared(partial(_sharing(kind(case.shape.width, eps=EPS[case.op]), inputs), inputs.x))


class NormkitInto(Peer):
    """The function into an output that exists: the kernel without the page faults of new memory."""

    name = "normkit, out="
    given = True

    def why_not(self, case: Case) -> str | None:
        """Refuse gradients."""
        return None if case.which == "forward" else "out= records no gradient"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return the operator with out=."""
        _require_kernel(case, inputs)
        if inputs.residual is not None:
            outs = torch.full_like(inputs.y, torch.nan), torch.full_like(inputs.residual, torch.nan)
            call = partial(nk.add_rms_norm, inputs.x, inputs.residual, inputs.weight, eps=EPS[case.op], out=outs)
            return Prepared(call, outs)
        norm, out = nk.layer_norm if case.op == "layer" else nk.rms_norm, torch.full_like(inputs.y, torch.nan)
        return Prepared(partial(norm, inputs.x, inputs.weight, inputs.bias, eps=EPS[case.op], out=out), (out,))


class NormkitGraph(Peer):
    """The module's forward, recorded as a CUDA graph and replayed: the kernel without Python's part of a launch."""

    name = "normkit, graph"
    given = True
    machines = (GPU,)

    def why_not(self, case: Case) -> str | None:
        """Refuse gradients."""
        return None if case.which == "forward" else "forwards only"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return the graph's replay, which writes the same outputs each time."""
        return Prepared(*gpu_peers.captured(Normkit().prepare(case, inputs).call))


class TorchLayerNorm(Peer):
    """PyTorch's LayerNorm, a fused kernel."""

    name = "nn.LayerNorm"
    ops = ("layer",)

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return the module's call."""
        return Prepared(partial(_sharing(nn.LayerNorm(case.shape.width, eps=EPS[case.op]), inputs), inputs.x))


class TorchRMSNorm(Peer):
    """PyTorch's RMSNorm, on a CPU a chain of operators, on a GPU fused."""

    name = "nn.RMSNorm"
    ops = ("rms",)

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return the module's call."""
        return Prepared(partial(_sharing(nn.RMSNorm(case.shape.width, eps=EPS[case.op]), inputs), inputs.x))


class TorchAddRMSNorm(Peer):
    """A residual add and PyTorch's rms_norm."""

    name = "F.rms_norm(x + r)"
    ops = ("add_rms",)

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return the two calls as one."""
        return Prepared(partial(_torch_add_rms, inputs.x, inputs.residual, inputs.weight, EPS[case.op]))


class Formula(Peer):
    """The formula as modelling code of the Hugging Face library has it, eager: upcast, normalise, cast back, weigh."""

    name = "HF formula, eager"

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return the formula's call."""
        formula = self._made({"rms": _rms_formula, "layer": _layer_formula, "add_rms": _add_formula}[case.op])
        tensors = [t for t in (inputs.x, inputs.residual, inputs.weight, inputs.bias) if t is not None]
        return Prepared(partial(formula, *tensors, EPS[case.op]))

    def _made(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        return formula


class CompiledFormula(Formula):
    """The same through torch.compile, for exactly these sizes: no guard on a dynamic shape is paid for."""

    name = "HF formula, compiled"

    def _made(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(formula, fullgraph=True, dynamic=False)


class OnnxRuntime(Peer):
    """One node in onnxruntime, bound to x and to an output that exists; its idle threads do not spin."""

    name = "onnxruntime"
    given = True
    machines = (CPU,)

    def why_not(self, case: Case) -> str | None:
        """Refuse where it is not installed, and what it has no CPU kernel for."""
        missing = [package for package in ("onnxruntime", "onnx") if find_spec(package) is None]
        if missing:
            return f"not installed: pip install {' '.join(missing)}"
        if case.which != "forward":
            return "runs forwards only"
        if case.dtype == "bfloat16":
            return "has no bfloat16 kernel for CPUs"
        return "takes contiguous tensors only" if case.shape.heads else None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return a bound session's run."""
        from normkit.bench.onnx_session import bound

        return Prepared(*bound(case, inputs))


PEERS: tuple[Peer, ...] = (
    Copy(),
    CopyAgain(),
    NormkitInto(),
    Normkit(),
    NormkitGraph(),
    TorchLayerNorm(),
    TorchRMSNorm(),
    TorchAddRMSNorm(),
    Formula(),
    CompiledFormula(),
    OnnxRuntime(),
    *gpu_peers.LIBRARIES,
)
ALWAYS = (Copy.name, CopyAgain.name, Normkit.name, NormkitInto.name)


GIVEN = tuple(peer.name for peer in PEERS if peer.given)


def peers_named(names: list[str]) -> tuple[Peer, ...]:
    """Return the peers of these names, and the yardstick and normkit, which are always there; all for no name.

    Raises:
        ValueError: for a name that is none.
    """
    known = [peer.name for peer in PEERS if peer.name not in ALWAYS]
    for name in names:
        if name not in known:
            raise ValueError(f"--peer {name!r}: no such peer; one of {'; '.join(known)}")
    return tuple(peer for peer in PEERS if not names or peer.name in ALWAYS or peer.name in names)


def _require_kernel(case: Case, inputs: Inputs) -> None:
    """Refuse to time plain PyTorch operators under normkit's name on a GPU.

    Raises:
        RuntimeError: saying why no GPU kernel takes the case.
    """
    if not case.gpu:
        return
    spec = nk.TORCH_LAYER_NORM if case.op == "layer" else nk.TORCH_RMS_NORM
    request = Request(spec, inputs.x, (inputs.x.dim() - 1,), inputs.weight, inputs.bias, inputs.residual)
    decision = registry.choose(request)
    if decision.kernel.name != "gpu":
        why = dict(decision.rejected).get("gpu", decision.reason)
        raise RuntimeError(f"not on the GPU kernels but on {decision.kernel.name}: {why}")


def _sharing(module: nn.Module, inputs: Inputs) -> nn.Module:
    """Give the module the parameters that all contenders share, so that all take gradients of the same leaves."""
    module.weight = inputs.weight
    if inputs.bias is not None:
        module.bias = inputs.bias
    return module


def _torch_add_rms(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert residual is not None
    s = x + residual
    return F.rms_norm(s, (s.shape[-1],), weight, eps), s


def _rms_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _layer_formula(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    d = wide - wide.mean(-1, keepdim=True)
    return weight * (d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) + bias


def _add_formula(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    s = x + residual
    return _rms_formula(s, weight, eps), s
