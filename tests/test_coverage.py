from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

import normkit as nk

EPS = 1e-5
SHAPES = [(2, 3, 4), (3, 2, 6), (1, 4, 2), (4, 1, 4)]
GROUPS = 2

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda x: nk.batch_norm(x, None, None, training=True, eps=EPS),
    "layer": lambda x: nk.layer_norm(x, eps=EPS),
    "instance": lambda x: nk.instance_norm(x, eps=EPS),
    "group": lambda x: nk.group_norm(x, GROUPS, eps=EPS),
}


def loops(x: Tensor, row: nk.Coverage, group_size: int) -> Tensor:
    """Normalise element by element: each asks every other whether they share a statistic."""
    places = list(product(*map(range, x.shape)))
    y = torch.empty_like(x)
    for a in places:
        shared = [float(x[b]) for b in places if row.covers(a, b, group_size)]
        mean = sum(shared) / len(shared)
        variance = sum((v - mean) ** 2 for v in shared) / len(shared)
        y[a] = (float(x[a]) - mean) / (variance + EPS) ** 0.5
    return y


def test_the_four_rows_are_the_four_functions() -> None:
    assert set(FUNCTIONS) == set(nk.COVERAGE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_cover_what_the_table_says(name: str, shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    by_loops = loops(x, nk.COVERAGE[name], shape[2] // GROUPS)
    assert (FUNCTIONS[name](x) - by_loops).abs().max() < 1e-12


def test_no_row_computes_another_rows_norm() -> None:
    x = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for name, row in nk.COVERAGE.items():
        for other, function in FUNCTIONS.items():
            if other != name:
                assert (function(x) - loops(x, row, 3)).abs().max() > 0.01, (name, other)


def test_groups_of_one_channel_are_instance_norm_and_one_group_is_not_layer_norm() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(nk.group_norm(x, 6), nk.instance_norm(x))
    assert (nk.group_norm(x, 1) - nk.layer_norm(x)).abs().max() > 0.01
    one_position = x[:, :1]  # with a single position there is nothing else to cover
    assert (nk.group_norm(one_position, 1) - nk.layer_norm(one_position)).abs().max() < 1e-12


@pytest.mark.parametrize("name", FUNCTIONS)
def test_covering_is_an_equivalence_and_counts_its_classes(name: str) -> None:
    n, length, c, groups = 2, 3, 4, 2
    row, places = nk.COVERAGE[name], list(product(range(n), range(length), range(c)))
    classes = {frozenset(b for b in places if row.covers(a, b, c // groups)) for a in places}
    assert sum(map(len, classes)) == len(places)
    count = {"C": c, "N·L": n * length, "N·C": n * c, "N·G": n * groups}[row.statistics]
    assert len(classes) == count


@pytest.mark.parametrize("name", FUNCTIONS)
def test_causal_rows_read_no_other_position(name: str) -> None:
    x = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    later = x.clone()
    later[:, -1] += torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    unchanged = torch.equal(FUNCTIONS[name](x)[:, :-1], FUNCTIONS[name](later)[:, :-1])
    assert unchanged == nk.COVERAGE[name].causal


@pytest.mark.parametrize(
    ("name", "dims", "channel", "axes"),
    [
        ("batch", 3, 2, (0, 1)),
        ("batch", 3, 1, (0, 2)),
        ("batch", 2, 1, (0,)),
        ("batch", 4, 1, (0, 2, 3)),
        ("layer", 3, 2, (2,)),
        ("instance", 3, 2, (1,)),
        ("instance", 4, 1, (2, 3)),
        ("group", 4, 2, (1, 3)),  # (N, L, G, C/G)
        ("group", 4, 1, (2, 3)),  # (N, G, C/G, L)
    ],
)
def test_axes_in_a_tensor(name: str, dims: int, channel: int, axes: tuple[int, ...]) -> None:
    assert nk.COVERAGE[name].axes_in(dims, channel) == axes
