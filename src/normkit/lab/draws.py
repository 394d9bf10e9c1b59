"""Random numbers that depend on (claim, arm, seed) and on nothing else, above all not on run order."""

from __future__ import annotations

import hashlib

import torch


def _seed(*parts: object) -> int:
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch takes 63 bits without complaint


class Draws:
    """The random streams of one measurement.

    `shared` streams are the same for every arm of a study at one seed: what arms must have in common (data,
    batches, initial weights of one shape) is drawn from them, so that differences between arms are paired.
    `own` streams differ by arm as well.

    Example:
        >>> a, b = Draws("A1", "gain-0.8", 0), Draws("A1", "gain-1.2", 0)
        >>> bool(torch.equal(a.randn(3), b.randn(3)))
        True
        >>> bool(torch.equal(a.randn(3, stream="noise", own=True), b.randn(3, stream="noise", own=True)))
        False
    """

    def __init__(self, study: str, arm: str, seed: int) -> None:
        self.study, self.arm, self.seed = study, arm, seed

    def shared(self, stream: str = "data") -> torch.Generator:
        """Return a fresh generator that every arm of this study and seed sees alike."""
        return torch.Generator().manual_seed(_seed(self.study, "shared", self.seed, stream))

    def own(self, stream: str = "data") -> torch.Generator:
        """Return a fresh generator that belongs to this arm."""
        return torch.Generator().manual_seed(_seed(self.study, "arm", self.arm, self.seed, stream))

    def randn(
        self,
        *shape: int,
        stream: str = "data",
        own: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Draw standard normals of ``shape`` from the named stream, always from its beginning."""
        generator = self.own(stream) if own else self.shared(stream)
        return torch.randn(*shape, generator=generator, dtype=dtype)
