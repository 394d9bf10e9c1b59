"""What one forward did: every operator, where its inputs came from, and which module's call it ran in.

The recorder sits below Python: a dispatch mode sees the operators that really run, whatever the code above them is
called. A value is known by its storage, so a view is the value itself and an in-place write is a new value of the same
storage. Storages are held by weak references, which keep their addresses from being used twice and no memory alive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normkit.ops.telling import listening

LEAVES = frozenset({"parameter", "buffer", "input", "constant"})


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as an operator or a module saw it: the node that wrote it, and how it lay there."""

    node: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class Node:
    """One operator that ran, or a tensor that was there before it (`LEAVES`).

    ``args`` are the operator's arguments with a `Ref` in the place of every tensor. ``live``: depends on what the model
    was given. ``finite``: None where it was not looked at.
    """

    index: int
    op: str
    args: tuple[Any, ...] = ()
    inputs: tuple[Ref, ...] = ()
    outputs: tuple[Ref, ...] = ()
    call: int = -1
    live: bool = False
    finite: bool | None = None
    name: str = ""

    @property
    def out(self) -> Ref:
        """The first tensor that it wrote."""
        return self.outputs[0]


@dataclass(slots=True)
class Call:
    """One call of one module: its nodes are ``first ≤ index < last``, those of the modules it called included."""

    index: int
    module: nn.Module
    name: str
    parent: int
    first: int
    last: int = -1
    inputs: tuple[Ref, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict[str, Any])
    positional: tuple[Any, ...] = ()
    outputs: tuple[Ref, ...] = ()
    done: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """A norm of ours that ran: what was normalised, who wrote the result, and how."""

    x: Ref
    out: int
    kind: str
    axes: tuple[int, ...]
    eps: float


@dataclass
class Flow:
    """Everything recorded in one forward, in the order in which it happened."""

    nodes: list[Node] = field(default_factory=list[Node])
    calls: list[Call] = field(default_factory=list[Call])
    told: list[Told] = field(default_factory=list[Told])
    names: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    error: Exception | None = None
    failed_in: str = ""
    outputs: tuple[Ref, ...] = ()

    def __post_init__(self) -> None:
        self._consumers: list[list[int]] | None = None

    def consumers(self, node: int) -> list[int]:
        """Return the nodes that read this one, in order."""
        if self._consumers is None:
            table: list[list[int]] = [[] for _ in self.nodes]
            for reader in self.nodes:
                for source in dict.fromkeys(ref.node for ref in reader.inputs):
                    table[source].append(reader.index)
            self._consumers = table
        return self._consumers[node]

    def live_inputs(self, node: Node) -> list[Ref]:
        """Return what it read that depends on the model's input."""
        return [ref for ref in node.inputs if self.nodes[ref.node].live]

    def calls_of(self, name: str) -> list[Call]:
        """Return every call of the module with this name."""
        return [call for call in self.calls if call.name == name]

    def within(self, call: int) -> Iterator[Call]:
        """Yield a call and those around it, innermost first."""
        while call >= 0:
            yield self.calls[call]
            call = self.calls[call].parent

    def where(self, node: Node) -> str:
        """Return the name of the innermost module that ran this operator."""
        return self.calls[node.call].name if node.call >= 0 else ""

    def reads(self) -> set[str]:
        """Return the names of all parameters and buffers that something read."""
        return {node.name for node in self.nodes if node.op in ("parameter", "buffer")}


_with_keywords: dict[int, bool] = vars(torch.nn.modules.module)["_global_forward_hooks_with_kwargs"]


def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow:
    """Run ``model(*args, **kwargs)`` once without gradients and return what happened.

    A forward that raises is recorded as far as it went; `Flow.error` holds the exception. The model's own hooks run as
    they always do and none are added to it. The caller sees to training flags and random state (`untouched`).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> flow = record(model, (torch.randn(2, 4),), {})
        >>> [node.op for node in flow.nodes if node.op not in LEAVES]
        ['addmm', 'native_layer_norm']
        >>> flow.where(flow.nodes[-1])
        '1'
    """
    flow = Flow(names=module_names(model))
    mode = _Recorder(flow, model, (args, kwargs))
    mine = threading.get_ident()

    def enter(module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() == mine:
            mode.enter(module)

    def leave(module: nn.Module, inputs: Any, *rest: Any) -> None:
        keywords, output = rest if len(rest) == 2 else ({}, rest[0])  # after an error PyTorch leaves the keywords out
        if threading.get_ident() == mine:
            mode.leave(module, inputs, keywords, output)

    hooks = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, with_kwargs=True, always_call=True),
    ]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), listening(mode.hear), mode:
            output = model(*args, **kwargs)
        flow.outputs = tuple(mode.ref(t) for t in _tensors(output))
    except Exception as error:  # whatever a stranger's model raises is a result here
        flow.error = error
        flow.failed_in = mode.deepest
    finally:
        for hook in hooks:
            hook.remove()
            # PyTorch 2.13 leaves this entry behind, and torch.compile then warns of global hooks for ever.
            _with_keywords.pop(hook.id, None)
    return flow


def module_names(model: nn.Module) -> dict[int, list[str]]:
    """Return every name of every module, by identity; a shared module has several."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return names


class _Recorder(TorchDispatchMode):
    def __init__(self, flow: Flow, model: nn.Module, given: Any) -> None:
        super().__init__()
        self.flow = flow
        self.stack: list[int] = []
        self.deepest = ""
        self.last: dict[int, int] = {}  # storage → the node that wrote it last
        self.held: dict[int, object] = {}  # what keeps each address from being used again
        self.leaves: dict[int, tuple[str, str]] = {}  # storage → kind and name of what was there before
        for kind, named in (("buffer", model.named_buffers()), ("parameter", model.named_parameters())):
            for name, tensor in named:
                self.leaves[self.key(tensor)] = (kind, name)
        for tensor in _tensors(given):
            self.leaves.setdefault(self.key(tensor), ("input", ""))

    def key(self, tensor: Tensor) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, nested and wrapper tensors have none
            self.held[-id(tensor)] = tensor
            return -id(tensor)
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        if key not in self.held:
            self.held[key] = StorageWeakRef(storage)
        return key

    def ref(self, tensor: Tensor) -> Ref:
        key = self.key(tensor)
        if key not in self.last:
            kind, name = self.leaves.get(key, ("constant", ""))
            node = Node(len(self.flow.nodes), kind, live=kind == "input", name=name)
            self.flow.nodes.append(node)
            self.last[key] = node.index
            node.outputs = (_laid(node.index, tensor),)
        return _laid(self.last[key], tensor)

    def enter(self, module: nn.Module) -> None:
        names = self.flow.names.get(id(module))
        parent = self.stack[-1] if self.stack else -1
        call = Call(len(self.flow.calls), module, names[0] if names else "", parent, len(self.flow.nodes))
        if names is None:  # made on the fly, not a child of anything: its work counts as the caller's
            call.name = self.flow.calls[parent].name if parent >= 0 else ""
        self.flow.calls.append(call)
        self.stack.append(call.index)

    def leave(self, module: nn.Module, inputs: Any, keywords: dict[str, Any], output: Any) -> None:
        if not self.stack or self.flow.calls[self.stack[-1]].module is not module:
            return
        call = self.flow.calls[self.stack.pop()]
        call.last = len(self.flow.nodes)
        call.positional = tuple(self.placed(value) for value in inputs)
        call.keywords = {name: self.placed(value) for name, value in keywords.items()}
        call.inputs = tuple(self.ref(t) for t in _tensors((inputs, keywords)))
        call.outputs = tuple(self.ref(t) for t in _tensors(output))
        call.done = output is not None
        if not call.done and not self.deepest:
            self.deepest = call.name or type(module).__name__

    def hear(self, x: Tensor, y: Tensor, kind: str, axes: Sequence[int], eps: float) -> None:
        out, rank = self.ref(y).node, x.dim()
        self.flow.told.append(Told(self.ref(x), out, kind, tuple(sorted(a % rank - rank for a in axes)), eps))

    def placed(self, value: Any) -> Any:
        """Put a `Ref` in the place of a tensor; containers of tensors are not looked into."""
        if isinstance(value, Tensor):
            return self.ref(value)
        return value if isinstance(value, (int, float, str, bool, torch.dtype, tuple, list, type(None))) else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # A forward asks a tensor without values a question, mostly whether a mask masks nothing: say yes.
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        read = tuple(self.ref(t) for t in _tensors((args, kwargs)))
        output = func(*args, **kwargs)
        written = list(_tensors(output))
        before = {self.key(t) for t in _tensors((args, kwargs))}
        mutates = bool(func._schema.is_mutable)
        fresh = [t for t in written if self.key(t) not in before]
        if not fresh and not mutates:
            return output  # a view is the value itself
        node = Node(
            len(self.flow.nodes),
            str(func.overloadpacket.__name__).removesuffix("_") or str(func),
            tuple(self.placed(value) for value in args),
            read,
            call=self.stack[-1] if self.stack else -1,
        )
        node.live = any(self.flow.nodes[ref.node].live for ref in read)
        self.flow.nodes.append(node)
        for tensor in [*fresh, *(_mutated(func, args, kwargs) if mutates else ())]:
            self.last[self.key(tensor)] = node.index
        node.outputs = tuple(_laid(node.index, t) for t in (written or _mutated(func, args, kwargs)))
        node.finite = _finite(written) if node.live else None
        return output


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator writes."""
    values = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return list(_tensors(values))


def _laid(node: int, tensor: Tensor) -> Ref:
    stride = tensor.stride() if tensor.layout == torch.strided and not tensor.is_nested else ()
    return Ref(node, tuple(tensor.shape) if not tensor.is_nested else (), tuple(stride), tensor.dtype)


def _tensors(values: Any) -> Iterable[Tensor]:
    return [leaf for leaf in _leaves(values) if isinstance(leaf, Tensor)]


def _leaves(values: Any) -> list[Any]:
    """Flatten tuples, lists and dicts, and outputs that are dataclasses or mappings of their own kind."""
    found: list[Any] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) or not hasattr(leaf, "__dict__"):
            found.append(leaf)
        elif isinstance(leaf, dict):
            found.extend(_leaves(list(leaf.values())))
        elif hasattr(leaf, "__dataclass_fields__"):
            found.extend(_leaves([getattr(leaf, name) for name in leaf.__dataclass_fields__]))
    return found


def _finite(tensors: list[Tensor]) -> bool | None:
    floating = [t for t in tensors if t.is_floating_point() and t.layout == torch.strided and not t.is_meta]
    if not floating:
        return None
    return all(bool(torch.isfinite(t).all()) for t in floating)
