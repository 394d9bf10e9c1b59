"""Families of transformers, tiny and at random: as near to float64 after a swap as before, and undo is exact."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from normkit.surgery import fused
from rows import always
from surgery.families import QUICK, REST, Family
from surgery.nearness import Nearness, measured

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # transformers' own, about configs this small

DTYPES = [torch.float32, torch.bfloat16]
FEW, STEPS = (2,), 5


def check(found: Nearness) -> None:
    assert found.accepted
    assert found.rejected == []
    assert found.beyond() == [], str(found)
    assert found.undone


@pytest.mark.parametrize("dtype", always(DTYPES, lambda dtype: dtype == torch.bfloat16))
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_common_families(kind: str, dtype: torch.dtype) -> None:
    check(measured(next(family for family in QUICK if family.kind == kind).model, dtype, FEW, STEPS))


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 5e-7), (torch.bfloat16, 2e-3)])
def test_a_few_ulp_more_would_be_seen(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, off: float) -> None:
    right = fused.normalized

    def worse(x: Tensor, *rest: Any) -> Tensor:
        y = right(x, *rest)
        sign = torch.randint(0, 2, y.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        return (y.float() * (1 + 2 * off * sign)).to(y.dtype)

    monkeypatch.setattr(fused, "normalized", worse)
    found = measured(QUICK[0].model, dtype, FEW, STEPS)
    assert "logits" in found.beyond(), str(found)
    assert "gradients" in found.beyond(), str(found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [*QUICK, *REST], ids=lambda family: family.kind)
def test_every_family(family: Family, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    """Print a row of the table for each; about ten minutes on one core."""
    found = measured(family.model, dtype)
    with capsys.disabled():
        sys.stdout.write(f"\n{family.kind:20} {str(dtype).removeprefix('torch.'):8} {found} ")
    check(found)
