"""What may come in, and the words when something else does."""

import copy
import pickle

import pytest
import torch

import normkit as nk
from normkit.checks import align_parameter, check_axes, check_eps, check_float, check_mask, eps_value

X = torch.zeros(2, 3, 4)


def test_eps_in_words():
    assert check_eps(0, "f") == 0.0
    assert isinstance(check_eps(1, "f"), float)
    with pytest.raises(ValueError, match=r"f: eps=None is ambiguous.*normkit.TORCH_DEFAULT"):
        check_eps(None, "f")
    for bad in (-1e-6, float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            check_eps(bad, "f")
    for odd in ("1e-6", True, torch.tensor(1e-6)):
        with pytest.raises(TypeError, match="must be a Python number"):
            check_eps(odd, "f")


def test_the_default_of_torch_is_one_object_with_torchs_numbers():
    default = nk.TORCH_DEFAULT
    assert pickle.loads(pickle.dumps(default)) is default
    assert copy.copy(default) is default
    assert copy.deepcopy([default])[0] is default
    assert repr(default) == "normkit.TORCH_DEFAULT"
    assert check_eps(default, "f") is default
    half = torch.finfo(torch.float32).eps
    assert [eps_value(default, d) for d in (torch.float16, torch.bfloat16, torch.float32)] == [half] * 3
    assert eps_value(default, torch.float64) == torch.finfo(torch.float64).eps
    assert eps_value(1e-3, torch.float16) == 1e-3


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype):
    with pytest.raises(TypeError, match=rf"f: w must be float16.*got {dtype}; convert it first, e.g. w.float\(\)"):
        check_float(torch.zeros(2).to(dtype), "f", "w")


def test_complex_and_foreign_things_are_refused():
    with pytest.raises(TypeError, match=r"torch.complex64; take .real and .imag apart"):
        check_float(torch.zeros(2, dtype=torch.complex64), "f")
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
        check_float([1.0], "f")


def test_axes():
    assert check_axes(-1, X, "f") == (2,)
    assert check_axes([-1, 0], X, "f") == (0, 2)
    for bad, message in [
        (3, "axis 3 is out of range"),
        (-4, "axis -4 is out of range"),
        ((), "axis is empty"),
        ((0, -3), "names one axis twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_axes(bad, X, "f")
    with pytest.raises(ValueError, match=r"out of range for x of shape \(\)"):
        check_axes(-1, torch.tensor(1.0), "f")
    for odd in (1.0, (0, 1.5), "1", None):
        with pytest.raises(TypeError, match="axis must be an int or a sequence of ints"):
            check_axes(odd, X, "f")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "axes", "aligned"),
    [
        ((4,), (2,), (1, 1, 4)),
        ((2,), (0,), (2, 1, 1)),
        ((2, 4), (0, 2), (2, 1, 4)),
        ((3, 4), (2,), (3, 4)),  # per head
        ((2, 1, 4), (2,), (2, 1, 4)),  # per sample
        ((1,), (2,), (1,)),
        ((), (2,), (1, 1, 1)),
    ],
)
def test_parameters_lie_along_the_axes_or_broadcast(
    shape: tuple[int, ...], axes: tuple[int, ...], aligned: tuple[int, ...]
):
    p = align_parameter(torch.zeros(shape), X, axes, "f", "weight")
    assert p is not None
    assert p.shape == aligned
    assert align_parameter(None, X, axes, "f", "weight") is None


@pytest.mark.parametrize("shape", [(5,), (3,), (2, 4), (1, 2, 3, 4), (2, 2, 3, 4), (0,)])
def test_a_parameter_that_fits_nowhere_is_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"f: bias of shape .* fits neither the normalised axes \(4,\) nor"):
        align_parameter(torch.zeros(shape), X, (2,), "f", "bias")


def test_a_square_input_prefers_the_normalised_axis():
    p = align_parameter(torch.zeros(4), torch.zeros(4, 4), (0,), "f", "weight")
    assert p is not None
    assert p.shape == (4, 1)


def test_masks():
    mask = torch.ones(2, 3, dtype=torch.bool)
    got = check_mask(mask, X, 2, "f")
    assert got is not None
    assert got.shape == (2, 3, 1)
    assert check_mask(None, X, 2, "f") is None
    with pytest.raises(TypeError, match=r"True = real position.*torch.float32"):
        check_mask(mask.float(), X, 2, "f")
    with pytest.raises(ValueError, match="without its channel axis"):
        check_mask(torch.ones(3, 2, dtype=torch.bool), X, 2, "f")
