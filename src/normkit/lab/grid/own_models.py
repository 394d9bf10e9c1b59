"""A model of one's own, ``module:callable``: made afresh for every run, asked for bytes' logits, refused by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from normkit.lab.model.training import next_byte_loss
from normkit.lab.model.transformer import VOCABULARY


class ModelError(ValueError):
    """A model of one's own cannot be trained; the message names it, says what came and what to do."""


class BytesToLogits(nn.Module):
    """A model seen as a map from bytes (N, T) to logits (N, T, 256), whatever it wraps them in.

    Args:
        inner: called with int64 byte ids (N, T). It may return logits; a tuple or list whose first entry they are; a
            mapping that has them under ``"logits"``; or an object with ``.logits``, as transformers' models do.
        name: what to call it in errors.

    Raises:
        ModelError: in ``forward``, for results of any other kind, shape or dtype.

    Example:
        >>> model = BytesToLogits(torch.nn.Embedding(256, 256), "bigrams")
        >>> model(torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 256])
    """

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, at least in float32."""
        logits = _logits(self.inner(tokens), self.name)
        expected = (*tokens.shape, VOCABULARY)
        if tuple(logits.shape) != expected:
            raise ModelError(
                f"{self.name}: called on bytes of shape {tuple(tokens.shape)}, expected logits of shape {expected}, "
                f"got {tuple(logits.shape)}; build it for a vocabulary of {VOCABULARY}, batch first"
            )
        if not logits.is_floating_point():
            raise ModelError(f"{self.name}: expected logits in a floating-point dtype, got {logits.dtype}")
        return logits.float() if logits.element_size() < 4 else logits


def _logits(output: Any, name: str) -> Tensor:
    found: Any = output
    if isinstance(output, Mapping):
        found = cast("Mapping[str, Any]", output).get("logits")
    elif not isinstance(output, Tensor) and hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, tuple | list) and output:
        found = cast("tuple[Any, ...]", output)[0]
    if isinstance(found, Tensor):
        return found
    what = type(output).__name__
    if isinstance(output, Mapping):
        what += f" with the keys {sorted(map(str, cast('Mapping[Any, Any]', output)))}"
    elif found is not output:
        what += f" whose logits are a {type(found).__name__}"
    raise ModelError(
        f"{name}: expected logits, a tuple whose first entry they are, or something with .logits or ['logits'], got "
        f"a {what}"
    )


def fresh(model: str, seed: int) -> BytesToLogits:
    """Make the model anew, the global random state seeded with ``seed`` before its function is called.

    Raises:
        ModelError: it cannot be imported or called, is no module, or has nothing to train.
    """
    function = _function(model)
    torch.manual_seed(seed)
    try:
        made = function()
    except Exception as error:
        raise ModelError(f"--model {model}: calling it raised {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"--model {model}: expected it to return a torch.nn.Module, got a {type(made).__name__}")
    if not any(p.requires_grad for p in made.parameters()):
        raise ModelError(f"--model {model}: no parameter of it requires a gradient, so there is nothing to train")
    return BytesToLogits(made, f"--model {model}")


def _function(model: str) -> Callable[[], Any]:
    module, _, attribute = model.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the module's own code raises while it is imported
        raise ModelError(
            f"--model {model}: {type(error).__name__}: {error}; expected a module that can be imported from here and "
            "the name of a function in it"
        ) from error
    if isinstance(found, nn.Module) or not callable(found):
        raise ModelError(
            f"--model {model}: expected a function that returns a new model each time, got a {type(found).__name__}; "
            "one model cannot start every run of the grid"
        )
    return cast("Callable[[], Any]", found)


def check(model: str, windows: Tensor, device: str) -> None:
    """Make the model twice and try it on one batch, so that a grid does not fail in its third hour.

    The caller's random state is left as it was.

    Args:
        model: as ``module:callable``.
        windows: bytes (N, T + 1), int64.
        device: where it will be trained.

    Raises:
        ModelError: see `fresh`; two calls give one model or two initial weights from one seed; the model raises, or
            returns no logits, NaN, or logits without a gradient or that depend on bytes to come.
    """
    with torch.random.fork_rng():
        first, second = fresh(model, 0), fresh(model, 0)
        _independent(model, first.inner, second.inner)
        try:
            _tried(model, first.to(device).train(), windows.to(device))
        except ModelError:
            raise
        except Exception as error:
            shape = tuple(windows[:, :-1].shape)
            raise ModelError(
                f"--model {model}: on bytes of shape {shape} it raised {type(error).__name__}: {error}"
            ) from error


def _independent(model: str, first: nn.Module, second: nn.Module) -> None:
    shared = {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
    if shared:
        raise ModelError(
            f"--model {model}: two calls return the same parameters, so every run would go on where the last one "
            "ended; make a new model in each call"
        )
    a, b = dict(first.named_parameters()), dict(second.named_parameters())
    different = [name for name in a if name not in b or not torch.equal(a[name], b[name])]
    if different:
        raise ModelError(
            f"--model {model}: two calls with one seed of torch give different {different[0]}, so no run could be "
            "repeated; draw initial weights from torch's global generator, or load them"
        )


def _tried(model: str, net: BytesToLogits, windows: Tensor) -> None:
    loss = next_byte_loss(net, windows)
    if not bool(loss.isfinite()):
        raise ModelError(f"--model {model}: its logits hold NaN or infinity before any training (loss {loss.item()})")
    if not loss.requires_grad:
        raise ModelError(f"--model {model}: its logits carry no gradient; return them undetached, outside no_grad")
    loss.backward()
    net.zero_grad()
    net.eval()
    with torch.no_grad():
        before = net(windows[:, :-1])
        changed = windows[:, :-1].clone()
        changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
        after = net(changed)
    moved = float((before[:, :-1] - after[:, :-1]).abs().max())
    size = float(before.abs().max())
    # A sum in another order may move last bits; what reads the next byte moves logits by about their own size.
    if moved > 1e-3 * size:
        raise ModelError(
            f"--model {model}: changing the last byte moves earlier logits by {moved:.3g} (their largest is "
            f"{size:.3g}), so it reads the bytes that it is to predict; mask its attention causally"
        )
