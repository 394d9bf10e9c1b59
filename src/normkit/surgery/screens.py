"""Cheap questions that come first: can it be run, does a statistic exist, what does it cover."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from normkit.surgery.candidates import Coverage
from normkit.surgery.probes import normal, uniform
from normkit.surgery.stand_in import NotRunError, StandIn

LARGEST_PARAMETERS = 1 << 22
LARGEST_MATRIX = 1 << 17  # a weight a head: 128 heads of 1024
DEFAULT_WIDTH = 64


# Exactly these classes, whose forward PyTorch defines: no probe is needed to know that they are no norms.
_KNOWN: dict[str, tuple[type[nn.Module], ...]] = {
    "a matrix product": (nn.Linear, nn.Bilinear),
    "a table of vectors": (nn.Embedding, nn.EmbeddingBag),
    "a convolution": (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    "dropout": (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
}


def refusal(module: nn.Module) -> str | None:
    """Return why a module cannot be a norm, or cannot be asked, without running it."""
    if "forward" not in vars(module):
        for what, classes in _KNOWN.items():
            if type(module) in classes:
                return f"{type(module).__name__}: {what}"
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return "compiled by torch.compile; identify the module inside (_orig_mod)"
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module: it cannot be run on parameters of another dtype"
    parts = [name for name, child in module.named_children() if not _stateless(child)]
    if parts:
        return f"contains modules with a life of their own ({', '.join(parts[:4])}), so it is no single norm"
    tensors = [*module._parameters.items(), *module._buffers.items()]
    for name, t in tensors:
        if t is None:
            continue
        if type(t) not in (Tensor, nn.Parameter, nn.Buffer):
            return f"{name} is a {type(t).__name__} (sharded, quantised or not yet made), which probes cannot replace"
        if t.is_quantized or (t.dtype not in _FLOATS and name in module._parameters):
            return f"{name} is {t.dtype}: quantised parameters are not probed"
    for name, p in module._parameters.items():
        shape = () if p is None else tuple(p.shape)
        matrix = sum(s > 1 for s in shape) > 1 and math.prod(shape) > LARGEST_MATRIX
        if matrix and shape != tuple(getattr(module, "normalized_shape", ())):
            return f"{name} has shape {shape}: a matrix, where a norm has one number an element"
    total = sum(t.numel() for _, t in tensors if t is not None)
    if total > LARGEST_PARAMETERS:
        return f"holds {total} numbers, too many for a norm's weight and bias"
    return None


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _stateless(child: nn.Module) -> bool:
    """Say whether a child is a mere function, as the activation of a gated norm."""
    own = next(child.parameters(), None) is None and next(child.buffers(), None) is None
    return own and not any(True for _ in child.children()) and not isinstance(child, nn.modules.dropout._DropoutNd)  # pyright: ignore[reportPrivateUsage]


def on_meta(module: nn.Module) -> bool:
    """Say whether a parameter or buffer has no values."""
    return any(t.is_meta for t in [*module.parameters(), *module.buffers()])


def device_of(module: nn.Module) -> torch.device:
    """Return where to run the probes: where the module is, or the CPU."""
    for t in [*module.parameters(), *module.buffers()]:
        if not t.is_meta:
            return t.device
    return torch.device("cpu")


def takes_gate(module: nn.Module) -> tuple[bool, bool]:
    """Return whether ``forward`` takes a second tensor, and whether it insists on it."""
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False, False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return False, False
    second = positional[1]
    insists = second.default is inspect.Parameter.empty
    return insists or (second.default is None and "gate" in second.name), insists


def guesses(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield shapes of x worth trying, the likelier first."""
    shapes = [tuple(t.shape) for t in [*module.parameters(), *module.buffers()] if t.is_floating_point() and t.dim()]
    attributes = vars(module)
    normalized = attributes.get("normalized_shape")
    if isinstance(normalized, (tuple, list)) and len(normalized) > 1:
        yield (4, 4, *map(int, normalized))
    if shapes and len(shapes[0]) == 2:
        yield (4, 4, *shapes[0])
    width = max((s[-1] for s in shapes), default=0)
    long = max((max(s) for s in shapes), default=0)
    for name in ("normalized_shape", "dim", "hidden_size", "num_channels", "num_features", "head_dim", "d_model"):
        value = attributes.get(name)
        value = value[-1] if isinstance(value, (tuple, list)) and value else value
        if not width and isinstance(value, int) and not isinstance(value, bool):
            width = value
    if "num_groups" in attributes or "num_features" in attributes:
        positions = ((4, 4), (6,), (2, 4, 4))
        yield from ((4, width, *p) for p in positions if width > 1)
    width = width if width > 1 else (long if long > 1 else DEFAULT_WIDTH)
    for size in dict.fromkeys((width, max(long, width))):
        yield (4, 4, size)
        yield (16, size)
        yield (2, size, 4, 4)
        yield (2, size, 6)
        yield (2, size, 2, 4, 4)
        yield (4, size, 4, 8)
        yield (4, 2, 4, size)
    heads = next((v for n, v in attributes.items() if "head" in n and isinstance(v, int)), 0)
    if heads and heads < width and width % heads == 0:
        yield (4, 4, heads, width // heads)
        yield (4, heads, 4, width // heads)
    if width < DEFAULT_WIDTH:
        yield (4, 4, width, DEFAULT_WIDTH)


class NoNormError(Exception):
    """The module is no norm known here; the message is the reason."""


Run = Callable[..., Tensor]


def first_shape(module: nn.Module, run: Run) -> tuple[int, ...]:
    """Return the first shape that the module takes and gives back.

    Raises:
        NoNormError: when it takes none.
    """
    whys: list[str] = []
    for shape in dict.fromkeys(guesses(module)):
        try:
            run(uniform(shape, 1))
        except NotRunError as why:
            whys.append(str(why))
            continue
        return shape
    # What it returned says more than what it raised for a shape that was a mere guess.
    told = next((why for why in whys if why.startswith("it returns")), whys[0])
    raise NoNormError(f"takes no tensor and returns one of its shape: {told}")


def coverage_of(run: Run, shape: tuple[int, ...]) -> Coverage:
    """Find by perturbing one element which others see it.

    Raises:
        NoNormError: when there is no statistic, or one that covers something unknown here.
    """
    x = normal(shape, 2)
    if not torch.equal(run(x), run(x)):
        raise NoNormError("two runs on one input differ: it is random (dropout?)")
    at = tuple(size // 2 for size in shape)
    moved = x.clone()
    moved[at] += 8.0
    before, after = run(x), run(moved)
    if not bool(before.isfinite().all()):
        raise NoNormError("gives infinities or NaN for ordinary values")
    changed = before != after
    if not bool(changed.any()):
        raise NoNormError("y does not depend on x")
    if int(changed.sum()) == 1 and bool(changed[at]):
        raise NoNormError(_pointwise(run, x))
    return _box(changed, shape)


def _pointwise(run: Run, x: Tensor) -> str:
    steps = [run(x * s) for s in (-1.0, 0.0, 1.0, 2.0)]
    rises = [b - a for a, b in pairwise(steps)]
    if all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairwise(rises)):
        return (
            "affine in x, element by element: no statistic of x (stored statistics as in batch norm at inference, "
            "a scale, or the identity)"
        )
    return "pointwise: y depends on its own x alone, so there is no statistic (an activation, DyT, Derf)"


def _box(changed: Tensor, shape: tuple[int, ...]) -> Coverage:
    """Turn the set of outputs that saw one input into axes and groups."""
    lows, sizes = [], []
    for d in range(len(shape)):
        seen = changed.movedim(d, 0).flatten(1).any(1).nonzero().flatten()
        lows.append(int(seen[0]))
        sizes.append(int(seen[-1]) - int(seen[0]) + 1)
    box = 1
    for s in sizes:
        box *= s
    if int(changed.sum()) < 0.9 * box:
        raise NoNormError("which outputs see an input does not look like rows, groups or channels: it mixes positions")
    axes = [d for d, size in enumerate(sizes) if size > 1]
    if 0 in axes:
        raise NoNormError(
            "statistics run over the first axis, the batch: batch norm in training mode, or a mixing layer"
        )
    part = [d for d in axes if sizes[d] != shape[d]]
    if not part:
        rank = len(shape)
        channel = -1 if axes[-1] == rank - 1 and len(axes) == 1 else (1 if 1 in axes else axes[0])
        return Coverage(_named(axes, rank), 1, channel if len(axes) > 1 or axes[-1] != rank - 1 else -1)
    if len(part) > 1 or shape[part[0]] % sizes[part[0]] or lows[part[0]] % sizes[part[0]]:
        raise NoNormError(f"a statistic covers {sizes} of {list(shape)} elements, no whole groups")
    groups = shape[part[0]] // sizes[part[0]]
    channel = -1 if part[0] == len(shape) - 1 else part[0]
    return Coverage(_named(axes, len(shape)), groups, channel)


def _named(axes: list[int], rank: int) -> tuple[int, ...]:
    """Count axes from the end where they end there, else from the front."""
    return tuple(a - rank for a in axes) if axes[-1] == rank - 1 and axes[0] != 1 else tuple(axes)


def screen_scale(run: Run, shape: tuple[int, ...]) -> None:
    """Refuse what does not take the scale out of large x.

    Raises:
        NoNormError: when doubling x changes y by more than a thousandth.
    """
    x = normal(shape, 3) * 256.0
    one, two = run(x), run(x * 4)
    size = float(one.abs().amax())
    if size == 0 or float((one - two).abs().amax()) > 1e-3 * size:
        raise NoNormError("scaling x changes y: nothing divides by x's size")


def roles(run: Any, stand_in: StandIn, shape: tuple[int, ...]) -> tuple[str | None, str | None]:
    """Find which tensor multiplies and which is added.

    Raises:
        NoNormError: when more than two tensors matter, or two of one kind.
    """
    x, other = normal(shape, 4), normal(shape, 5)
    base = {name: uniform(t.shape, 10 + i) for i, (name, t) in enumerate(stand_in.tensors.items())}
    weights: list[str] = []
    biases: list[str] = []
    at_x, at_other = run(x, values=base), run(other, values=base)
    for i, name in enumerate(base):
        moved = {**base, name: base[name] + uniform(base[name].shape, 30 + i)}
        here, there = run(x, values=moved) - at_x, run(other, values=moved) - at_other
        if not bool(here.any()):
            continue
        added = torch.allclose(here, there, rtol=1e-3, atol=1e-4)
        (biases if added else weights).append(name)
    if len(weights) > 1 or len(biases) > 1:
        raise NoNormError(f"more than one weight and one bias act on x: {', '.join([*weights, *biases])}")
    return (weights[0] if weights else None), (biases[0] if biases else None)


def parameter_axis(run: Any, shape: tuple[int, ...], name: str, value: Tensor) -> int | None:
    """Return the axis of x that a vector of parameters lies along, or None where it does not lie along one."""
    x = normal(shape, 6)
    moved = value.clone()
    moved[0] += 1.0
    changed = run(x, values={name: moved}) != run(x, values={name: value})
    extents = [len(changed.movedim(d, 0).flatten(1).any(1).nonzero()) for d in range(len(shape))]
    along = [d for d, extent in enumerate(extents) if extent == 1 and shape[d] == len(value)]
    return along[0] if len(along) == 1 else None
