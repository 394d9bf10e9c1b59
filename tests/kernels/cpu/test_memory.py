"""What a training step allocates, byte for byte: y, dx, row statistics, partial weight gradients, and no copy.

PyTorch's profiler reports every allocation of its CPU allocator, and the kernels allocate nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import profiler

import normkit as nk
from normkit.kernels.cpu import pool
from rows import FLOATS, always, randn


def allocations(call: Callable[[], object]) -> tuple[list[int], int]:
    """Return the sizes of all that a call allocates, in order, and the most bytes held at once."""
    with profiler.profile(profile_memory=True) as profile:
        kept = call()
    assert profile.kineto_results is not None
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    del kept
    held = peak = 0
    for size in sizes:
        held += size
        peak = max(peak, held)
    return [size for size in sizes if size > 0], peak


def test_the_measure_sees_a_copy_and_when_it_goes():
    x = randn(64, 100)
    assert allocations(x.clone) == ([25600], 25600)
    assert allocations(lambda: [x.clone() for _ in range(2)]) == ([25600, 25600], 51200)
    assert allocations(lambda: [x.clone().sum() for _ in range(2)]) == ([25600, 4, 25600, 4], 25608)


ROWS, WIDTH = 96, 200


def contiguous(dtype: torch.dtype) -> Tensor:
    return randn(ROWS, WIDTH, dtype=dtype)


def heads(dtype: torch.dtype) -> Tensor:
    """Return (1, H, L, D) heads, as they are cut out of a joint projection."""
    joint = randn(1, ROWS // 4, 3, 4, WIDTH, dtype=dtype)
    return joint[:, :, 1].transpose(1, 2)


def packed(dtype: torch.dtype) -> Tensor:
    """Return rows whose elements lie apart."""
    return randn(WIDTH, ROWS, dtype=dtype).t()


LAYOUTS = {"contiguous": contiguous, "heads": heads, "packed": packed}


@pytest.mark.parametrize("dtype", always(FLOATS, lambda dtype: dtype == torch.float32))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm", ["rms", "layer", "add"])
def test_a_training_step_allocates_what_it_returns_and_the_sums_on_the_way(norm: str, layout: str, dtype: torch.dtype):
    x = LAYOUTS[layout](dtype).requires_grad_()
    dy = LAYOUTS[layout](dtype)
    w, b = (randn(WIDTH, seed=1, dtype=dtype).requires_grad_() for _ in range(2))
    plane, item = x.numel() * dtype.itemsize, dtype.itemsize
    parts = -(-ROWS // 32) * WIDTH * 4
    statistics = ROWS * 4 * (4 if norm == "layer" else 2)
    # Six rows of four-byte elements, each a whole number of vectors: what rows that lie apart are packed into.
    scratch = [6 * 208 * 4] if layout == "packed" else []
    folds = [WIDTH * item]

    def step() -> tuple[Tensor, ...]:
        if norm == "add":
            y, s = nk.add_rms_norm(x, x.detach(), w)
            return (y, s, *torch.autograd.grad((y, s), (x, w), (dy, dy)))
        y = nk.rms_norm(x, w) if norm == "rms" else nk.layer_norm(x, w, b)
        return (y, *torch.autograd.grad(y, (x, w) if norm == "rms" else (x, w, b), dy))

    with nk.use("cpu"):
        step()
        sizes, peak = allocations(step)
    gradients = 2 if norm == "layer" else 1
    forward = [plane] * (2 if norm == "add" else 1) + [statistics] + scratch
    backward = [plane] + [parts] * gradients + scratch + folds * gradients
    assert sorted(sizes) == sorted(forward + backward)
    # Scratch is gone before the partial gradients are added up.
    assert peak == sum(forward + backward) - 2 * sum(scratch) - sum(folds) * gradients + max(
        sum(scratch), sum(folds) * gradients
    )


def test_scratch_grows_with_threads_and_with_nothing_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "PARALLEL_FROM", 1)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (64, 128):
                x = randn(WIDTH, rows).t()
                with nk.use("cpu"), torch.no_grad():
                    nk.rms_norm(x)
                    sizes, _ = allocations(lambda x=x: nk.rms_norm(x))
                assert sizes == [rows * WIDTH * 4, threads * 6 * 208 * 4]
    finally:
        torch.set_num_threads(before)


def test_a_frozen_weight_and_an_unwanted_dx_cost_nothing():
    x, w, dy = randn(ROWS, WIDTH).requires_grad_(), randn(WIDTH).requires_grad_(), randn(ROWS, WIDTH)
    plane = ROWS * WIDTH * 4
    with nk.use("cpu"):
        for leaves in ((x, w.detach()), (x.detach(), w)):
            trained = [t for t in leaves if t.requires_grad]

            def step(leaves: tuple[Tensor, Tensor] = leaves, trained: list[Tensor] = trained) -> object:
                y = nk.rms_norm(*leaves)
                return (y, *torch.autograd.grad(y, trained, dy))

            step()
            sizes, _ = allocations(step)
            backward = [plane] if trained[0] is x else [3 * WIDTH * 4, WIDTH * 4]
            assert sorted(sizes) == sorted([plane, ROWS * 8, *backward])
