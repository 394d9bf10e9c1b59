import json
from pathlib import Path

from normkit.lab.grid.curves import CURVES, Curve, Follower


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / CURVES).read_text().splitlines() if line.startswith("{")]


def test_lines_stand_in_the_file_as_soon_as_they_are_written(tmp_path: Path):
    follower = Follower(tmp_path)
    follower.read()
    a, b = Curve(tmp_path, "a", 0, 20), Curve(tmp_path, "b", 1, 20)
    a.point(10, [3.0, 1.0], 1e-3)
    b.point(10, [float("nan")], 2e-3)
    follower.read()
    assert follower.at == {("a", 0): (10, 20, 2.0), ("b", 1): (10, 20, None)}
    a.close("trained", 1.5)
    b.close("diverged", None)
    assert [(line["arm"], line.get("loss"), line.get("outcome")) for line in lines(tmp_path)] == [
        ("a", None, None), ("b", None, None), ("a", 2.0, None), ("b", None, None), ("a", None, "trained"),
        ("b", None, "diverged"),
    ]  # fmt: skip


def test_a_run_made_again_starts_over_after_a_line_that_was_cut(tmp_path: Path):
    first = Curve(tmp_path, "a", 0, 20)
    first.point(10, [2.0], 1e-3)
    with (tmp_path / CURVES).open("ab") as file:
        file.write(b'{"arm": "a", "se')
    follower = Follower(tmp_path)
    follower.read()
    assert follower.at["a", 0] == (10, 20, 2.0)
    Curve(tmp_path, "a", 0, 20)
    follower.read()
    assert follower.at["a", 0] == (0, 20, None)


def test_without_a_folder_nothing_is_written():
    curve = Curve(None, "a", 0, 10)
    curve.point(10, [1.0], 0.1)
    curve.close("trained", 1.0)
