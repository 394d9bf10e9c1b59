"""Families of transformers, tiny and at random: the right wiring, every norm identified, nothing called dangerous."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import normkit as nk
from surgery.families import QUICK, REST, Family

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # transformers' own, about configs this small


def check(family: Family) -> None:
    report = nk.audit(family.model())
    stopped = [note for note in report.notes if "stopped" in note]
    assert stopped == []
    wirings = tuple(stream.wiring for stream in report.streams)
    assert wirings[: max(1, len(family.wirings))] == family.wirings
    assert [f for f in report.findings if f.severity == "danger"] == []
    unknown = [norm for norm in report.norms if norm.spec is None and not norm.function]
    assert unknown == []
    assert report.norms


@pytest.mark.parametrize("family", QUICK, ids=lambda family: family.kind)
def test_common_families(family: Family) -> None:
    check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", REST, ids=lambda family: family.kind)
def test_more_families(family: Family) -> None:
    check(family)


def test_positions_of_a_sandwich_with_query_and_key_norms() -> None:
    model = Family("gemma3_text", ("sandwich",)).model()
    report = nk.audit(model)
    first = {norm.name.removeprefix("model.layers.0."): norm for norm in report.norms if ".layers.0." in norm.name}
    assert {name: norm.positions for name, norm in first.items()} == {
        "self_attn.q_norm": ("query",),
        "self_attn.k_norm": ("key",),
        "input_layernorm": ("branch input",),
        "post_attention_layernorm": ("branch output",),
        "pre_feedforward_layernorm": ("branch input",),
        "post_feedforward_layernorm": ("branch output",),
    }
    assert {norm.convention for norm in first.values()} == {"GEMMA"}
    assert first["self_attn.q_norm"].width == 8
    assert report.streams[0].final is not None


def test_class_names_that_lie() -> None:
    """T5's LayerNorm is an RMSNorm, Llama 4's L2Norm is one too, Cohere's LayerNorm is none of PyTorch's."""
    t5 = nk.audit(next(family for family in QUICK if family.kind == "t5").model())
    assert {(norm.class_name, norm.convention) for norm in t5.norms} == {("T5LayerNorm", "T5")}
    cohere = nk.audit(Family("cohere", ("parallel",)).model())
    assert {(norm.class_name, norm.kind) for norm in cohere.norms} == {("CohereLayerNorm", "layer")}
