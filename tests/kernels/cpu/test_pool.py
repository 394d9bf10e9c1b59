"""Kernels under threads, forks and workers: they finish, with the bits of one caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import normkit as nk
from normkit.kernels.cpu import pool
from rows import randn

LARGE = (1024, 400)  # beyond PARALLEL_FROM


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with nk.use("cpu"):
        yield
    torch.set_num_threads(before)


def test_threads_follow_torch_and_the_work(monkeypatch: pytest.MonkeyPatch):
    assert pool.threads_for(pool.PARALLEL_FROM - 1) == 1
    assert pool.threads_for(pool.PARALLEL_FROM) == (1 if pool._runtime() is None else 2)
    torch.set_num_threads(1)
    assert pool.threads_for(pool.PARALLEL_FROM) == 1
    torch.set_num_threads(3)
    assert pool.threads_for(pool.PARALLEL_FROM) in (1, 3)
    monkeypatch.setattr(pool, "_process", os.getpid() + 1)
    assert pool.threads_for(pool.PARALLEL_FROM) == 1
    monkeypatch.setattr(pool, "_process", os.getpid())
    monkeypatch.setattr(pool, "_runtime", lambda: None)
    assert pool.threads_for(pool.PARALLEL_FROM) == 1


def train_step(x: Tensor, w: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, w)]
    y = nk.layer_norm(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, x)]


def test_eight_threads_at_once():
    x, w = randn(*LARGE), randn(LARGE[1], seed=1)
    strided = randn(LARGE[1], LARGE[0]).t()
    expected, packed = train_step(x, w), train_step(strided, w)
    wrong: list[int] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        with nk.use("cpu"):
            for _ in range(5):
                for inputs, right in ((x, expected), (strided, packed)):
                    if not all(map(torch.equal, train_step(inputs, w), right)):
                        wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    assert not wrong


def in_a_fork(work: Callable[[], bool], seconds: float = 20) -> int:
    """Run ``work`` in a forked child and return its exit status; kill it when it hangs."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_call_after_a_fork():
    x, w = randn(*LARGE), randn(LARGE[1], seed=1)
    expected = nk.layer_norm(x, w)

    def work() -> bool:
        y = nk.layer_norm(x, w)
        torch.set_num_threads(1)  # PyTorch's own operators would wait for the parent's threads here
        return torch.equal(y, expected)

    assert in_a_fork(work) == 0
    assert torch.equal(nk.layer_norm(x, w), expected)


FIRST_CALL_IN_THE_CHILD = """
import os, torch, normkit as nk
torch.set_num_threads(2)
a = torch.randn(600, 600)
a @ a, (a + a).sum(), torch.softmax(a, -1)  # the parent's threads exist now, though no kernel of ours has run
child = os.fork()
x = torch.randn(1024, 400)
if child == 0:
    with nk.use("cpu"):
        nk.rms_norm(x)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_first_call_after_a_fork():
    """PyTorch's own operators have filled the pool before: the child must not wait for threads it does not have."""
    code = "import warnings; warnings.simplefilter('ignore')\n" + FIRST_CALL_IN_THE_CHILD
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "0\n", result.stderr


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        with nk.use("cpu"):
            return nk.rms_norm(randn(*LARGE, seed=index))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_workers():
    nk.rms_norm(randn(*LARGE))
    for index, batch in enumerate(DataLoader(Rows(), batch_size=None, num_workers=2, timeout=60)):
        assert torch.equal(batch, nk.rms_norm(randn(*LARGE, seed=index)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_decides_no_buffer(dtype: torch.dtype):
    """Statistics, partials and scratch are float32: two-byte room for them would be written beyond its end."""
    x, w, strided = randn(*LARGE), randn(LARGE[1], seed=1), randn(LARGE[1], LARGE[0]).t()
    expected = [train_step(t, w) for t in (x, strided)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        sizes = [train_step(t, w) for t in (x, strided)]
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            nk.layer_norm(x, w.clone().requires_grad_())
    finally:
        torch.set_default_dtype(before)
    assert {t.dtype for t in saved} == {torch.float32}
    for got, right in zip(sizes, expected, strict=True):
        assert all(map(torch.equal, got, right))
