"""Norm modules in a tensor-parallel plan."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class NormParallel(ParallelStyle):
    """How a norm runs in `torch.distributed.tensor.parallel.parallelize_module`: on its tokens, or on its features.

    ``"tokens"``: each rank normalises the tokens it holds and nothing is sent; weights are replicated, and their
    gradients partial sums, which the optimizer (or `torch.nn.utils.clip_grad_norm_`) reduces once. ``"features"``: each
    rank holds a part of every row, and of the weight; a row's sum of squares is reduced over the ranks, one number a
    row forward and one backward, two for a centred norm.

    Args:
        split: ``"tokens"`` or ``"features"``.
        token_axis: which axis of the input holds the tokens that are split.
        local_output: return the rank's own part as an ordinary tensor, as a hand-written layer expects.

    Raises:
        ValueError: another split.

    Example:
        >>> import normkit as nk
        >>> plan = {"norm": nk.NormParallel("tokens"), "q_norm": nk.NormParallel("features", local_output=True)}
    """

    def __init__(
        self, split: Literal["tokens", "features"] = "tokens", *, token_axis: int = 1, local_output: bool = False
    ) -> None:
        super().__init__()
        if split not in ("tokens", "features"):
            raise ValueError(f'NormParallel: split must be "tokens" or "features", got {split!r}')
        self.split, self.token_axis, self.local_output = split, token_axis, local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            partial(_distribute, features=self.split == "features"),
            self._enter,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            self._leave,
        )

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        first = inputs[0]
        if isinstance(first, Tensor) and not isinstance(first, DTensor):
            axis = first.dim() - 1 if self.split == "features" else self.token_axis
            first = DTensor.from_local(first, mesh, [Shard(axis)], run_check=False)
        return (first, *inputs[1:])

    def _leave(self, module: nn.Module, output: Any, _: DeviceMesh) -> Any:
        return output.to_local() if self.local_output and isinstance(output, DTensor) else output


def _distribute(name: str, module: nn.Module, mesh: DeviceMesh, *, features: bool) -> None:
    for key, p in list(module.named_parameters(recurse=False)):
        lies = Shard(p.dim() - 1) if features and p.numel() > 1 else Replicate()
        kept = nn.Parameter(distribute_tensor(p.detach(), mesh, [lies]), requires_grad=p.requires_grad)
        module.register_parameter(key, kept)
