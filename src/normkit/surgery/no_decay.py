"""Which parameters weight decay must leave alone."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from normkit.surgery.identify import identify


def no_decay(model: nn.Module, *, embeddings: bool = False) -> list[nn.Parameter]:
    """Return the parameters that weight decay must skip: those of norms, biases, and everything with one axis or none.

    Decay pulls a parameter towards 0. A matrix may go there; a γ around 1, a scale, a temperature may not, and a bias
    has no business to. Three rules, none of which asks for a class:

    * a parameter with at most one axis: γ and β of nearly every norm, biases, LayerScale, scalars;
    * every own parameter of a module that `normkit.identify` finds to be a norm, of whatever shape (γ of (heads,
      head_dim), of (C, 1, 1));
    * a parameter called ``bias`` or ``…_bias`` (mixtures of experts keep biases in one matrix).

    Embedding tables do decay, as matrices, in most recipes; ``embeddings=True`` takes them out too.

    Args:
        model: in any mode; it is not run and not changed.
        embeddings: also skip tables of nn.Embedding and nn.EmbeddingBag, tied ones included.

    Returns:
        Each parameter once, however many places it is tied to, in the model's order; frozen ones are left out.

    Raises:
        TypeError: for something that is no module.
        ValueError: for lazy parameters, whose shape is not known yet, and for flattened ones (FSDP 1), in which norms
            and matrices lie together: build the groups before wrapping.

    Example:
        >>> import torch, normkit as nk
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        >>> [tuple(p.shape) for p in nk.no_decay(model)]
        [(4,), (4,), (4,)]
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"no_decay: expected a torch.nn.Module, got {type(model).__name__}")
    skipped = {id(p) for module in model.modules() for p in _of(module, embeddings)}
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter):
            raise ValueError(f"no_decay: {name} has no shape yet; run the model once first")
        if getattr(p, "_is_flat_param", False):
            raise ValueError(
                f"no_decay: {name} holds many parameters in one; build the groups before wrapping the model"
            )
    return [p for p in model.parameters() if p.requires_grad and (id(p) in skipped or p.dim() <= 1)]


def decay_groups(model: nn.Module, weight_decay: float, *, embeddings: bool = False) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups: decayed, and `no_decay` with a decay of 0; an empty group is left out.

    Args:
        model: as for `no_decay`.
        weight_decay: of the first group.
        embeddings: as for `no_decay`.

    Raises:
        TypeError, ValueError: as `no_decay`; for a negative ``weight_decay``.

    Example:
        >>> import torch, normkit as nk
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        >>> groups = nk.decay_groups(model, 0.1)
        >>> [(len(g["params"]), g["weight_decay"]) for g in groups]
        [(1, 0.1), (3, 0.0)]
        >>> optimizer = torch.optim.AdamW(groups)
    """
    if not weight_decay >= 0:
        raise ValueError(f"decay_groups: weight_decay must be 0 or more, got {weight_decay}")
    skipped = no_decay(model, embeddings=embeddings)
    ids = {id(p) for p in skipped}
    decayed = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": skipped, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _of(module: nn.Module, embeddings: bool) -> list[nn.Parameter]:
    """Return the module's own parameters that are skipped for what the module is, or for their name."""
    own = list(module.named_parameters(recurse=False))
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return [p for _, p in own] if embeddings else []
    biases = [p for name, p in own if name == "bias" or name.endswith("_bias")]
    # A norm's parameters have one axis nearly always: only what is left is worth running a module for.
    if not any(_matrix(p) and all(p is not b for b in biases) for _, p in own) or _layer(module):
        return biases
    return [p for _, p in own] if identify(module) else biases


def _matrix(p: nn.Parameter) -> bool:
    return not isinstance(p, UninitializedParameter) and p.dim() > 1


def _layer(module: nn.Module) -> bool:
    known = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention)
    return isinstance(module, known) or any(True for _ in module.children())
