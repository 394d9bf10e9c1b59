from pathlib import Path

import pytest
from toys import toy

from normkit.lab.runs import pace as pace_module
from normkit.lab.runs.pace import Pace
from normkit.lab.runs.plan import make_plan
from normkit.lab.settings import Settings


def test_the_eta_corrects_itself_by_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = toy(tmp_path, monkeypatch)
    plan = make_plan(module.CLAIMS, [module.__name__] * 5, Settings())
    clock = [50.0]
    monkeypatch.setattr(pace_module.time, "monotonic", lambda: clock[0])
    pace = Pace(plan, jobs=2)
    start = pace.progress(())
    assert (start.done, start.cells) == (0, 14)
    assert start.left == pytest.approx(plan.seconds(2))
    cells = {cell.id: cell for cell in plan.missing}
    pace.made(cells["steady", "low", 0], 3.01)  # planned: 0.01
    now = pace.progress(())
    assert (now.done, now.cells) == (1, 14)
    assert now.left == pytest.approx((0.21 / 2 + 0.002) * (1 + 3.01) / (1 + 0.01))
    clock[0] += 0.1
    later = pace.progress(())
    assert later.left == pytest.approx(now.left - 0.1)  # the clock goes on between two measurements
    assert later.elapsed == pytest.approx(0.1)
    pace.drop([cell for cell in plan.missing if cell.study.id == "broken"])
    end = pace.progress(())
    assert (end.done, end.cells) == (1, 10)
    assert end.left < later.left
