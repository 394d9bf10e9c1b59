"""Small models for the fold tests, with norms whose parameters are far from rest, and a float64 run of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.surgery.folding import norms
from normkit.surgery.identify import identify


class Net(nn.Module):
    """Named parts and a function that wires them: ``Net(lambda m, x: m.head(m.norm(x)), norm=…, head=…)``."""

    def __init__(self, wiring: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.wiring = wiring
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wiring(self, *args, **kwargs)


class Block(nn.Module):
    """x + W₂·gelu(W₁·norm(x))."""

    def __init__(self, dim: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Token and position embeddings, pre-norm blocks, a final norm, a head."""

    def __init__(self, norm: Callable[[int], nn.Module], dim: int = 13, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, dim)
        self.positions = nn.Parameter(torch.randn(11, dim))
        self.blocks = nn.ModuleList([Block(dim, norm(dim)) for _ in range(depth)])
        self.final = norm(dim)
        self.head = nn.Linear(dim, 17)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def stirred(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter with one axis away from rest, by name-independent noise; return the model in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.4 * torch.randn(p.shape, generator=generator).to(p.dtype))
    return model.eval()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(
        torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a.values(), b.values(), strict=True)
    )


def in_float64(model: nn.Module, *args: Any) -> Tensor:
    """Run a float64 copy; for models that stay in the dtype they are given."""
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    with torch.no_grad():
        return copy.deepcopy(model).double()(*wide)


_KNOWN: dict[tuple[object, ...], Any] = {}


@pytest.fixture(autouse=True)
def identified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identify modules that print alike once a session: what is found out about them has tests of its own."""

    def known(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The instance's members are part of the key: a forward that was set on it makes another module.
        key = (
            type(module),
            repr(module),
            tuple(sorted(vars(module))),
            *(t.dtype for t in module.parameters()),
            *(t.shape for t in args),
        )
        if key not in _KNOWN:
            _KNOWN[key] = identify(module, *args, **kwargs)
        return _KNOWN[key]

    monkeypatch.setattr(norms, "identify", known)
