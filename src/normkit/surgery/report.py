"""What `swap_` did, what it left alone and why, and the way back."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

from torch import nn

from normkit.surgery.findings import Identified, name_of, short
from normkit.surgery.fused import Fused, Plan, Shown


class Accepted(NamedTuple):
    """A module whose norm the fused operator computes.

    ``kernel`` is what runs without gradients here; ``elsewhere`` says in which verified dtypes the module's own forward
    runs instead, and why.
    """

    name: str
    spec: str
    kernel: str
    found: Identified
    plan: Plan
    elsewhere: tuple[str, ...] = ()


class Rejected(NamedTuple):
    """A module that looks like a norm and was left alone, with the reason."""

    name: str
    reason: str


class SwapReport:
    """The outcome of `normkit.swap_`; a context manager that undoes the swap at its end.

    Attributes:
        accepted: (name, spec, kernel, …) of every module swapped, or to be swapped after a ``dry_run``.
        rejected: (name, reason) of every module that looks like a norm and was left alone.
        passed_over: how many further modules are no norms.

    Example:
        >>> import torch, normkit as nk
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> with nk.swap_(model) as report:
        ...     print(model[1])
        LayerNorm((8,), eps=1e-05, elementwise_affine=True, bias=True, normkit: TORCH_LAYER_NORM, ε=1e-05)
        >>> [(name, spec) for name, spec, *_ in report.accepted]
        [('1', 'TORCH_LAYER_NORM')]
        >>> print(model[1])
        LayerNorm((8,), eps=1e-05, elementwise_affine=True, bias=True)
    """

    def __init__(
        self, model: nn.Module, accepted: list[Accepted], rejected: list[Rejected], passed_over: int, *, dry_run: bool
    ) -> None:
        self.accepted = accepted
        self.rejected = rejected
        self.passed_over = passed_over
        self.dry_run = dry_run
        self._modules = {entry.name: model.get_submodule(entry.name) for entry in accepted}
        self._installed: dict[str, Fused] = {}

    def install(self) -> None:
        """Put every accepted plan in place, or none."""
        try:
            for entry in self.accepted:
                module = self._modules[entry.name]
                fused = Fused(module, entry.plan)
                vars(module)["forward"] = fused
                vars(module)["extra_repr"] = Shown(module, entry.plan)
                self._installed[entry.name] = fused
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Give every module its own forward back, bit for bit; a second call does nothing.

        Raises:
            RuntimeError: when somebody has wrapped a swapped forward since; the other modules are restored.
        """
        wrapped = [name for name, fused in self._installed.items() if not restore(self._modules[name], fused)]
        self._installed = {name: fused for name, fused in self._installed.items() if name in wrapped}
        if wrapped:
            raise RuntimeError(
                f"undo: the forward of {', '.join(wrapped)} was replaced after the swap (by accelerate, a kernel "
                "library, …); take that replacement off first and call undo again"
            )

    def __enter__(self) -> SwapReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        verb = "would swap" if self.dry_run else "swapped"
        lines = [f"{verb} {len(self.accepted)}, left {len(self.rejected)} alone, {self.passed_over} are no norms"]
        lines += [f"  {e.name}: {e.spec}, ε={e.plan.eps}, {e.kernel}" + _also(e.elsewhere) for e in self.accepted]
        lines += [f"  {r.name}: left alone, {r.reason}" for r in self.rejected]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"SwapReport(accepted={len(self.accepted)}, rejected={len(self.rejected)})"


def _also(elsewhere: tuple[str, ...]) -> str:
    return "".join(f"; {note}" for note in elsewhere)


def restore(module: nn.Module, fused: Fused | None = None) -> bool:
    """Take a swapped forward off one module; say whether it was there, or nothing stands in its place."""
    held = vars(module).get("forward")
    if not isinstance(held, Fused) or (fused is not None and held is not fused):
        return held is None
    del vars(module)["forward"]
    if isinstance(vars(module).get("extra_repr"), Shown):
        del vars(module)["extra_repr"]
    return True


def label(found: Identified) -> str:
    """Return the spec's name."""
    return name_of(found.spec)


def pair_name(pair: tuple[object, object]) -> str:
    """Return ``bfloat16`` or ``bfloat16 with float32 weight``."""
    x, held = pair
    return short(x) if held in (x, None) else f"{short(x)} with {short(held)} weight"  # type: ignore[arg-type]
