"""Norms across positions on several threads: the bits of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import normkit as nk
from columns import Case
from normkit.functional.positions import move_running
from normkit.kernels.cpu import pool
from normkit.kernels.cpu.positions import forward
from rows import randn


@pytest.fixture(autouse=True)
def on_the_kernels() -> Iterator[None]:
    """Nothing but kernels, fresh memory full of NaN, and as many threads afterwards as before."""
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    with nk.use("cpu"):
        yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])
@pytest.mark.parametrize("norm", ["batch", "instance", 2])
def test_threads_change_no_bit(norm: str | int, first: bool, monkeypatch: pytest.MonkeyPatch):
    used: list[int] = []
    run_parallel = pool.run_parallel

    def counting(address: int, block: bytes, threads: int) -> None:
        used.append(threads)
        run_parallel(address, block, threads)

    monkeypatch.setattr(pool, "run_parallel", counting)
    monkeypatch.setattr(pool, "PARALLEL_FROM", 1)
    case = Case.draw(norm, 4, 333, 34).masked()
    torch.set_num_threads(1)
    want = case.run(first)
    assert not used
    torch.set_num_threads(3)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(case.run(first), want, strict=True))
    assert bool(used) == (pool._runtime() is not None)


@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, 1 / 3])
@pytest.mark.parametrize(("shape", "masked"), [((4, 9, 5), False), ((3, 200, 34), True), ((2, 1, 16), False)])
def test_running_statistics_move_as_operators_move_them(shape: tuple[int, int, int], masked: bool, momentum: float):
    case = Case.draw("batch", *shape)
    case = case.masked() if masked else case
    mask = None if case.mask is None else case.mask.unsqueeze(2)
    *_, found = forward(case.x, None, None, channel=2, groups=shape[2], per_sample=False, eps=1e-5, mask=mask)
    got, want = ([randn(shape[2], seed=7), randn(shape[2], seed=8) ** 2] for _ in range(2))
    versions = [t._version for t in got]
    assert found.move(*got, momentum)
    move_running(*want, found.moments(), momentum)
    assert all(map(torch.equal, got, want))
    assert all(t._version > before for t, before in zip(got, versions, strict=True))


@pytest.mark.parametrize("kind", ["strided", "half", "one for both", "rescaled"])
def test_what_the_kernel_cannot_move_it_leaves(kind: str):
    x = randn(4, 9, 5) * (1e25 if kind == "rescaled" else 1)
    *_, found = forward(x, None, None, channel=2, groups=5, per_sample=False, eps=1e-5, mask=None)
    mean, var = torch.zeros(5), torch.ones(5)
    if kind == "strided":
        mean = torch.zeros(5, 2)[:, 0]
    if kind == "half":
        var = var.half()
    if kind == "one for both":
        var = mean
    before = mean.clone(), var.clone()
    assert not found.move(mean, var, 0.5)
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
