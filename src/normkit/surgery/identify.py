"""`identify`: which spec a module computes, found by running it."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.surgery import screens
from normkit.surgery.findings import Identified, Unidentified
from normkit.surgery.screens import NoNormError, UnknownNormError
from normkit.surgery.search import Search
from normkit.surgery.stand_in import CannotStandInError, NotRunError, StandIn, undisturbed


def identify(module: nn.Module, *args: Any, **kwargs: Any) -> Identified | Unidentified:
    r"""Say which norm a module computes, by running it; names and attributes are only hints.

    The module's ``forward`` runs on rows whose sums are exact in any order, so that what is left to see are ε and the
    roundings: cast order, offset, root. The answer is the spec whose reference agrees in every bit in float32,
    bfloat16, float16 and with x and weight of different dtypes, and then on random rows. Specs that no input can tell
    apart here come back as one class (``evidence.equivalent``). Where nothing agrees the answer is a reason, never a
    guess.

    Args:
        module: any module. It is not touched: a double with its own parameters, buffers and containers runs instead,
            without hooks, gradients or autocast, and the random generators are put back.
        args, kwargs: an example input, where shapes cannot be guessed: x first, then a gate if there is one, then
            whatever else ``forward`` wants. Only shapes and the further arguments are used.

    Returns:
        `Identified` (spec, eps, axes, weight, bias, evidence), or `Unidentified` with its reason.

    Raises:
        TypeError: for something that is no module.

    Example:
        >>> import torch, normkit as nk
        >>> found = nk.identify(nk.RMSNorm(16, eps=1e-5, spec=nk.GEMMA))
        >>> print(found)
        GEMMA, ε=1e-05, axes (-1,)
        >>> print(nk.identify(torch.nn.Linear(8, 8)))
        Linear: a matrix product
    """
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"identify: expected a torch.nn.Module, got {type(module).__name__}")
    reason = screens.refusal(module)
    if reason is not None:
        return Unidentified(reason)
    device = screens.device_of(module)
    try:
        stand_in = StandIn(module)
        with undisturbed(device):
            return Search(module, stand_in, device, args, kwargs).answer()
    except (NoNormError, CannotStandInError) as why:
        return Unidentified(str(why), isinstance(why, UnknownNormError))
    except NotRunError as why:
        return Unidentified(f"takes x, but fails on some values of it: {why}")
