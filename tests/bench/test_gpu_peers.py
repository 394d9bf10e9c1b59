"""How other libraries' norms are called, held to float64 through stand-ins with the same signatures."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.bench import gpu_peers
from normkit.bench.gpu_peers import LIBRARIES, FlashAttention, Liger, Quack
from normkit.bench.measure import Method, measure
from normkit.bench.peer import GPU, Peer, Prepared
from normkit.bench.peers import PEERS, Copy, CopyAgain, Formula, Normkit, NormkitGraph, NormkitInto, OnnxRuntime
from normkit.bench.shapes import Case, Inputs, Shape, make_inputs

PLAIN, HEADS = Shape((6, 40)), Shape((1, 4, 2, 32), heads=True)


class _Rms:
    @staticmethod
    def apply(x: Tensor, w: Tensor, eps: float, offset: float, mode: str, in_place: bool) -> Tensor:
        assert (offset, mode, in_place) == (0.0, "llama", False)
        return F.rms_norm(x, w.shape, w, eps)


class _Layer:
    @staticmethod
    def apply(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, w.shape, w, b, eps)


class _Add:
    @staticmethod
    def apply(x: Tensor, r: Tensor, w: Tensor, eps: float, offset: float, mode: str, in_place: bool) -> Any:
        assert (offset, mode, in_place) == (0.0, "llama", False)
        return F.rms_norm(x + r, w.shape, w, eps), x + r


def _quack(x: Tensor, w: Tensor, *, eps: float, residual: Tensor | None = None, prenorm: bool = False) -> Any:
    s = x if residual is None else x + residual
    y = F.rms_norm(s, w.shape, w, eps)
    return (y, s) if prenorm else y


def _quack_layer(x: Tensor, w: Tensor, b: Tensor, *, eps: float) -> Tensor:
    assert x.dim() == 2
    assert w.dtype == b.dtype == torch.float32
    return F.layer_norm(x.float(), w.shape, w, b, eps).to(x.dtype)


def _flash(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    *,
    eps: float,
    is_rms_norm: bool,
    residual: Any = None,
    prenorm: bool = False,
) -> Any:
    s = x if residual is None else x + residual
    y = F.rms_norm(s, w.shape, w, eps) if is_rms_norm else F.layer_norm(s, w.shape, w, b, eps)
    return (y, s) if prenorm else y


STAND_INS: dict[str, dict[str, Any]] = {
    "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": _Rms},
    "liger_kernel.ops.layer_norm": {"LigerLayerNormFunction": _Layer},
    "liger_kernel.ops.fused_add_rms_norm": {"LigerFusedAddRMSNormFunction": _Add},
    "quack.rmsnorm": {"rmsnorm": _quack, "layernorm_fwd": _quack_layer},
    "flash_attn.ops.triton.layer_norm": {"layer_norm_fn": _flash},
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins where the libraries would be, and let them run on a CPU."""
    for name, attributes in STAND_INS.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            module = types.ModuleType(".".join(parts[:i]))
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            if i == len(parts):
                module.__dict__.update(attributes)
            monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(gpu_peers.Library, "machines", ("CPUs", "GPUs"))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("shape", [PLAIN, HEADS], ids=str)
@pytest.mark.parametrize("which", ["forward", pytest.param("step", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", ["rms", "layer", "add_rms"])
def test_each_library_computes_the_case_it_is_timed_on(op: str, which: str, shape: Shape) -> None:
    ticks = iter(range(1 << 20))
    method = Method(rounds=2, least=1.0, clock=lambda: float(next(ticks)))
    found = measure(Case(op, which, shape, "bfloat16"), (Copy(), CopyAgain(), Normkit(), *LIBRARIES), method)
    assert found.failed == {}
    left_out = {"quack"} if op == "layer" and which == "step" else set[str]()
    assert {"Liger", "quack", "flash-attention"} - left_out <= set(found.samples)
    assert set(found.absent) == left_out


@pytest.mark.usefixtures("installed")
def test_limits_are_told_before_they_are_met() -> None:
    wide = Case("rms", "forward", Shape((1, 65537)), "bfloat16", "cuda:0")
    assert "65536" in str(Liger().missing(wide))
    assert "64 KiB" in str(FlashAttention().missing(wide))
    assert FlashAttention().missing(Case("rms", "forward", Shape((1, 32768)), "bfloat16", "cuda:0")) is None
    assert "64 KiB" in str(FlashAttention().missing(Case("rms", "forward", Shape((1, 16385)), "float32", "cuda:0")))
    assert Quack().missing(wide) is None


def test_what_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers, "find_spec", lambda name: None)
    case = Case("rms", "forward", PLAIN, "bfloat16", "cuda:0")
    assert [peer.missing(case) for peer in LIBRARIES] == [
        "not installed: pip install liger-kernel",
        "not installed: pip install quack-kernels",
        "not installed: pip install flash-attn --no-build-isolation",
    ]


def test_each_machine_has_peers_that_say_they_run_on_the_other_only() -> None:
    on_cpu, on_gpu = (Case("rms", "forward", PLAIN, "float32", device) for device in ("cpu", "cuda:0"))
    for peer in (NormkitGraph(), *LIBRARIES):
        assert peer.missing(on_cpu) == "runs on GPUs only"
    assert OnnxRuntime().missing(on_gpu) == "runs on CPUs only"
    assert {peer.name for peer in PEERS if peer.missing(on_cpu) is None} >= {"copy", "normkit", "nn.RMSNorm"}


def test_a_graph_replays_into_the_outputs_of_its_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Tensor] = []

    def record(call: Any) -> tuple[Any, tuple[Tensor, ...]]:
        y = call()
        recorded.append(y)
        return (lambda: y.copy_(call())), (y,)

    monkeypatch.setattr(gpu_peers, "captured", record)
    monkeypatch.setattr(NormkitGraph, "machines", ("CPUs",))
    ticks = iter(range(1 << 20))
    method = Method(rounds=2, least=1.0, clock=lambda: float(next(ticks)))
    peers: tuple[Peer, ...] = (Copy(), CopyAgain(), NormkitInto(), Normkit(), NormkitGraph())
    found = measure(Case("layer", "forward", PLAIN, "bfloat16"), peers, method)
    assert found.failed == {}
    assert len(recorded) == 1
    assert found.base("normkit, graph") == "normkit, out="
    later = measure(Case("layer", "step", PLAIN, "bfloat16"), peers, method)
    assert later.absent["normkit, graph"] == "forwards only"


def test_plain_operators_are_not_timed_under_our_name_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors lie on the CPU here, where other kernels run."""
    case = Case("rms", "forward", PLAIN, "float32", "cuda:0")
    inputs = make_inputs(replace(case, device="cpu"), 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for peer in (Normkit(), NormkitInto()):
        with pytest.raises(RuntimeError, match="not on the GPU kernels but on cpu"):
            peer.prepare(case, inputs)


def test_the_yardstick_on_a_gpu_has_no_gaps() -> None:
    on_cpu, on_gpu = (Case("rms", "forward", HEADS, "float32", device) for device in ("cpu", "cuda:0"))
    inputs = make_inputs(on_cpu, 0)
    source = {case.device: Copy().prepare(case, inputs).call.args[0] for case in (on_cpu, on_gpu)}
    assert not source["cpu"].is_contiguous()
    assert source["cuda:0"].is_contiguous()
    assert torch.equal(source["cpu"], source["cuda:0"])


def test_a_backward_holds_no_more_graphs_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from normkit.bench import measure as module

    alive: list[int] = []

    class Counting(Formula):
        def prepare(self, case: Case, inputs: Inputs) -> Prepared:
            prepared = super().prepare(case, inputs)

            def call() -> Any:
                alive.append(1)
                return prepared.call()

            return Prepared(call)

    case = Case("rms", "backward", PLAIN, "float32")
    monkeypatch.setattr(module, "bytes_for_graphs", lambda device: 3 * 4 * case.plane)
    method = Method(rounds=2, least=1e9, clock=iter(range(1 << 20)).__next__)
    found = measure(case, (Copy(), CopyAgain(), Counting()), method)
    assert found.samples["HF formula, eager"].calls == 2  # the power of two within three
    assert found.samples["copy"].calls == 1 << 14


def test_gpu_peers_are_named_once() -> None:
    assert GPU in NormkitGraph().machines
    assert len({peer.name for peer in PEERS}) == len(PEERS)
