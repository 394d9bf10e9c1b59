"""Where the channels of a value go: what one forward proves about who reads whom.

A *source* is a norm, a linear layer or a free parameter (an embedding table, a class token). A value is *tracked* while
each of its elements is known to belong to one channel of its sources: through views, copies, casts, gathers, sums of
tracked values and multiplication by something that does not differ between channels. Every other use is written down
against each source, so silence about a source means that nobody else read it.

Values are known by the memory that they lie in, not by the tensor: a view is the same value. The channel of every
element of that memory is kept beside it, and an operator that only moves elements is run on these channels as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

Key = tuple[torch.device, int]
ReaderKind = Literal["linear", "norm", "sum", "scale", "other", "output"]
_NOWHERE: Key = (torch.device("meta"), 0)
_LARGEST = 2**26  # elements of a parameter whose channels are laid out: class tokens and position tables are far below


@dataclass(frozen=True)
class Reader:
    """One use of a source.

    Args:
        kind: what read it.
        name: the module's path, or the operator and where it ran.
        channels: for a module, the source's channel at each of its own, or None where that differs between positions.
        alone: nothing but this source was in the value.
        scaled: the value had been multiplied by something on the way.
    """

    kind: ReaderKind
    name: str
    channels: Tensor | None = None
    alone: bool = True
    scaled: bool = False


@dataclass(frozen=True)
class Entry:
    """What went into a module in one call: from which sources, with what else, and in which order of channels."""

    sources: frozenset[str]
    foreign: str | None
    scaled: bool
    channels: Tensor | None


@dataclass(frozen=True)
class Track:
    """A tracked value: ``held`` keeps its memory from being used again, ``channel`` is the channel of each element."""

    sources: frozenset[str]
    foreign: str | None
    scaled: bool
    held: Tensor
    channel: Tensor

    def channels_of(self, view: Tensor) -> Tensor:
        """Return the channel of each element of a view of this value."""
        return self.channel.as_strided(view.shape, view.stride(), view.storage_offset())


class Flow:
    """What one forward showed.

    Args:
        free: parameters that belong to no followed module, by their memory: sources themselves.
        owned: memory of the followed modules' parameters → path of the module.

    Attributes:
        readers: uses of each source.
        entries: what went into each followed module, call by call.
        strays: path of a module → who read its parameters outside its own call.
        broken: path of a norm → why its output could not be followed.
        bare: path of a module → the norm operator that its forward calls itself.
        called: paths of all modules whose forward ran.
    """

    def __init__(self, free: Mapping[str, Tensor], owned: Mapping[Key, str]) -> None:
        self.readers: dict[str, list[Reader]] = defaultdict(list)
        self.entries: dict[str, list[Entry]] = defaultdict(list)
        self.strays: dict[str, str] = {}
        self.broken: dict[str, str] = {}
        self.bare: dict[str, str] = {}
        self.called: set[str] = set()
        self._tracks: dict[Key, Track] = {}
        self._free = {key: (name, p) for name, p in free.items() if (key := memory(p)) is not None}
        self._owned = owned

    def track(self, tensor: Tensor) -> Track | None:
        """Return the track of the memory that ``tensor`` lies in."""
        key = memory(tensor)
        return None if key is None else self._tracks.get(key)

    def open(self, tensor: Tensor) -> None:
        """Begin to track a free parameter, as a value whose channels lie along its last axis."""
        key = memory(tensor)
        if key is None or key not in self._free or key in self._tracks:
            return
        name, parameter = self._free[key]
        if parameter.dim() > 0 and parameter.numel() <= _LARGEST:
            self.add(parameter, last_axis(parameter), frozenset({name}), None, False)

    def free(self, tensor: Tensor) -> str | None:
        """Return the name of the free parameter that ``tensor`` is, or is a view of."""
        return self._free.get(memory(tensor) or _NOWHERE, (None, None))[0]

    def owner(self, tensor: Tensor) -> str | None:
        """Return the followed module that owns the parameter ``tensor`` is, or is a view of."""
        return self._owned.get(memory(tensor) or _NOWHERE)

    def forget(self, tensor: Tensor) -> None:
        """Drop the track of memory whose content was replaced."""
        key = memory(tensor)
        if key is not None:
            self._tracks.pop(key, None)

    def add(self, tensor: Tensor, channels: Tensor, sources: frozenset[str], foreign: str | None, scaled: bool) -> None:
        """Track a fresh value. ``channels`` has the tensor's shape, or broadcasts to it."""
        key = memory(tensor)
        if key is None:
            return
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        channel = torch.full((size,), -1, dtype=torch.int32, device=tensor.device)
        channel.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(channels)
        self._tracks[key] = Track(sources, foreign, scaled, tensor, channel)

    def read(self, tensor: Tensor, kind: ReaderKind, name: str, channels: Tensor | None = None) -> None:
        """Write down that ``tensor`` was read, against each of its sources."""
        track = self.track(tensor)
        if track is None:
            return
        alone = len(track.sources) == 1 and track.foreign is None
        for source in track.sources:
            self.readers[source].append(Reader(kind, name, channels, alone, track.scaled))

    def along(self, tensor: Tensor, axis: int) -> Tensor | None:
        """Return the channel at each index of ``axis``, or None where it differs between positions or is unknown."""
        track = self.track(tensor)
        if track is None or tensor.dim() < -axis or tensor.numel() == 0 or tensor.dtype != track.held.dtype:
            return None
        rows = track.channels_of(tensor).movedim(axis, -1).reshape(-1, tensor.shape[axis])
        known = bool((rows == rows[0]).all()) and bool((rows[0] >= 0).all())
        return rows[0].long().cpu() if known else None

    def enter(self, name: str, kind: ReaderKind, tensor: Tensor, axis: int) -> None:
        """Write down what goes into a followed module."""
        self.open(tensor)
        track, channels = self.track(tensor), self.along(tensor, axis)
        if track is None and (free := self.free(tensor)) is not None:
            self.readers[free].append(Reader("other", name))
        if track is None:
            self.entries[name].append(Entry(frozenset(), "a value that no linear layer wrote", False, None))
        else:
            self.entries[name].append(Entry(track.sources, track.foreign, track.scaled, channels))
            self.read(tensor, kind, name, channels)


def memory(tensor: Tensor) -> Key | None:
    """Return a name for the memory behind a plain tensor; None where it has none."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    address = tensor.untyped_storage().data_ptr()
    return (tensor.device, address) if address else None


def last_axis(tensor: Tensor) -> Tensor:
    """Return the index along the last axis, to be broadcast."""
    return torch.arange(tensor.shape[-1], dtype=torch.int32, device=tensor.device)


def tensors_in(value: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples, mappings, dataclasses and plain objects (a cache, say)."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, (str, bytes, int, float, complex, type)) or id(value) in seen:
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from tensors_in(part, seen)


def _parts(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[Any, Any]", value).values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(cast("list[Any]", value))
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name) for f in fields(value)]
    return list(vars(value).values()) if hasattr(value, "__dict__") and not callable(value) else []
