"""`watch`: one context manager from the first forward to the report."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normkit.surgery.audit import Audit, audit
from normkit.surgery.auditing.finding import Finding
from normkit.watching.attention import attention_seen
from normkit.watching.flags import flags
from normkit.watching.log import Log, line
from normkit.watching.reading import Reading
from normkit.watching.taps import Taps


class Watched:
    """What `watch` has seen so far; it may be asked at any time, also while the watch goes on.

    Attributes:
        audit: the audit of the model on its first forward's input; None before it, or where the model failed on it.
    """

    def __init__(self, log: Log) -> None:
        self.audit: Audit | None = None
        self._log = log

    @property
    def readings(self) -> list[Reading]:
        """Every reading, in the order in which the norms ran. The newest forward's gradients may still be missing."""
        return self._log.readings

    @property
    def steps(self) -> list[int]:
        """The numbers of the forwards that were read."""
        return sorted({r.step for r in self.readings})

    @property
    def flags(self) -> list[Finding]:
        """What deserves a look, the gravest first: rules over the readings, then the audit's dangers and warnings."""
        found = flags(self.readings)
        if self.audit is not None:
            found += [f for f in self.audit.findings if f.severity != "info" and f.code != "weight-decay"]
        return sorted(found, key=lambda f: ("danger", "warning", "info").index(f.severity))

    def to_jsonl(self, path: str | Path) -> None:
        """Write one JSON object a reading; numbers that are not finite are written as null, beside ``finite``."""
        Path(path).write_text("".join(map(line, self.readings)), encoding="utf-8")

    def text(self, width: int = 100, color: bool = False) -> str:
        """Return flags and the table of the newest forward, with how each number has changed. Needs rich."""
        from normkit.watching.report import text

        return text(self.readings, self.flags, width, color)

    def figure(self, path: str | Path) -> None:
        """Draw stream, shares, gradients and logits by depth, first forward against newest. Needs matplotlib.

        Args:
            path: ``.svg``, ``.png`` or ``.pdf``.
        """
        from normkit.watching.report import draw

        draw(self.readings, Path(path))

    def __str__(self) -> str:
        return self.text()


@contextmanager
def watch(model: nn.Module, *, every: int = 1, path: str | Path | None = None) -> Generator[Watched]:
    r"""Record, for every norm and forward, stream, shares, statistics, gradients and the largest attention logit.

    The first forward inside is preceded by an `audit` of the model on the same input, which says where each norm sits.
    Afterwards hooks read each norm's input and output in full: √mean(x²), mean, largest magnitude, and at norms on the
    residual stream the stream's √mean(s²) and the share of it that the sublayer before contributed. A hook on each
    result reads the gradient. Nothing that the model computes changes: no bit of outputs, gradients or random state.
    At width 512 a training step takes 1.05 times as long (0.99 to 1.09 within rounds, `python benchmarks/watching.py`).

    Args:
        model: any module, transformers' models among them, in eager mode. It is read, never changed; hooks are removed
            at the end, also after an error.
        every: read each so many forwards (the first among them). A forward is a step, in training and in evaluation.
        path: a JSON-lines file to append to while training goes on; kept complete up to the forward before the last.

    Yields:
        A `Watched`: ``print`` it, ask it for ``flags`` and ``readings``, write ``to_jsonl`` or ``figure``.

    Raises:
        TypeError: model is no module.
        ValueError: ``every`` is below 1, or the model is compiled (hooks would not run): watch the model inside it.

    Example:
        >>> import torch, normkit as nk
        >>> model = torch.nn.Sequential(nk.PreNorm(8, torch.nn.Linear(8, 8)), nk.RMSNorm(8))
        >>> with nk.watch(model) as seen:
        ...     for _ in range(2):
        ...         model(torch.randn(4, 8)).square().mean().backward()
        >>> [(r.step, r.name, r.position, r.gradient is not None) for r in seen.readings if r.step == 0]
        [(0, '0.norm_in', 'branch input', True), (0, '1', 'final', True)]
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"watch: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"watch: every must be a positive int, got {every!r}")
    if hasattr(model, "_orig_mod"):
        raise ValueError("watch: the model is compiled, and compiled code runs no hooks: watch model._orig_mod instead")
    log = Log(None if path is None else Path(path))
    seen = Watched(log)
    session = _Session(model, seen, log, every)
    handles = [
        model.register_forward_pre_hook(session.before, with_kwargs=True, prepend=True),
        model.register_forward_hook(session.after, always_call=True),
    ]
    try:
        with attention_seen(session.attention):
            yield seen
    finally:
        for handle in handles:
            handle.remove()
        session.close()
        log.close()


class _Session:
    """Opens and closes the taps around each forward of the whole model."""

    def __init__(self, model: nn.Module, seen: Watched, log: Log, every: int) -> None:
        self.model, self.seen, self.log, self.every = model, seen, log, every
        self.taps: Taps | None = None
        self.auditing, self.reading, self.step = False, False, 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.auditing or self.reading:
            return
        if self.taps is None:
            self.taps = Taps(self.model, self._positions(args, kwargs))
        self.reading = True
        if self.step % self.every == 0:
            self.taps.begin()
            self.log.begin(self.step, module.training, self.taps.pending)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.auditing or not self.reading:
            return
        self.reading = False
        self.step += 1
        if self.taps is not None:
            self.taps.end()

    def attention(self, largest: torch.Tensor) -> None:
        if self.taps is not None and not self.auditing:
            self.taps.attention(largest)

    def close(self) -> None:
        if self.taps is not None:
            self.taps.remove()

    def _positions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
        """Return every norm module's place, from an audit on this very input."""
        self.auditing = True
        try:
            self.seen.audit = audit(self.model, *args, **kwargs)
        except Exception as error:  # an audit that fails must not stop a training run
            warnings.warn(f"watch: the audit failed ({error}); norms are told by class, places unknown", stacklevel=2)
            named = ((n, m) for n, m in self.model.named_modules() if not any(True for _ in m.children()))
            return {n: "" for n, m in named if "norm" in type(m).__name__.lower()}
        finally:
            self.auditing = False
        norms = [n for n in self.seen.audit.norms if not n.function]
        return {n.name: ", ".join(n.positions) for n in norms}
