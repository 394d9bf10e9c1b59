"""A model in float64 from end to end, and how far rounding may move its outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from normkit.surgery.folding.flow import tensors_in
from normkit.surgery.folding.values import tensor_of

_NARROW = {torch.float32, torch.float16, torch.bfloat16}
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Float64Throughout(TorchDispatchMode):
    """Every cast to a narrower floating dtype, and every value made in one, is float64 instead.

    Models go through float32 in softmax, norms and rotary tables whatever they are given; a float64 copy alone would
    therefore agree with another to float32 only.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value

        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            return _grouped(*args, **(kwargs or {}))
        return func(*[wide(a) for a in args], **{name: wide(a) for name, a in (kwargs or {}).items()})


def _grouped(rows: Tensor, matrices: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Multiply each group of rows by its own matrix: mixtures of experts, for which PyTorch has no float64 kernel."""
    if offs is None or rows.dim() != 2 or matrices.dim() != 3:
        raise NotImplementedError("a grouped product other than rows by one matrix each has no float64 form here")
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    start = 0
    for end, matrix in zip(offs.tolist(), matrices, strict=True):
        out[start:end] = rows[start:end] @ matrix
        start = end
    return out


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy.

    Raises:
        ValueError: where there is none.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"fold_: {type(model).__name__} cannot be copied ({error}), and a fold is tried on copies first"
        ) from error


def call(model: nn.Module, example: Call) -> object:
    """Run the model on a copy of the example, so that caches in it are not filled twice.

    Raises:
        ValueError: where the model fails.
    """
    args, kwargs = cast(Call, _fresh(example))
    try:
        with torch.no_grad():
            return model(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            f"fold_: {type(model).__name__} failed on the example: {type(error).__name__}: {error}"
        ) from error


def widened(example: Call) -> Call:
    """Return the example with floating tensors in float64."""

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return cast(Call, tree_map(wide, example))


def _fresh(example: Call) -> Any:
    def fresh(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)

    return tree_map(fresh, example)


def numbers(out: object) -> list[Tensor]:
    """Return the floating tensors of an output."""
    return [t.detach() for t in tensors_in(out) if t.is_floating_point()]


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[float]:
    """Return the largest difference of each pair; equal infinities and NaN in both places do not differ."""
    return [_largest(x, y) for x, y in zip(a, b, strict=True)]


def _largest(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    same = (x == y) | (x.isnan() & y.isnan())
    gap = torch.where(same, 0.0, (x - y).abs())
    return float("inf") if bool(gap.isnan().any()) else float(gap.max()) if gap.numel() else 0.0


def scale_of(out: Sequence[Tensor]) -> list[float]:
    """Return the largest finite magnitude of each tensor."""
    return [float(t.abs().nan_to_num(0, 0, 0).max()) if t.numel() else 0.0 for t in out]


def response(
    model: nn.Module, names: Sequence[str], taps: int, run: Callable[[nn.Module], list[Tensor]], base: Sequence[Tensor]
) -> list[float]:
    """Return how far rounding may move each output of a float64 model when the named tensors are rewritten.

    A dot product of n terms, in any order, is the exact one of weights that are each off by at most n·u (Higham 2002,
    3.1). Before and after a fold the layers therefore compute exact products of weights within δ = 2·(n + 8)·u of
    each other, the 8 for the norm's own operations and the fold's. How far such changes move the outputs is
    measured, not guessed: every rewritten tensor is changed by ±δ at random, all at full size, three times. Rounding
    itself adds up like √n·u, not n·u; the largest of the three, doubled, bounds it with room. n·u of the output's
    own size stands for what is computed behind the last weight.
    """
    unit = torch.finfo(torch.float64).eps / 2
    delta = 2 * (taps + 8) * unit
    generator = torch.Generator().manual_seed(0)
    floor = [delta * size for size in scale_of(base)]
    worst = [0.0] * len(base)
    for _ in range(3):
        olds = {name: tensor_of(model, name).detach().clone() for name in names}
        with torch.no_grad():
            for name, old in olds.items():
                sign = torch.randint(0, 2, old.shape, generator=generator).to(old) * 2 - 1
                tensor_of(model, name).copy_(old * (1 + delta * sign))
        moved = distance(run(model), base)
        with torch.no_grad():
            for name, old in olds.items():
                tensor_of(model, name).copy_(old)
        worst = [max(a, b) for a, b in zip(worst, moved, strict=True)]
    return [2 * w + f for w, f in zip(worst, floor, strict=True)]
