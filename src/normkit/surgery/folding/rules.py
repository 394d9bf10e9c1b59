"""What each operator does to a tracked value; whatever is not listed here counts as an unknown use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from normkit.surgery.folding.flow import Flow, Reader, last_axis, memory, tensors_in

aten = torch.ops.aten

# They look at shape and dtype only.
_METADATA = {
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.new_empty_strided.default,
}  # fmt: skip
# They only move elements, so the channels move the same way.
_MOVES = {
    aten.clone.default, aten.index.Tensor, aten.index_select.default, aten.repeat.default, aten.cat.default,
    aten.stack.default, aten.roll.default, aten.flip.default,
}  # fmt: skip
_NORMS = {
    aten.native_layer_norm.default, aten._fused_rms_norm.default, aten.native_group_norm.default,
    aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten._native_batch_norm_legit_no_training.default,
}  # fmt: skip
_SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar}
_SUMS_IN_PLACE = {aten.add_.Tensor, aten.sub_.Tensor}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
_SCALES = _PRODUCTS | {aten.div.Tensor, aten.div.Scalar}


def see(flow: Flow, where: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: object) -> None:
    """Follow the tracked values among ``args`` through one operator, or write down that it used them."""
    if func in _METADATA:
        return
    given = [*tensors_in(list(args)), *tensors_in(kwargs)]
    results = list(tensors_in(out))
    if func in _NORMS:
        flow.bare.setdefault(where, str(func))
    for tensor in given:
        if (owner := flow.owner(tensor)) is not None:
            flow.strays.setdefault(owner, f"{func} in {where}")
    if func is aten.embedding.default and _gather(flow, args[0], results[0]):
        return
    for tensor in given:
        _free_parameter(flow, tensor, func, where, results)
    read = [t for t in given if flow.track(t) is not None]
    if not read:
        return
    followed = False
    if func in _SUMS_IN_PLACE:
        followed = _sum(flow, args, kwargs, results[0], _whole(args[0]))
    elif _writes(func):
        pass
    elif results and all(_views(flow, t, read) for t in results):
        return
    elif func in _SUMS:
        followed = _sum(flow, args, kwargs, results[0], True)
    elif func in _SCALES:
        followed = _scale(flow, func, args, results[0])
    elif func is aten._to_copy.default and results[0].is_floating_point():
        followed = _move(flow, aten.clone.default, args[:1], {}, given, results[0])
    elif func in _MOVES:
        followed = _move(flow, func, args, kwargs, given, results[0])
    if not followed:
        for tensor in read:
            flow.read(tensor, "other", f"{func} in {where}")
        for tensor in _written(func, args, kwargs):
            flow.forget(tensor)


def _views(flow: Flow, result: Tensor, read: list[Tensor]) -> bool:
    track = flow.track(result)
    return track is not None and track.held.dtype == result.dtype and any(memory(t) == memory(result) for t in read)


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    if not _writes(func):
        return []
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    marked = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return list(tensors_in([named.get(name) for name in marked]))


def _whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _sum(flow: Flow, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor, whole: bool) -> bool:
    sides = [a for a in args[:2] if isinstance(a, Tensor)]
    tracks = [(t, track) for t in sides if (track := flow.track(t)) is not None]
    maps = [track.channels_of(t) for t, track in tracks]
    if not whole or any(t.dtype != track.held.dtype for t, track in tracks):
        return False
    wide = [m.expand(out.shape) for m in maps]
    if len(wide) == 2 and not torch.equal(wide[0], wide[1]):
        return False
    foreign = next((t.foreign for _, t in tracks if t.foreign), None)
    if len(tracks) < len(args[:2]):
        foreign = foreign or "a value that no linear layer wrote is added to it"
    sources = frozenset[str]().union(*(track.sources for _, track in tracks))
    scaled = any(track.scaled for _, track in tracks) or kwargs.get("alpha", 1) != 1 or len(args) > 2
    for tensor, _ in tracks:
        flow.read(tensor, "sum", "a sum")
    flow.add(out, wide[0].clone(), sources, foreign, scaled)
    return True


def _scale(flow: Flow, func: Any, args: Sequence[Any], out: Tensor) -> bool:
    left, right = args[0], args[1]
    on_the_left = isinstance(left, Tensor) and flow.track(left) is not None
    tracked, factor = (left, right) if on_the_left else (right, left)
    track = flow.track(tracked)
    assert track is not None
    if (func not in _PRODUCTS and not on_the_left) or tracked.dtype != track.held.dtype:
        return False
    channels = track.channels_of(tracked).expand(out.shape)
    if isinstance(factor, Tensor) and (flow.track(factor) is not None or not _same_for_all(factor, channels)):
        return False
    flow.read(tracked, "scale", "a factor")
    flow.add(out, channels.clone(), track.sources, track.foreign, True)
    return True


def _same_for_all(factor: Tensor, channels: Tensor) -> bool:
    """Whether every channel is multiplied by the same number: the factor varies only where the channel does not."""
    wide = factor.expand(channels.shape)
    varies = [d for d in range(wide.dim()) if wide.stride(d) != 0 and wide.shape[d] > 1]
    return all(bool((channels == channels.narrow(d, 0, 1)).all()) for d in varies)


def _gather(flow: Flow, table: Tensor, out: Tensor) -> bool:
    """Follow rows of a table; its own channels, 0 … C − 1 in every row, need not be laid out."""
    owner, name = flow.owner(table), flow.free(table)
    if name is not None and _whole(table) and table.is_contiguous():
        flow.add(out, last_axis(out), frozenset({name}), None, False)
        return True
    if owner is not None:
        tied = f"an embedding writes to it whose table is also the weight of {owner}; untie them first"
        flow.add(out, last_axis(out), frozenset(), tied, False)
        return True
    return False


def _free_parameter(flow: Flow, tensor: Tensor, func: Any, where: str, results: list[Tensor]) -> None:
    """Track a parameter that is added or joined to others; note every other use but a view."""
    name = flow.free(tensor)
    if name is None or any(memory(t) == memory(tensor) for t in results):
        return
    if func in _SUMS or func in _SUMS_IN_PLACE or func in _MOVES:
        flow.open(tensor)
    if flow.track(tensor) is None:
        flow.readers[name].append(Reader("other", f"{func} in {where}"))


def _move(flow: Flow, func: Any, args: Sequence[Any], kwargs: dict[str, Any], given: list[Tensor], out: Tensor) -> bool:
    tracks = [(t, flow.track(t)) for t in given if t.is_floating_point()]
    if any(track is None or t.dtype != track.held.dtype for t, track in tracks):
        return False

    def channels(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [channels(v) for v in cast("list[Any]", value)]
        track = flow.track(value) if isinstance(value, Tensor) and value.is_floating_point() else None
        return value if track is None else track.channels_of(value)

    moved = func(*[channels(a) for a in args], **kwargs)
    known = [track for _, track in tracks if track is not None]
    sources = frozenset[str]().union(*(track.sources for track in known))
    foreign = next((track.foreign for track in known if track.foreign), None)
    flow.add(out, moved, sources, foreign, any(track.scaled for track in known))
    return True
