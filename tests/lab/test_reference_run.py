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
# Left open by as many seeds and steps as an hour allows; each of them says by how much.
UNDECIDED = {"F3c", "F4d", "F4e", "H5", "H6", "H7b", "H7c", "M2", "X3"}


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
        assert claim.id in UNDECIDED
    else:
        assert judged.flipped


@pytest.mark.slow
def test_the_report_renders_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.png"))
    page = write_report(folder).read_text()
    assert all(f'id="claim-{claim.id}"' in page for claim in CLAIMS)
    assert waiting_in(page) == set()
    (folder / "measurements.jsonl").write_text("")
    assert waiting_in(write_report(folder).read_text()) == {claim.id for claim in CLAIMS}


def waiting_in(page: str) -> set[str]:
    """Return the claims whose section carries the mark of a claim without its verdict."""
    sections = [text.split("</article>", 1)[0] for text in page.split('<article id="claim-')[1:]]
    found = {text.split('"', 1)[0] for text in sections if 'href="#shape-waiting"' in text}
    return found & {claim.id for claim in CLAIMS}
