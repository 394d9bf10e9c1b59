"""Who else is timed on a GPU: the norms of other libraries, where they are installed, each by its public way in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from normkit.bench.peer import GPU, Peer, Prepared
from normkit.bench.shapes import EPS, Case, Inputs


class Library(Peer):
    """A package that may be missing."""

    machines = (GPU,)
    package: ClassVar[str]
    install: ClassVar[str]

    def why_not(self, case: Case) -> str | None:
        """Refuse where it is not installed, then what it does not take."""
        if find_spec(self.package) is None:
            return f"not installed: pip install {self.install}"
        return self.refuses(case)

    def refuses(self, case: Case) -> str | None:
        """Return what the installed library cannot do, or None."""
        return None


class Liger(Library):
    """Liger Kernel's autograd functions, with gradients into memory of their own: in place they would overwrite dy."""

    name = "Liger"
    package, install = "liger_kernel", "liger-kernel"

    def refuses(self, case: Case) -> str | None:
        """Refuse rows that no program of its holds."""
        return "takes rows of 65536 elements at most" if case.shape.width > 65536 else None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return the function's call, under the cast order of Llama, which is its default."""
        x, w, eps = inputs.x, inputs.weight, EPS[case.op]
        if case.op == "layer":
            function = import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
            return Prepared(partial(function.apply, x, w, inputs.bias, eps))
        if case.op == "add_rms":
            function = import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
            return Prepared(partial(function.apply, x, inputs.residual, w, eps, 0.0, "llama", False))
        function = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        return Prepared(partial(function.apply, x, w, eps, 0.0, "llama", False))


class Quack(Library):
    """Quack's CuTe kernels. Its layer norm has no gradients and takes float32 parameters."""

    name = "quack"
    package, install = "quack", "quack-kernels"

    def refuses(self, case: Case) -> str | None:
        """Refuse gradients of a layer norm."""
        return "its layer norm records no gradient" if case.op == "layer" and case.which != "forward" else None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return the function's call; parameters are converted before the clock starts."""
        module: Any = import_module("quack.rmsnorm")
        x, w, eps = inputs.x, inputs.weight, EPS[case.op]
        if case.op == "layer":
            assert inputs.bias is not None
            flat, wide = x.detach().reshape(-1, case.shape.width), (w.detach().float(), inputs.bias.detach().float())
            return Prepared(_shaped(partial(module.layernorm_fwd, flat, *wide, eps=eps), case.shape.sizes))
        if case.op == "add_rms":
            return Prepared(partial(module.rmsnorm, x, w, residual=inputs.residual, eps=eps, prenorm=True))
        return Prepared(partial(module.rmsnorm, x, w, eps=eps))


class FlashAttention(Library):
    """The Triton norms of the flash-attention package."""

    name = "flash-attention"
    package, install = "flash_attn", "flash-attn --no-build-isolation"

    def refuses(self, case: Case) -> str | None:
        """Refuse rows that no program of its holds."""
        return "takes rows of 64 KiB at most" if case.shape.width * case.item > 1 << 16 else None

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Return the function's call."""
        norm: Any = import_module("flash_attn.ops.triton.layer_norm").layer_norm_fn
        given: dict[str, Any] = {"eps": EPS[case.op], "is_rms_norm": case.op != "layer"}
        if case.op == "add_rms":
            given |= {"residual": inputs.residual, "prenorm": True}
        return Prepared(partial(norm, inputs.x, inputs.weight, inputs.bias, **given))


def captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], tuple[torch.Tensor, ...]]:
    """Record a call as a CUDA graph; return its replay and the outputs that each replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiling and first allocations may not be recorded
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph.replay, out if isinstance(out, tuple) else (out,)


def _shaped(call: Callable[[], torch.Tensor], sizes: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    return lambda: call().view(sizes)


LIBRARIES: tuple[Peer, ...] = (Liger(), Quack(), FlashAttention())
