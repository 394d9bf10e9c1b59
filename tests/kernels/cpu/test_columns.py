"""Norms across positions on several threads: the bits of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import normkit as nk
from columns import Case
from normkit.kernels.cpu import pool


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
