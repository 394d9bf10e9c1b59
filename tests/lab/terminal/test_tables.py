import pytest

from normkit.lab.terminal.tables import comparison, seconds, table


def test_columns_line_up_and_the_last_is_as_long_as_it_is():
    assert table(["a", "long head", "end"], [["xxx", "y", "z" * 200], ["1", "2", ""]]) == [
        "a    long head  end",
        "─    ─────────  ───",
        "xxx  y          " + "z" * 200,
        "1    2",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (89.4, "89 s"), (90, "1 min 30 s"), (119.7, "2 min 00 s"), (7300, "2 h 01 min")],
)
def test_durations(value: float, text: str):
    assert seconds(value) == text


def test_a_comparison_shows_a_non_finite_value_as_such():
    criteria = [{"name": "loss", "a": [1.0, None], "b": [1.0, 3.0]}, {"name": "new", "a": None, "b": [2.0]}]
    lines = comparison([{"id": "A1", "a": "holds", "b": "holds", "changed": False, "criteria": criteria}])
    assert lines == [
        "A1   =  holds  |  holds",
        "       loss: not finite  |  2 (1 to 3)",
        "       new: –  |  2",
        "",
        "0 of the 1 verdicts that both runs have differ",
    ]
