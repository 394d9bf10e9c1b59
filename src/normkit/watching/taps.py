"""Hooks on a model's norms: what they read of one forward and its backward, kept as tensors until they are asked for.

Numbers stay on the model's device until a step ends, so that nothing waits for a GPU once per norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ON_STREAM = {"branch input", "on the sum", "final"}


@dataclass
class Pending:
    """A reading whose numbers are still tensors."""

    name: str
    position: str
    dtype: str = ""
    numbers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    squares: list[Tensor] = field(default_factory=list[Tensor])  # of gradients, one per backward that arrived


def rms(x: Tensor) -> Tensor:
    """Return √mean(x²) in float32, or x's own dtype if that is wider."""
    return norm_of(x) / max(x.numel(), 1) ** 0.5


def norm_of(x: Tensor) -> Tensor:
    """Return ‖x‖₂ in at least float32."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))


class Taps:
    """Reads a model's norms while ``open``.

    Args:
        model: whose modules.
        positions: name of each norm module → what it is for (empty where unknown).
    """

    def __init__(self, model: nn.Module, positions: Mapping[str, str]) -> None:
        modules = dict(model.named_modules())
        self.open = False
        self.pending: list[Pending] = []
        self._stream: Tensor | None = None
        self._current: dict[str, Pending] = {}  # the newest reading of each norm, for a recomputed forward's gradients
        self._running: list[str] = []
        self._handles: list[Any] = []
        for name, module in modules.items():
            if name in positions:
                self._handles.append(module.register_forward_hook(self._norm(name, positions[name]), with_kwargs=True))
            elif name and any(True for _ in module.children()):
                self._handles.append(module.register_forward_pre_hook(self._enter(name)))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """Start reading a forward."""
        self.open, self.pending, self._stream, self._current, self._running = True, [], None, {}, []

    def end(self) -> None:
        """Stop reading; gradients still arrive."""
        self.open, self._stream = False, None

    def attention(self, largest: Tensor) -> None:
        """Keep the largest score of an attention in the module that is running."""
        if self.open:
            name = self._running[-1] if self._running else ""
            self.pending.append(Pending(name, "attention", numbers={"largest_logit": largest}))

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            if self.open:
                self._running.append(name)

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.open and self._running:
            self._running.pop()

    def _norm(self, name: str, position: str) -> Callable[..., None]:
        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
            y = output[0] if isinstance(output, tuple) and output else output
            if x is None or not isinstance(y, Tensor):
                return
            if self.open:
                with torch.no_grad():
                    self._read(name, position, x.detach(), y.detach())
            self._follow(name, y)

        return seen

    def _read(self, name: str, position: str, x: Tensor, y: Tensor) -> None:
        reading = Pending(name, position, str(x.dtype).removeprefix("torch."))
        numbers = reading.numbers
        numbers["x_rms"], numbers["y_rms"] = rms(x), rms(y)
        numbers["x_mean"] = x.mean(dtype=torch.promote_types(x.dtype, torch.float32)) if x.numel() else x.new_zeros(())
        numbers["x_max"] = torch.linalg.vector_norm(x, float("inf")) if x.numel() else x.new_zeros(())
        if position in ON_STREAM:
            before = self._stream
            numbers["stream_rms"] = numbers["x_rms"]
            if before is not None and before is not x and before.shape == x.shape and before.device == x.device:
                numbers["share"] = rms(x - before) / numbers["x_rms"]
            self._stream = y if position == "on the sum" else x
        self.pending.append(reading)
        self._current[name] = reading

    def _follow(self, name: str, y: Tensor) -> None:
        """Wait for the gradient of a norm's result; a forward recomputed in the backward comes by here again."""
        reading = self._current.get(name)
        if reading is not None and y.requires_grad and torch.is_grad_enabled():
            y.register_hook(lambda g: reading.squares.append(norm_of(g.detach()).square()))
