"""BatchNorm's running statistics: frozen, counted once, skipped, set by hand, taken from PyTorch and given back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from rows import randn


def stats(norm: nn.Module) -> list[Tensor]:
    return [t.clone() for t in (norm.running_mean, norm.running_var, norm.num_batches_tracked)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def trained() -> nk.BatchNorm:
    norm = nk.BatchNorm(5)
    norm(randn(4, 7, 5))
    with torch.no_grad():
        norm.weight.copy_(randn(5, seed=8))
        norm.bias.copy_(randn(5, seed=9))
    return norm


def test_frozen_survives_train_copies_and_pickles():
    norm = trained()
    before, x = stats(norm), randn(4, 7, 5, seed=1) + 3
    expected = norm.eval()(x)
    norm.freeze()
    for other in (norm.train(), copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)).train()):
        assert torch.equal(other(x), expected)
        assert same(stats(other), before)
        assert "frozen" in repr(other)
    leaf = x.clone().requires_grad_()
    norm(leaf).square().sum().backward()
    # Of given statistics the derivative is γ/√(σ² + ε) alone.
    y = norm(x).detach()
    factor = norm.weight / (norm.running_var + norm.eps).sqrt()
    torch.testing.assert_close(leaf.grad, 2 * y * factor)
    norm.freeze(False)(x)
    assert not same(stats(norm), before)
    with pytest.raises(ValueError, match="track_running_stats"):
        nk.BatchNorm(5, track_running_stats=False).freeze()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_counts_once_under_activation_checkpointing(reentrant: bool, momentum: float | None):
    plain, kept = nk.BatchNorm(5, momentum=momentum), nk.BatchNorm(5, momentum=momentum)
    for step in range(3):
        x = randn(4, 7, 5, seed=step) + step
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        plain(a).pow(3).sum().backward()
        checkpoint(lambda t: kept(t).pow(3), b, use_reentrant=reentrant).sum().backward()
        assert torch.equal(a.grad, b.grad)
        assert same(stats(plain), stats(kept))
    assert int(kept.num_batches_tracked) == 3


def test_two_forwards_before_a_backward():
    norm, alone = nk.BatchNorm(5), nk.BatchNorm(5)
    first, second = (randn(4, 7, 5, seed=i).requires_grad_() for i in range(2))
    (norm(first).pow(3).sum() + norm(second).pow(3).sum()).backward()
    for leaf in (first, second):
        again = leaf.detach().clone().requires_grad_()
        alone(again).pow(3).sum().backward()
        assert torch.equal(leaf.grad, again.grad)
    assert int(norm.num_batches_tracked) == 2
    assert same(stats(norm), stats(alone))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_batches_that_are_not_finite_are_skipped_and_counted_where_asked(bad: float):
    norm, other = nk.BatchNorm(5, skip_nonfinite=True), nk.BatchNorm(5)
    x = randn(4, 7, 5)
    x[2, 3, 1] = bad
    for n in (norm, other):
        n(randn(4, 7, 5, seed=1))
    before = stats(norm)
    y = norm(x)
    assert same(stats(norm), before)
    assert norm.num_batches_skipped == 1
    assert not y[..., 1].isfinite().all()
    assert y[..., 0].isfinite().all()
    other(x)
    assert not other.running_mean.isfinite().all()
    assert "num_batches_skipped" not in norm.state_dict()
    mask = torch.ones(4, 7, dtype=torch.bool)
    mask[2, 3] = False
    norm(x, mask)  # what is masked out is no reason
    assert norm.num_batches_skipped == 1


@pytest.mark.parametrize("momentum", [0.3, None])
def test_statistics_taken_elsewhere(momentum: float | None):
    norm, other = nk.BatchNorm(5, momentum=momentum), nk.BatchNorm(5, momentum=momentum)
    for seed in range(2):
        x = randn(4, 7, 5, seed=seed)
        norm(x)
        other.freeze()(x)
        other.update_running_stats(nk.moments(x, axes=(0, 1)))
    assert int(other.num_batches_tracked) == 2
    torch.testing.assert_close(stats(other)[:2], stats(norm)[:2])
    before = stats(other)
    for moments, match in (
        (nk.moments(randn(3, 4), axes=0), "shape"),
        (nk.moments(randn(1, 5), axes=0), "fewer than two"),
    ):
        with pytest.raises(ValueError, match=match):
            other.update_running_stats(moments)
    with pytest.raises(ValueError, match="track_running_stats"):
        nk.BatchNorm(5, track_running_stats=False).update_running_stats(nk.moments(randn(3, 5), axes=0))
    assert same(stats(other), before)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (4, 5, 7)),
        (nn.BatchNorm1d, (9, 5)),
        (nn.BatchNorm2d, (2, 5, 3, 4)),
        (nn.BatchNorm3d, (2, 5, 2, 3, 2)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_from_and_to_torch(kind: Callable[..., Any], shape: tuple[int, ...], options: dict[str, Any]):
    theirs = kind(5, eps=1e-3, **options)
    if theirs.weight is not None:
        nn.init.normal_(theirs.weight)
        nn.init.normal_(theirs.bias)
    twin = copy.deepcopy(theirs)
    ours = nk.BatchNorm.from_torch(twin)
    assert ours.weight is twin.weight
    x = randn(*shape)
    for mode in (True, False):
        torch.testing.assert_close(ours.train(mode)(x), theirs.train(mode)(x))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    back = ours.to_torch(type(theirs))
    assert repr(back) == repr(theirs)
    assert back.weight is ours.weight
    assert back.running_mean is ours.running_mean
    assert back.training == ours.training


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(TypeError, match="got LayerNorm"):
        nk.BatchNorm.from_torch(nn.LayerNorm(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got LazyBatchNorm1d"):
        nk.BatchNorm.from_torch(nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="axis -1"):
        nk.BatchNorm(3).to_torch(nn.BatchNorm1d)
    with pytest.raises(ValueError, match="frozen"):
        nk.BatchNorm(3, channel_axis=1).freeze().to_torch(nn.BatchNorm1d)
