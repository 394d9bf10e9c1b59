from pathlib import Path

import pytest
import torch

from normkit.lab.grid.own_models import ModelError, check, fresh

WINDOWS = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def importable(brought: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(brought))


@pytest.mark.parametrize("function", ["logits_only", "in_a_tuple", "in_a_dict", "in_an_object"])
def test_however_logits_are_wrapped_they_are_the_same(function: str):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    check(f"brought_models:{function}", WINDOWS, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    tokens = WINDOWS[:, :-1]
    assert torch.equal(fresh(f"brought_models:{function}", 1)(tokens), fresh("brought_models:logits_only", 1)(tokens))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nan", "hold NaN or infinity before any training"),
        ("narrow", r"expected logits of shape \(3, 8, 256\), got \(3, 8, 100\)"),
        ("time_first", r"got \(8, 3, 256\)"),
        ("whole_numbers", "expected logits in a floating-point dtype, got torch.int64"),
        ("no_logits", r"got a dict with the keys \['scores'\]"),
        ("nothing", "got a NoneType"),
        ("detached", "carry no gradient"),
        ("not_causal", "reads the bytes that it is to predict"),
        ("raising", r"on bytes of shape \(3, 8\) it raised RuntimeError"),
        ("frozen", "nothing to train"),
        ("a_number", "got a int"),
        ("failing", "calling it raised RuntimeError: no weights here"),
        ("the_same", "two calls return the same parameters"),
        ("unseeded", "two calls with one seed of torch give different head.bias"),
        ("_ONE", "expected a function that returns a new model each time, got a Net"),
        ("absent", "AttributeError"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(function: str, message: str):
    with pytest.raises(ModelError, match=message) as refused:
        check(f"brought_models:{function}", WINDOWS, "cpu")
    assert f"brought_models:{function}" in str(refused.value)


def test_a_module_that_is_not_there_is_refused_by_name():
    with pytest.raises(ModelError, match="--model no_such_module:build: ModuleNotFoundError"):
        check("no_such_module:build", WINDOWS, "cpu")


def test_half_precision_logits_are_judged_in_float32():
    net = fresh("brought_models:logits_only", 0)
    net.inner.wrap = lambda logits: logits.bfloat16()
    assert net(WINDOWS).dtype == torch.float32
