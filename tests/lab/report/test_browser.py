"""The page in a real browser, from disk: no sideways scrolling, no console message. Needs Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import report_fakes as fakes

from normkit.lab.report.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; layout is not checked here")

FRAME = """<!doctype html><body style="margin:0">
<iframe id="f" src="report.html" style="width:{width}px;height:900px;border:0"></iframe>
<script>
onload = () => {{
  const d = f.contentDocument;
  d.querySelectorAll("details").forEach(x => x.open = true);
  const chart = d.querySelector(".chart").getBoundingClientRect();
  const ground = getComputedStyle(d.body).backgroundColor;
  document.title = [d.documentElement.scrollWidth, ground, Math.round(chart.right)].join("|");
}}
</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    run = fakes.run()
    (folder / "report.html").write_text(page(run, fakes.judged(run)), encoding="utf-8")
    return folder


def browse(folder: Path, file: str, *more: str) -> subprocess.CompletedProcess[str]:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    flags += ["--allow-file-access-from-files", "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"]
    command = [str(CHROMIUM), *flags, *more, "--dump-dom", (folder / file).as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.parametrize(
    ("width", "scheme", "ground"),
    [(390, 0, "rgb(21, 23, 27)"), (1440, 1, "rgb(252, 251, 248)")],
    ids=["phone, dark", "desk, light"],
)
def test_no_sideways_scrolling_and_the_theme_of_the_system(folder: Path, width: int, scheme: int, ground: str) -> None:
    (folder / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    out = browse(folder, "frame.html", f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1500,950")
    found = re.search(r"<title>(\d+)\|(.*?)\|(\d+)</title>", out.stdout)
    assert found, out.stdout[:500]
    assert int(found[1]) <= width
    assert found[2] == ground
    assert 0 < int(found[3]) <= width


def test_no_console_message_from_disk(folder: Path) -> None:
    out = browse(folder, "report.html")
    assert "Recovering the identity" in out.stdout
    assert "CONSOLE" not in out.stderr
