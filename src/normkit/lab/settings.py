"""What a run was asked to do, resolved once and written into its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Mode = Literal["quick", "full"]


@dataclass(frozen=True)
class Settings:
    """Everything besides the code that may change a measurement.

    Args:
        mode: ``"quick"`` is what ``make lab`` runs; ``"full"`` widens grids and depths.
        seeds: the seeds of a headline claim; other claims use the first few of them.
        corpus: the path given by the user, or ``"stdlib"`` for the running Python's own sources.
        corpus_sha256: digest of the bytes used, so that a changed corpus is a changed setting.
        corpus_bytes: their number.
        device: a torch device string.
        grid: what `normkit lab train` was asked to compare, as `normkit.lab.grid.options.Grid` writes it; empty for
            the catalogue's claims.
    """

    mode: Mode = "quick"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    corpus: str = "stdlib"
    corpus_sha256: str = ""
    corpus_bytes: int = 0
    device: str = "cpu"
    grid: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; `from_json` is its inverse."""
        data = asdict(self) | {"seeds": list(self.seeds)}
        if not self.grid:
            del data["grid"]  # a run of the catalogue has none
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        """Rebuild settings written by `to_json`."""
        fields: dict[str, Any] = dict(data)
        fields["seeds"] = tuple(data["seeds"])
        return cls(**fields)
