import math
from typing import Any

import pytest

from normkit.lab.grid.options import Grid, command
from normkit.lab.settings import Settings

GOOD: dict[str, Any] = {"wirings": ("pre", "post"), "norms": ("rms",), "lrs": (1e-3,), "warmups": (0,)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wirings": ("pre", "around")}, "--wiring 'around': expected names from deepnorm, parallel"),
        ({"wirings": ("pre", "pre")}, "'pre' stands there twice"),
        ({"norms": ("sum",)}, "--norm 'sum': expected names from batch"),
        ({"norms": ("rms", "instance")}, "--norm instance: its statistics cover the bytes to come"),
        ({"norms": ("group",)}, "bytes to come"),
        ({"norms": ()}, "nothing to train"),
        ({"models": ("mine",)}, "--model 'mine': expected module:callable"),
        ({"models": ("a/b.py:c",)}, "expected module:callable"),
        ({"models": ("a:b", "a:b")}, "'a:b' stands there twice"),
        ({"lrs": ()}, "the grid is empty"),
        ({"lrs": (0.0,)}, "--lr 0.0: expected finite numbers above 0"),
        ({"lrs": (math.nan,)}, "--lr nan"),
        ({"lrs": (math.inf,)}, "--lr inf"),
        ({"lrs": (1e-3, 1e-3)}, "stands there twice"),
        ({"warmups": (-1,)}, "--warmup -1"),
        ({"warmups": (201,)}, "--warmup 201: expected 0 to 200"),
        ({"tolerance": 0.0}, "--tolerance 0.0"),
        ({"tolerance": math.nan}, "--tolerance nan"),
        ({"steps": 9}, "--steps 9: expected at least 10"),
        ({"rows": 0}, "--rows 0"),
        ({"depth": -2}, "--depth -2"),
        ({"width": 17}, "--width 17: expected an even number"),
        ({"width": 20, "heads": 4}, r"--width 20: expected a multiple of 2 × heads \(8\)"),
        ({"heads": -1}, "--width 64"),
    ],
)
def test_what_cannot_be_run_is_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Grid(**GOOD | change)


def test_norms_whose_judging_sees_no_byte_to_come_are_taken():
    assert Grid(**GOOD | {"norms": ("layer", "rms", "batch", "dyt", "derf", "none")}).contenders[0] == "pre/layer"


@pytest.mark.parametrize(("width", "heads"), [(16, 1), (64, 2), (100, 2), (256, 8), (6, 1), (198, 3)])
def test_heads_divide_the_width_evenly(width: int, heads: int):
    grid = Grid(**GOOD | {"width": width})
    assert grid.heads_used == heads
    assert width % (2 * grid.heads_used) == 0


def test_rates_that_print_alike_are_two_points():
    grid = Grid(**GOOD | {"lrs": (1e-3, 1.0000001e-3)})
    assert len({point.name for point in grid.points}) == 2


def test_settings_without_a_grid_are_written_as_they_always_were():
    assert "grid" not in Settings().to_json()
    with_grid = Settings(grid=Grid(**GOOD).to_text())
    assert Settings.from_json(with_grid.to_json()) == with_grid
    assert Settings.from_json(Settings().to_json()) == Settings()


def test_the_command_says_all_that_was_asked():
    grid = Grid(**GOOD | {"models": ("a.b:c",), "steps": 30, "warmups": (0, 10)})
    text = command(grid, Settings(corpus="my text.txt", device="cuda"), "0-2")
    assert "--wiring pre,post --norm rms" in text
    assert "--model a.b:c --lr 0.001 --warmup 0,10 --steps 30" in text
    assert "--seeds 0-2 --device cuda --corpus 'my text.txt'" in text
