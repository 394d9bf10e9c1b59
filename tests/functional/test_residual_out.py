"""A residual add and norm into the caller's tensors: the same bits, in place too, and nothing half-written."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import normkit as nk
from rows import always, randn

SHAPE = (3, 5, 130)
NORMS = {"rms": nk.add_rms_norm, "layer": nk.add_layer_norm}
LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "apart": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    "every second": lambda t: torch.stack((t, t), -1)[..., 0],
}


def inputs(dtype: torch.dtype = torch.float32, stream: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return randn(*SHAPE).to(dtype), randn(*SHAPE, seed=1).to(stream or dtype), randn(SHAPE[-1], seed=2).to(dtype)


def nans(like: Tensor, layout: str = "contiguous") -> Tensor:
    return LAYOUTS[layout](torch.full_like(like, torch.nan))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("norm", ["rms", pytest.param("layer", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "stream"),
    always(
        [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")],
        lambda d: d == ("float32", "float32"),
    ),
)
@pytest.mark.parametrize(
    ("of_y", "of_s"), [("contiguous", "contiguous"), ("transposed", "apart"), ("every second",) * 2]
)
def test_given_memory_holds_the_bits_of_new_memory(
    backend: str, norm: str, dtype: str, stream: str, of_y: str, of_s: str
):
    x, residual, weight = inputs(getattr(torch, dtype), getattr(torch, stream))
    with nk.use(backend):
        y, s = NORMS[norm](x, residual, weight, alpha=1.5, branch_scale=0.5)
        out = nans(y, of_y), nans(s, of_s)
        versions = [t._version for t in out]
        result = NORMS[norm](x, residual, weight, alpha=1.5, branch_scale=0.5, out=out)
    assert result[0] is out[0]
    assert result[1] is out[1]
    assert torch.equal(out[0], y)
    assert torch.equal(out[1], s)
    assert all(t._version > before for t, before in zip(out, versions, strict=True))


@pytest.mark.parametrize("rows", [3, 4096])
@pytest.mark.parametrize("over", [*itertools.permutations(("x", "residual", "new"), 2)], ids="-".join)
def test_in_place(over: tuple[str, str], rows: int):
    x, residual, weight = randn(rows, 130), randn(rows, 130, seed=1), randn(130, seed=2)
    expected = nk.add_rms_norm(x, residual, weight)
    given = {"x": x, "residual": residual, "new": nans(x)}
    nk.add_rms_norm(x, residual, weight, out=(given[over[0]], given[over[1]]))
    assert torch.equal(given[over[0]], expected[0])
    assert torch.equal(given[over[1]], expected[1])


def test_memory_that_is_still_to_be_read_is_written_at_the_end():
    long = randn(9, 130)
    x, residual, weight = long[1:], randn(8, 130, seed=1), randn(130, seed=2)
    expected = nk.add_rms_norm(x.clone(), residual, weight)
    y = long[:8]  # row i of y is row i - 1 of x
    s = torch.full_like(x, torch.nan)
    nk.add_rms_norm(x, residual, weight, out=(y, s))
    assert torch.equal(y, expected[0])
    assert torch.equal(s, expected[1])


def test_into_the_weight():
    x, residual, weight = randn(1, 130), randn(1, 130, seed=1), randn(130, seed=2)
    expected = nk.add_rms_norm(x, residual, weight.clone())
    s = torch.full_like(x, torch.nan)
    nk.add_rms_norm(x, residual, weight, out=(weight.view(1, 130), s))
    assert torch.equal(weight.view(1, 130), expected[0])
    assert torch.equal(s, expected[1])


def refused(out: object, error: type[Exception], match: str, **changed: Tensor):
    x, residual, weight = inputs()
    given = {"x": x, "residual": residual, "weight": weight} | changed
    with pytest.raises(error, match=match):
        nk.add_rms_norm(given["x"], given["residual"], given["weight"], out=out)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused_before_anything_is_written():
    x, residual, _ = inputs()
    y, s = nans(x), nans(x)
    refused(y, TypeError, "pair")
    refused((y,), TypeError, "pair")
    refused((y, None), TypeError, "s.*NoneType")
    refused((y, s.double()), ValueError, r"out\[1\] \(s\) must be torch.float32")
    refused((y[:2], s), ValueError, r"out\[0\] \(y\)")
    refused((y, y), ValueError, "share no memory")
    refused((y, nans(x[:1]).expand_as(x)), ValueError, "expanded")
    refused((y, s), ValueError, "gradient", residual=residual.requires_grad_())
    refused((y, s), ValueError, "gradient", weight=inputs()[2].requires_grad_())
    assert y.isnan().all()
    assert s.isnan().all()


def test_under_a_compiler():
    x, residual, weight = inputs()
    expected = nk.add_rms_norm(x, residual, weight)

    def into(x: Tensor, residual: Tensor, y: Tensor, s: Tensor) -> None:
        nk.add_rms_norm(x, residual, weight, out=(y, s))

    y, s = nans(x), nans(x)
    torch.compile(into, fullgraph=True, backend="aot_eager")(x, residual, y, s)
    torch.testing.assert_close(y, expected[0])
    assert torch.equal(s, expected[1])
