"""The largest attention logit, seen where PyTorch's attention or a softmax over scores is called.

Fused attention never writes its scores down. They are formed again here, for at most `QUERIES` positions of the query
spread over the sequence, the last among them: at width 512 and 512 tokens that is 0.3 % of a training step's products.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

QUERIES = 64
See = Callable[[Tensor], None]


@contextmanager
def attention_seen(see: See) -> Generator[None]:
    """Call ``see(largest score)`` for each attention that this thread computes inside.

    `torch.nn.functional.scaled_dot_product_attention` and ``softmax`` are replaced meanwhile and put back afterwards;
    code that imported them by name before keeps the originals and is not seen.
    """
    mine, inside = threading.get_ident(), False
    attend, softmax = F.scaled_dot_product_attention, F.softmax

    def attending(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal inside
        if threading.get_ident() != mine or inside:
            return attend(query, key, *args, **kwargs)
        with torch.no_grad():
            see(largest_score(query, key, *args, **kwargs))
        inside = True
        try:
            return attend(query, key, *args, **kwargs)
        finally:
            inside = False

    def softened(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if threading.get_ident() == mine and not inside and input.dim() >= 3 and input.numel():
            with torch.no_grad():
                see(_largest(input.detach()))
        return softmax(input, *args, **kwargs)

    F.scaled_dot_product_attention, F.softmax = attending, softened
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.softmax = attend, softmax


def largest_score(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return max(scale·q·k + mask) over at most `QUERIES` queries, in float32; masked scores do not count.

    Example:
        >>> q = torch.eye(4)[None, None]
        >>> float(largest_score(q, 3 * q, scale=1.0))
        3.0
    """
    count, length = query.shape[-2], key.shape[-2]
    if not query.numel() or not key.numel():
        return torch.tensor(-math.inf)
    at = torch.linspace(0, count - 1, min(QUERIES, count), device=query.device).round().long()
    if enable_gqa and query.dim() > 3 and query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.detach().index_select(-2, at).float() @ key.detach().float().mT * factor
    if is_causal:
        allowed = torch.arange(length, device=at.device) <= at[:, None]
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        rows = attn_mask if attn_mask.shape[-2] == 1 else attn_mask.index_select(-2, at)
        scores = scores.masked_fill(~rows, -math.inf) if rows.dtype == torch.bool else scores + rows.float()
    return _largest(scores)


def _largest(scores: Tensor) -> Tensor:
    """Return the largest score; NaN if any is NaN."""
    return scores.amax().float()
