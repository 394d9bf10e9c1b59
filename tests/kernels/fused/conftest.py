"""Fused kernels of either machine, held to the same truth; `make test` runs the folder twice, a GPU a third time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic

import normkit as nk
from fused import BACKEND, DEVICE, INTERPRETED
from interpreter import round_like_hardware

if INTERPRETED:
    round_like_hardware()
if DEVICE != "cpu":
    # Deprecated, yet the one default that is no function mode: under such a mode a norm runs the reference.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_default_tensor_type(torch.cuda.FloatTensor)


@pytest.fixture(autouse=True)
def on_the_kernels() -> Iterator[None]:
    """Run on the kernels or fail, and hand out fresh memory full of NaN: what is not written shows."""
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    filled, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, True
    try:
        with nk.use(BACKEND):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = filled
        torch.set_num_threads(threads)
