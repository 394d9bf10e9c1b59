"""normkit: normalization for Transformers.

Layers and functions with declared numerics, the wirings of a residual stream, and a lab that measures every claim.
Importing it imports torch and nothing heavier.

Example:
    >>> import torch, normkit as nk
    >>> norm = nk.RMSNorm(8, spec=nk.LLAMA)
    >>> block = nk.PreNorm(8, torch.nn.Linear(8, 8))
    >>> block(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
"""

from typing import Any as _Any

from normkit.checks import TORCH_DEFAULT as TORCH_DEFAULT
from normkit.conventions import COHERE as COHERE
from normkit.conventions import DEBERTA as DEBERTA
from normkit.conventions import GATED_RMS as GATED_RMS
from normkit.conventions import GEMMA as GEMMA
from normkit.conventions import GEMMA3N as GEMMA3N
from normkit.conventions import IMAGE_GPT as IMAGE_GPT
from normkit.conventions import KIMI_GATED as KIMI_GATED
from normkit.conventions import L2_NORM as L2_NORM
from normkit.conventions import LLAMA as LLAMA
from normkit.conventions import MAMBA2 as MAMBA2
from normkit.conventions import MUSE_SPARK as MUSE_SPARK
from normkit.conventions import NEMOTRON as NEMOTRON
from normkit.conventions import OLMO as OLMO
from normkit.conventions import OLMO2 as OLMO2
from normkit.conventions import QWEN3_NEXT_GATED as QWEN3_NEXT_GATED
from normkit.conventions import ROUNDED_ROOT_RMS as ROUNDED_ROOT_RMS
from normkit.conventions import SCALE_NORM as SCALE_NORM
from normkit.conventions import T5 as T5
from normkit.conventions import TORCH_LAYER_NORM as TORCH_LAYER_NORM
from normkit.conventions import TORCH_RMS_NORM as TORCH_RMS_NORM
from normkit.conventions import WEIGHTLESS_RMS as WEIGHTLESS_RMS
from normkit.coverage import COVERAGE as COVERAGE
from normkit.coverage import Coverage as Coverage
from normkit.functional import Explanation as Explanation
from normkit.functional import add_layer_norm as add_layer_norm
from normkit.functional import add_rms_norm as add_rms_norm
from normkit.functional import batch_norm as batch_norm
from normkit.functional import derf as derf
from normkit.functional import dyt as dyt
from normkit.functional import explain as explain
from normkit.functional import gated_rms_norm as gated_rms_norm
from normkit.functional import group_norm as group_norm
from normkit.functional import instance_norm as instance_norm
from normkit.functional import l2_norm as l2_norm
from normkit.functional import layer_norm as layer_norm
from normkit.functional import moments as moments
from normkit.functional import normalize as normalize
from normkit.functional import rms_norm as rms_norm
from normkit.functional import scale_norm as scale_norm
from normkit.kernels.registry import use as use
from normkit.kernels.statistics import Moments as Moments
from normkit.modules import BatchNorm as BatchNorm
from normkit.modules import Derf as Derf
from normkit.modules import DyT as DyT
from normkit.modules import GatedRMSNorm as GatedRMSNorm
from normkit.modules import GroupNorm as GroupNorm
from normkit.modules import InstanceNorm as InstanceNorm
from normkit.modules import LayerNorm as LayerNorm
from normkit.modules import QKNorm as QKNorm
from normkit.modules import RMSNorm as RMSNorm
from normkit.modules import ScaleNorm as ScaleNorm
from normkit.placement import WIRINGS as WIRINGS
from normkit.placement import DeepNorm as DeepNorm
from normkit.placement import ParallelNorm as ParallelNorm
from normkit.placement import PostNorm as PostNorm
from normkit.placement import PreNorm as PreNorm
from normkit.placement import ReorderedNorm as ReorderedNorm
from normkit.placement import Residual as Residual
from normkit.placement import SandwichNorm as SandwichNorm
from normkit.placement import Wiring as Wiring
from normkit.placement import deepnorm_constants as deepnorm_constants
from normkit.placement import placement as placement
from normkit.spec import NormSpec as NormSpec

# What takes a while to import, or not every build of PyTorch has: looked up in these modules when asked for.
_LATER = {
    **dict.fromkeys(
        (
            *("Audit", "Evidence", "Finding", "FoldError", "FoldReport", "Folded", "Identified", "Refused"),
            *("SwapReport", "Unidentified", "audit", "decay_groups", "fold_", "identify", "no_decay", "swap_"),
            "unswap_",
        ),
        "normkit.surgery",
    ),
    **dict.fromkeys(("Reading", "Watched", "watch"), "normkit.watching"),
    "NormParallel": "normkit.modules.parallel",
}


def __getattr__(name: str) -> _Any:
    from importlib import import_module

    if name == "__version__":  # read when asked: importlib.metadata costs 20 ms
        from importlib.metadata import version

        return version("normkit")
    if name == "testing":
        return import_module("normkit.testing")
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'normkit' has no attribute {name!r}")
