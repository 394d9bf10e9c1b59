"""Who competes where, and the reasons of those that do not."""

from __future__ import annotations

import importlib.machinery

import pytest

from normkit.bench import peers as peers_module
from normkit.bench.peers import PEERS, NormkitInto, OnnxRuntime, peers_named
from normkit.bench.shapes import Case, Shape

PLAIN = Shape((4, 32))
HEADS = Shape((1, 4, 2, 32), heads=True)


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = importlib.machinery.ModuleSpec("present", None)
    monkeypatch.setattr(peers_module, "find_spec", lambda name: found if name in names else None)


def test_what_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "onnx")
    reason = OnnxRuntime().why_not(Case("rms", "forward", PLAIN, "float32"))
    assert reason == "not installed: pip install onnxruntime"


def test_what_an_installed_runtime_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "onnx", "onnxruntime")
    peer = OnnxRuntime()
    assert peer.why_not(Case("rms", "forward", PLAIN, "float32")) is None
    assert "forwards" in str(peer.why_not(Case("rms", "step", PLAIN, "float32")))
    assert "bfloat16" in str(peer.why_not(Case("rms", "forward", PLAIN, "bfloat16")))
    assert "contiguous" in str(peer.why_not(Case("rms", "forward", HEADS, "float32")))


def test_out_takes_no_gradients() -> None:
    peer = NormkitInto()
    assert peer.why_not(Case("layer", "forward", HEADS, "bfloat16")) is None
    assert "gradient" in str(peer.why_not(Case("layer", "backward", PLAIN, "float32")))
    assert peer.why_not(Case("add_rms", "forward", PLAIN, "float32")) is None


def test_names_are_unique_and_unknown_ones_refused() -> None:
    names = [peer.name for peer in PEERS]
    assert len(set(names)) == len(names)
    chosen = [peer.name for peer in peers_named(["nn.RMSNorm"])]
    assert chosen == ["copy", "copy again", "normkit, out=", "normkit", "nn.RMSNorm"]
    assert peers_named([]) == PEERS
    with pytest.raises(ValueError, match=r"nn\.LayerNorm"):
        peers_named(["apex"])
