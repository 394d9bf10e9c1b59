"""A module and its parameters go elsewhere and come back: copies, files, the meta device, functional calls."""

import copy
import io

import torch
from torch.func import functional_call, vmap

import normkit as nk
from rows import randn


def test_modules_travel():
    """deepcopy, pickle, state dicts, meta then to_empty then reset, functional_call."""
    norm = nk.RMSNorm(12, spec=nk.GEMMA)
    with torch.no_grad():
        norm.weight.copy_(randn(12))
    x = randn(5, 12)
    expected = norm(x)
    buffer = io.BytesIO()
    torch.save(norm.state_dict(), buffer)
    buffer.seek(0)
    loaded = nk.RMSNorm(12, spec=nk.GEMMA)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    empty = nk.RMSNorm(12, spec=nk.GEMMA, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert torch.equal(empty(x), nk.rms_norm(x))
    for other in (copy.deepcopy(norm), loaded):
        assert torch.equal(other(x), expected)
    per_sample = vmap(lambda row: functional_call(norm, dict(norm.named_parameters()), (row,)))(x)
    torch.testing.assert_close(per_sample, expected, rtol=2e-6, atol=2e-6)
