import io
from pathlib import Path

import pytest
from rich.console import Console
from toys import toy

from normkit.lab.runs.judged import Judged
from normkit.lab.runs.pace import Progress
from normkit.lab.runs.plan import make_plan
from normkit.lab.settings import Settings
from normkit.lab.terminal import progress
from normkit.lab.terminal.progress import BarView, LineView

HALF = Progress(3, 6, 75.0, 130.0, ("steady low seed 0",))


def test_lines_have_a_heartbeat_when_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines: list[str] = []
    view = LineView(lines.append)
    for _ in range(40):
        now[0] += 0.5
        view.tick(HALF)
    assert lines == ["3/6 measured after 75 s, about 2 min 10 s left, now steady low seed 0"] * 2
    now[0] += 9.0
    view.notice("something")
    now[0] += 9.0
    view.tick(HALF)
    assert lines[2:] == ["note: something"]


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_gets_a_bar_in_colour_unless_no_color_is_set(
    colour: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    module = toy(tmp_path, monkeypatch)
    out = io.StringIO()
    view = BarView(Console(file=out, force_terminal=True, width=120))
    view.planned(make_plan(module.CLAIMS, [module.__name__] * 5, Settings()), tmp_path, 2)
    view.judged(Judged(module.CLAIMS[0], None, None, None, None, None, error="[it] broke"))
    view.tick(HALF)
    view.close()
    text = out.getvalue()
    assert "toy T1: [it] broke" in text  # no markup in what is ours to say
    assert "5 claims, 14 measurements" in text
    assert "3/6 measured" in text
    assert ("\x1b[1;7;31m" in text) is colour
