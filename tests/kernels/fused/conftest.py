"""Fused kernels of either machine, held to the same truth; `make test` runs the folder twice, a GPU a third time."""

from __future__ import annotations

import warnings

import torch

from fused import DEVICE, INTERPRETED
from interpreter import round_like_hardware

if INTERPRETED:
    round_like_hardware()
if DEVICE != "cpu":
    # Deprecated, yet the one default that is no function mode: under such a mode a norm runs the reference.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
