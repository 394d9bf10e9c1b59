from typing import Any

import pytest

from normkit.lab.terminal.compare import _criteria, paired
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


def criterion(name: str, a: list[float | None] | None, b: list[float | None] | None, **more: Any) -> dict[str, Any]:
    return {"name": name, "a": a, "b": b, "outcomes": ["passed"] * 2, "difference": None, "differs": False} | more


def entry(name: str, *criteria: dict[str, Any], **more: Any) -> dict[str, Any]:
    same = {"a": "holds", "b": "holds", "changed": False, "rule_changed": False, "differs": False}
    return {"id": name, "criteria": list(criteria)} | same | more


def test_a_comparison_shows_a_non_finite_value_as_such():
    claims = [entry("A1", criterion("loss", [1.0, None], [1.0, 3.0]), criterion("new", None, [2.0]))]
    end = [
        "verdicts: 0 of 1 that both runs have differ",
        "criteria: 0 of 0 differ that can be paired for want of shared seeds",
    ]
    lines = ["A1   =  holds  |  holds", "       loss: not finite  |  2 (1 to 3)", "       new: –  |  2"]
    assert comparison(claims, everything=True)[3:] == [*lines, "", *end]
    assert comparison(claims) == end


def test_a_comparison_lists_what_differs_with_the_paired_interval():
    pair = {"seeds": [0, 1], "mean": 0.5, "low": 0.25, "high": 0.75}
    unsure = {"seeds": [0, 1], "mean": 0.5, "low": -1.0, "high": 2.0}
    moved = criterion("moved", [1.0], [1.5], difference=pair, differs=True, outcomes=["passed", "open"])
    still = criterion("still", [1.0], [1.5], difference=unsure)
    claims = [
        entry("A1", moved, still, differs=True),
        entry("A2", still, b="fails", changed=True, differs=True),
        entry("A3", still),
        entry("A4", still, rule_changed=True),
        entry("A5", b=None),
    ]
    assert comparison(claims)[3:] == [
        "A1   =  holds  |  holds",
        "       moved: 1  |  1.5  (passed → open)  b − a 0.5 [0.25, 0.75] (2 seeds) *",
        "A2   ≠  holds  |  fails",
        "       still: 1  |  1.5  b − a 0.5 [−1, 2] (2 seeds)",
        "A4   =  holds  |  holds  (the rule changed)",
        "A5      holds  |  not measured",
        "",
        "verdicts: 1 of 4 that both runs have differ",
        "criteria: 1 of 5 differ that can be paired at the seeds that both have (0, 1)",
    ]


def test_what_cannot_be_tested_is_no_verdict_that_two_runs_share():
    untestable = entry("U1", a="not testable here", b="not testable here")
    assert comparison([untestable])[-2] == "verdicts: 0 of 0 that both runs have differ"


def test_criteria_of_one_name_in_both_rules_are_compared_each_with_its_own():
    def verdict(first: str, value: float) -> dict[str, Any]:
        rules = {"literal": (first, value), "corrected": ("passed", 1.0)}
        return {"id": "A1", "seeds": [0]} | {
            rule: [{"name": "ratio", "outcome": outcome, "values": [v]}] for rule, (outcome, v) in rules.items()
        }

    literal, corrected = _criteria(verdict("passed", 1.0), verdict("failed", 3.0))
    assert (literal["outcomes"], literal["differs"], literal["difference"]["mean"]) == (["passed", "failed"], True, 2.0)
    assert (corrected["outcomes"], corrected["differs"]) == (["passed", "passed"], False)
    lines = comparison([entry("A1", literal, corrected, changed=True, differs=True)])
    assert [line.split(":")[0].strip() for line in lines[4:6]] == ["ratio", "ratio, by the corrected rule"]


def test_only_what_is_one_value_a_seed_is_paired():
    assert paired([1.0, 2.0], [0, 1], [3.0], [2]) is None  # no seed in common
    assert paired([1.0, 2.0, 3.0], [0, 1], [1.0, 2.0], [0, 1]) is None  # three values of two seeds
    assert paired([1.0, None], [0, 1], [1.0, 2.0], [0, 1]) is None
    assert paired(None, [0], [1.0], [0]) is None
    found = paired([5.0, 1.0, 2.0], [7, 0, 1], [2.0, 4.0, 9.0], [0, 1, 8])
    assert found is not None
    assert (found["seeds"], found["mean"]) == ([0, 1], 1.5)
    assert found["high"] - found["mean"] == pytest.approx(12.706 * 0.5)  # t of one degree of freedom, sd/√2 = 1/2


def test_columns_count_a_chinese_character_as_two():
    assert table(["论断", "x"], [["abcdef", "1"], ["不", "2"]]) == ["论断    x", "────    ─", "abcdef  1", "不      2"]
