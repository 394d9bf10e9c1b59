"""How PyTorch sees a norm: three ways to compute it, chosen per call.

(a) Anything that looks inside operators (compiling, exporting, tracing, modes, functorch levels, forward mode,
    subclasses, tensors without memory) gets the reference: plain ATen, right under every transform.
(b) Where a gradient is needed, an autograd function runs the kernel and saves x and float32 row statistics. Its
    backward is a kernel too, unless the backward itself is to be differentiated: then it is the reference's.
(c) Otherwise the kernel runs directly.

``torch.library.custom_op`` is not used for this: forward mode through it returns zeros without an error, double
backward is wrong with a warning, functorch raises (torch 2.13), and its dispatch alone costs more than a small norm.
`python benchmarks/launch.py` prints what the parts of a call cost here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from normkit.kernels import reference, registry
from normkit.kernels.contract import Kernel, Request
from normkit.kernels.cpu import pool as pool  # at import: it notes the process, and a fork may come before a kernel
from normkit.kernels.registry import REFERENCE
from normkit.kernels.rounding import round_to
from normkit.kernels.statistics import accumulation_dtype
from normkit.spec import NormSpec

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_keys_of = _C._dispatch_keys


@lru_cache(maxsize=1)
def _plain_keys() -> frozenset[int]:
    """Return the dispatch keys of an ordinary CPU tensor and of an inference tensor, whatever mode the caller is in."""
    keys: set[int] = set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            keys.add(_keys_of(torch.empty(0, device="cpu")).raw_repr())
    return frozenset(keys)


def watched() -> bool:
    """Say whether something looks inside operators right now, so that only plain ATen is right."""
    return (
        torch.compiler.is_compiling()
        or _C._len_torch_dispatch_stack() > 0
        or _C._is_torch_function_mode_enabled()
        or _C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or _C._get_tracing_state() is not None
    )


def plain(t: Tensor | None) -> bool:
    """Say whether ``t`` is an ordinary CPU tensor with memory: no subclass, no wrapper, no lazy negation."""
    if t is None:
        return True
    kind = type(t)
    return (kind is Tensor or kind is nn.Parameter) and _keys_of(t).raw_repr() in _plain_keys()


def _needs_grad(*tensors: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in tensors)


def normalize(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    axes: tuple[int, ...],
    eps: float,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute ``spec`` on x by the best way there is; arguments as `normkit.kernels.reference.normalize` takes them."""
    if not watched():
        request = Request(spec, x, axes, weight, bias, gated=gate is not None, masked=mask is not None)
        kernel = _choose(request, x, weight, bias, out)
        if kernel is not REFERENCE:
            if _needs_grad(x, weight, bias):
                return _Norm.apply(x, weight, bias, spec, axes, eps, kernel)  # type: ignore[no-any-return]
            if out is None:
                return kernel.forward(x, spec, weight, bias, axes=axes, eps=eps)[0]  # type: ignore[no-any-return]
            if not _may_write(out, x, weight, bias):
                return out.copy_(kernel.forward(x, spec, weight, bias, axes=axes, eps=eps)[0])
            kernel.forward(x, spec, weight, bias, axes=axes, eps=eps, out=out)
            increment_version(out)  # a backward that saved the old values must notice
            return out
    y = reference.normalize(x, spec, weight, bias, axes=axes, eps=eps, gate=gate, mask=mask)
    return y if out is None else out.copy_(y)


def _choose(request: Request, *tensors: Tensor | None) -> Kernel:
    """Return the kernel for a request; only ordinary tensors have memory that a kernel may touch."""
    if all(map(plain, tensors)):
        return registry.choose(request).kernel
    registry.check_reference("a tensor is no ordinary CPU tensor with memory")
    return REFERENCE


def _may_write(out: Tensor, x: Tensor, *parameters: Tensor | None) -> bool:
    """Say whether a kernel may write rows into ``out`` while it reads its inputs.

    Over x itself it may, element for element; over anything else it would read what it has just written.
    """
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError("out= is an inference tensor, which may be written under torch.inference_mode() only")
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        return False  # copy_ refuses: two elements of out share their memory
    same = out.data_ptr() == x.data_ptr() and out.stride() == x.stride() and out.dtype == x.dtype
    inputs = parameters if same else (x, *parameters)
    return not any(t is not None and _overlap(out, t) for t in inputs)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Say whether the memory from first to last element of each meets; views of one NumPy array are seen, too."""
    low_a, high_a = _span(a)
    low_b, high_b = _span(b)
    return low_a < high_b and low_b < high_a


def _span(t: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def quick(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: object, spec: NormSpec) -> Tensor | None:
    """Run the common case with as few questions as are safe: contiguous rows, and no backend asked for.

    None means that the long way must decide, or complain. At 1 × 4096 the questions cost as much as the norm.
    """
    if watched() or type(eps) is not float or not 0.0 <= eps < _LARGEST_EPS or registry.backend() != "auto":
        return None
    if not (plain(x) and plain(weight) and plain(bias)):
        return None
    if x.dim() == 0 or not x.is_contiguous() or not (_is_row(weight, x) and _is_row(bias, x)):
        return None
    key = (spec, x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    found = _quick.get(key)
    if found is None:
        if spec.gate != "none" or (spec.weight == "none" and weight is not None):
            return None
        request = Request(spec, x, (x.dim() - 1,), weight, bias)
        kernel = registry.choose(request).kernel
        if kernel is REFERENCE:
            return None
        found = _quick[key] = (kernel, kernel.quick(request))
    kernel, run = found
    if _needs_grad(x, weight, bias):
        if not x.numel():
            return None
        return _Norm.apply(x, weight, bias, spec, (x.dim() - 1,), eps, kernel)  # type: ignore[no-any-return]
    return run(x, weight, bias, eps)  # type: ignore[no-any-return]


_quick: dict[Any, Any] = {}
_LARGEST_EPS = 1e30


def _is_row(p: Tensor | None, x: Tensor) -> bool:
    return p is None or (p.dim() == 1 and p.shape[0] == x.shape[-1] and p.is_contiguous())


def add_normalize(
    x: Tensor,
    residual: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    alpha: float,
    beta: float,
    axes: tuple[int, ...],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the norm of ``s = α·residual + β·x`` and s itself, rounded before its statistic is taken."""
    if not watched():
        request = Request(spec, x, axes, weight, bias, residual=residual)
        kernel = _choose(request, x, residual, weight, bias)
        if kernel is not REFERENCE:
            if _needs_grad(x, residual, weight, bias):
                return _AddNorm.apply(x, residual, weight, bias, spec, axes, eps, alpha, beta, kernel)  # type: ignore[no-any-return]
            y, s, _ = kernel.add_forward(x, residual, spec, weight, bias, alpha=alpha, beta=beta, axes=axes, eps=eps)
            return y, s
    return _add_reference(x, residual, spec, weight, bias, alpha, beta, axes, eps)


def _add_reference(
    x: Tensor,
    residual: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: float,
    beta: float,
    axes: tuple[int, ...],
    eps: float,
) -> tuple[Tensor, Tensor]:
    stream = torch.promote_types(x.dtype, residual.dtype)
    wide = accumulation_dtype(stream)
    # Scales of 1 are left out, so that the sum is the plain sum; α·r + β·x is formed wide and then rounded.
    scaled = residual.to(wide) if alpha == 1 else residual.to(wide) * alpha
    branch = x.to(wide) if beta == 1 else x.to(wide) * beta
    s = round_to(scaled + branch, stream)
    return reference.normalize(s, spec, weight, bias, axes=axes, eps=eps, out_dtype=x.dtype), s


class _Norm(torch.autograd.Function):
    """The fused norm as autograd sees it. Old-style, ctx in forward: the setup_context form costs more per call."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        spec: NormSpec,
        axes: tuple[int, ...],
        eps: float,
        kernel: Any,
    ) -> Tensor:
        y, stats = kernel.forward(x, spec, weight, bias, axes=axes, eps=eps, keep=True)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.spec, ctx.axes, ctx.eps, ctx.kernel = spec, axes, eps, kernel
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, weight, bias, stats = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or watched() or not all(map(plain, (dy, x, weight))):
            grads = _through_reference(ctx, (x, weight, bias), wanted, dy)
        else:
            grads = ctx.kernel.backward(x, ctx.spec, weight, bias, dy, stats, axes=ctx.axes, wanted=wanted)
        return (*grads, None, None, None, None)


class _AddNorm(torch.autograd.Function):
    """The fused residual add and norm as autograd sees it: saves the sum, from which both gradients follow."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        spec: NormSpec,
        axes: tuple[int, ...],
        eps: float,
        alpha: float,
        beta: float,
        kernel: Any,
    ) -> tuple[Tensor, Tensor]:
        y, s, stats = kernel.add_forward(
            x, residual, spec, weight, bias, alpha=alpha, beta=beta, axes=axes, eps=eps, keep=True
        )
        ctx.save_for_backward(s, weight, bias, stats)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.axes, ctx.eps, ctx.kernel, ctx.scales = spec, axes, eps, kernel, (alpha, beta)
        ctx.dtypes = (x.dtype, residual.dtype)
        return y, s

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, ds = gradients
        s, weight, bias, stats = ctx.saved_tensors
        alpha, beta = ctx.scales
        dtype_x, dtype_residual = ctx.dtypes
        want_x, want_residual, want_w, want_b = ctx.needs_input_grad[:4]
        want_s = want_x or want_residual
        total, dw, db = ds, None, None
        if dy is not None:
            if torch.is_grad_enabled() or watched() or not all(map(plain, (dy, ds, s, weight))):
                through, dw, db = _through_reference(
                    ctx, (s, weight, bias), (want_s, want_w, want_b), dy, out_dtype=dtype_x
                )
                total = through if ds is None or through is None else through + ds
            else:
                total, dw, db = ctx.kernel.backward(
                    s,
                    ctx.spec,
                    weight,
                    bias,
                    dy,
                    stats,
                    axes=ctx.axes,
                    wanted=(want_s, want_w, want_b),
                    extra=ds,
                    target=dtype_x,
                )
        dx = _scaled(total, beta, dtype_x) if want_x else None
        dr = _scaled(total, alpha, dtype_residual) if want_residual else None
        return dx, dr, dw, db, None, None, None, None, None, None


def _scaled(total: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor | None:
    if total is None:
        return None
    return (total if factor == 1 else total * factor).to(dtype)


def _through_reference(
    ctx: Any,
    inputs: tuple[Tensor | None, ...],
    wanted: tuple[bool, ...],
    dy: Tensor,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, ...]:
    """Differentiate the reference at saved (x or sum, weight, bias): the way to second derivatives."""
    keep_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that a leaf's own gradient is not what is asked for, while its graph stays connected.
        leaves = tuple(
            None if t is None else (t.view_as(t) if t.requires_grad else t.detach().requires_grad_(w))
            for t, w in zip(inputs, wanted, strict=True)
        )
        x, w, b = leaves
        assert x is not None
        y = reference.normalize(x, ctx.spec, w, b, axes=ctx.axes, eps=ctx.eps, out_dtype=out_dtype)
        asked = [t for t, w in zip(leaves, wanted, strict=True) if w and t is not None]
        found = iter(torch.autograd.grad(y, asked, dy, create_graph=keep_graph, allow_unused=True))
    return tuple(next(found) if w and t is not None else None for t, w in zip(leaves, wanted, strict=True))
