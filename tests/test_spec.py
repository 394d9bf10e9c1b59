"""NormSpec: what it refuses, and its code."""

import pickle
from dataclasses import FrozenInstanceError, replace
from itertools import product
from typing import Any, get_args, get_type_hints

import pytest

from normkit.conventions import GATED_RMS, L2_NORM, LLAMA, MAMBA2, NAMED, T5, TORCH_LAYER_NORM
from normkit.spec import NormSpec

VALUES: dict[str, tuple[Any, ...]] = {
    name: get_args(hint) or (False, True) for name, hint in get_type_hints(NormSpec).items()
}


def possible() -> list[NormSpec]:
    specs = []
    for values in product(*VALUES.values()):
        try:
            specs.append(NormSpec(**dict(zip(VALUES, values, strict=True))))
        except ValueError:
            continue
    return specs


def test_every_possible_spec_has_its_own_code_and_comes_back_from_it():
    specs = possible()
    codes = {spec.code for spec in specs}
    assert len(codes) == len(specs) > 1000
    assert all(NormSpec.from_code(spec.code) == spec for spec in specs)


def test_codes_are_stable():
    assert LLAMA.code == (
        "rms.mean.eps-inside.stat-float32.reciprocal.root-none.w-plain.cast-first.out-promote.gate-none"
    )
    assert GATED_RMS.code.endswith("gate-after-silu")


@pytest.mark.parametrize("field", list(VALUES))
def test_an_unknown_value_names_the_field_and_the_choices(field: str):
    with pytest.raises(ValueError, match=rf"NormSpec.{field}: expected one of .*got 'odd'"):
        NormSpec(**{field: "odd"})


@pytest.mark.parametrize("number", [0, 1])
def test_a_number_is_no_truth_value(number: int):
    with pytest.raises(ValueError, match="centered"):
        NormSpec(centered=number)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"centered": True, "statistic": "sum"}, "no centred form"),
        ({"eps": "max"}, "needs statistic='sum'"),
        ({"statistic": "sum", "eps": "max", "root": "power"}, "root='power'"),
        ({"eps": "outside", "root": "power"}, "root='power'"),
        ({"weight": "none", "cast": "first"}, "weight='none'"),
        ({"weight": "none", "cast": "t5", "output": "promote"}, "weight='none'|cast='t5'"),
        ({"cast": "t5"}, "cast='t5'"),
        ({"cast": "t5", "output": "promote", "weight": "one_plus"}, "cast='t5'"),
        ({"root": "divide", "root_rounding": "input"}, "root='divide' has none"),
        ({"gate": "after"}, "go together"),
        ({"activation": "silu"}, "go together"),
    ],
)
def test_impossible_combinations_say_why(fields: dict[str, Any], why: str):
    with pytest.raises(ValueError, match=f"impossible NormSpec: .*({why})"):
        NormSpec(**fields)


@pytest.mark.parametrize(
    "code",
    ["", "rms", "a.b.c.d.e.f.g.h.i.j", LLAMA.code + ".x", LLAMA.code.upper(), LLAMA.code + "-silu"]
    + [LLAMA.code.replace(part, "odd") for part in LLAMA.code.split(".")]
    + [LLAMA.code.replace("eps-inside", "inside"), LLAMA.code.replace("w-plain", "plain")],
)
def test_a_foreign_code_is_refused(code: str):
    with pytest.raises(ValueError, match="NormSpec"):
        NormSpec.from_code(code)


def test_a_spec_is_a_value():
    assert NormSpec(cast="first", output="promote") == LLAMA
    assert len({LLAMA, replace(LLAMA), T5}) == 2
    assert pickle.loads(pickle.dumps(MAMBA2)) == MAMBA2
    with pytest.raises(FrozenInstanceError):
        LLAMA.centered = True  # type: ignore[misc]


def test_kinds():
    assert (TORCH_LAYER_NORM.kind, LLAMA.kind, L2_NORM.kind) == ("layer", "rms", "l2")
    assert NormSpec(statistic="unbiased").kind == "rms"
    assert NormSpec(statistic="unbiased", centered=True).kind == "layer"


def test_named_specs_are_all_there():
    assert NAMED["LLAMA"] is LLAMA
    assert {"GEMMA", "T5", "MAMBA2", "L2_NORM", "TORCH_RMS_NORM"} <= set(NAMED)
