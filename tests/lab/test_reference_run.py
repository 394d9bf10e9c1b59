"""The committed run: judged by today's rules, every control flips, and the report renders from it.

Claims that train take minutes, so their controls are judged here on the measurements of a real run; the cheap ones are
measured live in claims/test_live_seconds.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from normkit.lab.claim import Claim
from normkit.lab.claims import catalogue
from normkit.lab.report import write_report
from normkit.lab.runs.judged import Run, judge_claim, read_run, read_verdicts
from normkit.lab.verdict import Verdict

FOLDER = Path(__file__).parents[2] / "docs" / "reference-run"
CLAIMS = [entry for entry in catalogue() if isinstance(entry, Claim)]


@pytest.fixture(scope="module")
def run() -> Run:
    return read_run(FOLDER)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_every_claim_has_the_verdict_that_was_written_and_its_control_flips(claim: Claim, run: Run) -> None:
    judged = judge_claim(claim, run)
    assert judged.error == ""
    assert judged.judgement is not None, judged.missing
    written = {v["id"]: v["verdict"] for v in read_verdicts(FOLDER)}
    assert judged.judgement.verdict.value == written[claim.id]
    if judged.judgement.verdict is Verdict.UNDECIDED:
        assert claim.id in {"F3c", "F3d"}  # on the edge of the grid or of the margin
    else:
        assert judged.flipped


def test_the_report_renders_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.png"))
    page = write_report(folder).read_text()
    assert all(f'id="claim-{claim.id}"' in page for claim in CLAIMS)
    waiting = 'href="#shape-waiting"'  # the mark of a claim without its verdict
    assert waiting not in page
    (folder / "measurements.jsonl").write_text("")
    assert waiting in write_report(folder).read_text()
