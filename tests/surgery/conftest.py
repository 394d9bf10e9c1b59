"""Audits in these tests remember what `identify` answered: most of them ask about the same few classes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

import normkit as nk
from normkit.surgery.auditing.asked import Asked
from normkit.surgery.identify import identify

ANSWERS: dict[tuple[object, ...], Any] = {}
HELD: list[Any] = []


class Remembering(Asked):
    def __init__(self, ask: Any) -> None:
        super().__init__(ask)
        if ask is identify:
            self.known, self.held = ANSWERS, HELD


@pytest.fixture(autouse=True)
def remember(monkeypatch: pytest.MonkeyPatch) -> None:
    # By import_module, as the package's function of this name hides the module.
    monkeypatch.setattr(importlib.import_module("normkit.surgery.audit"), "Asked", Remembering)


@pytest.fixture
def on_the_reference() -> Iterator[None]:
    """For tests of what surgery finds and folds: each dtype and convention tried is a kernel to compile."""
    with nk.use("reference"):
        yield
