"""A GPU's goals by width, and the columns and files that carry them: on made-up times, no GPU has been near."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from normkit.bench.export import to_json, write_csv
from normkit.bench.goals import losses, means, shares
from normkit.bench.measure import Measured
from normkit.bench.roofline import rooflines
from normkit.bench.shapes import BEYOND_CACHES, DTYPES, GPU_SHAPES, Case, Shape, shapes_for
from normkit.bench.table import case_block, noise_warning, summary
from normkit.bench.timing import Samples
from normkit.kernels.gpu.settings import HELD_BACKWARD, HELD_FORWARD

WAVE = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99]


def timed(width: int, which: str = "forward", share: float = 0.95, device: str = "cuda:0", **peers: float) -> Measured:
    """A case in which a copy takes 100 µs and normkit what reaches ``share`` of its bandwidth."""
    shape = next(s for s in GPU_SHAPES if s.width == width and s.rows > 16)
    case = Case("rms", which, shape, "bfloat16", device)
    ours = case.moved / case.copied / share
    names = {"copy": 1.0, "copy again": 1.0, "normkit": ours, "normkit, out=": ours} | peers
    samples = {name: Samples(8, tuple(1e-4 * factor * w for w in WAVE)) for name, factor in names.items()}
    absent = {"Liger": "not installed: pip install liger-kernel", "onnxruntime": "runs on CPUs only"}
    return Measured(case, samples, absent, {}, dict.fromkeys(names, 0.0))


def test_every_wide_shape_lies_beyond_the_caches() -> None:
    widths = [64, 128, 512, 1024, 4096, 5120, 8192, 16384, 32768, 65536, 262144]
    assert [s.width for s in GPU_SHAPES if s.rows > 16] == widths
    for shape in GPU_SHAPES:
        planes = {Case("rms", "forward", shape, dtype, "cuda").plane for dtype in DTYPES}
        assert (min(planes) >= BEYOND_CACHES) == (shape.rows > 16)
        assert max(planes) < 2.1 * BEYOND_CACHES
    assert [s.rows for s in GPU_SHAPES if s.rows <= 16] == [1, 16]
    assert next(s for s in GPU_SHAPES if s.width == 64).heads
    assert shapes_for("cuda:1", quick=False) == GPU_SHAPES
    assert shapes_for("cpu", quick=False) != GPU_SHAPES


@pytest.mark.parametrize(
    ("which", "width", "goal"),
    [
        ("forward", 64, 0.90),
        ("forward", HELD_FORWARD, 0.90),
        ("forward", 2 * HELD_FORWARD, 0.60),
        ("forward", 262144, 0.60),
        ("backward", 64, 0.85),
        ("backward", HELD_BACKWARD, 0.85),
        ("backward", 2 * HELD_BACKWARD, 0.60),
        ("step", 4096, None),
    ],
)
def test_the_goal_follows_the_pass_and_what_a_program_holds(which: str, width: int, goal: float | None) -> None:
    (above,) = rooflines([timed(width, which, share=(goal or 0.5) + 0.005)])
    (below,) = rooflines([timed(width, which, share=(goal or 0.5) - 0.005)])
    assert above.goal == below.goal == goal
    assert (above.reached, below.reached) == ((True, False) if goal else (None, None))
    assert above.share.median == pytest.approx((goal or 0.5) + 0.005)


def test_clusters_hold_wider_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMKIT_GPU_CLUSTERS", "1")
    assert [r.goal for r in rooflines([timed(65536), timed(262144), timed(32768, "backward")])] == [0.9, 0.6, 0.85]


def test_only_a_gpus_large_cases_have_a_roofline() -> None:
    launch = timed(4096)
    small = Measured(Case("rms", "forward", Shape((16, 4096)), "bfloat16", "cuda:0"), launch.samples, {}, {}, {})
    assert rooflines([small, timed(4096, device="cpu")]) == []


def test_a_block_on_a_gpu_has_the_rate_beside_the_share() -> None:
    found = timed(4096, share=0.8, **{"nn.RMSNorm": 2.0})
    lines = case_block(found, threads=2)
    assert lines[0].endswith("· cuda:0")
    assert "threads" not in lines[0]
    rows = {line.split("  ")[0].strip(): line.split() for line in lines}
    assert lines[1].split()[-1] == "GB/s"
    assert rows["copy"][-3:] == ["100", "%", f"{found.case.copied / 1e-4 / 1e9:.0f}"]
    assert rows["normkit"][-3:] == ["80", "%", f"{0.8 * found.case.copied / 1e-4 / 1e9:.0f}"]
    assert rows["nn.RMSNorm"][1] == "200"
    assert "liger-kernel" in rows["Liger"]
    assert "CPUs" in rows["onnxruntime"]


def test_reasons_that_are_the_same_share_a_line() -> None:
    found = Measured(
        timed(4096).case, timed(4096).samples, {"a": "runs on GPUs only", "b": "runs on GPUs only"}, {}, {}
    )
    assert sum("runs on GPUs only" in line for line in case_block(found, 1)) == 1
    assert any(line.startswith("a; b") for line in case_block(found, 1))


def test_the_end_says_reached_or_missed_and_a_cpus_goals_stay_away() -> None:
    run = [timed(4096, share=0.91, **{"nn.RMSNorm": 1.2}), timed(8192, share=0.89), timed(65536, share=0.61)]
    lines = summary(run)
    assert sum("≥ 90 % reached" in line for line in lines) == 1
    assert sum("≥ 90 % MISSED" in line for line in lines) == 1
    assert any("split" in line and "≥ 60 % reached" in line for line in lines)
    assert all(mean.goal is None for mean in means(run))
    assert shares(run, cache=None) == []
    assert [m.goal for m in means([timed(4096, device="cpu", **{"nn.RMSNorm": 1.2})])] == [4.0]


def test_a_faster_library_is_a_loss_and_a_graph_is_no_rival() -> None:
    (lost,) = losses([timed(4096, quack=0.5, **{"normkit, graph": 0.3})])
    assert lost.peer == "quack"
    assert means([timed(4096, **{"normkit, graph": 0.3})]) == []


def test_a_noisy_gpu_is_not_told_to_use_one_thread() -> None:
    found = timed(4096)
    wild = Samples(8, tuple(1e-4 * (1 + i % 2) for i in range(9)))
    text = str(noise_warning([Measured(found.case, {**found.samples, "copy": wild}, {}, {}, {})], 2, 21, 1.0))
    assert "nvidia-smi" in text
    assert "--threads" not in text
    assert "taskset" not in text


def test_files_carry_the_device(tmp_path: Path) -> None:
    run = [timed(4096, share=0.7)]
    data = to_json(run, {"device": "cuda:0"}, {}, [])
    assert data["cases"][0]["device"] == "cuda:0"
    (roof,) = data["rooflines"]
    assert (roof["width"], roof["goal"], roof["reached"], roof["held_by_a_program"]) == (4096, 0.9, False, True)
    write_csv(run, tmp_path / "a.csv")
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text(encoding="utf-8").splitlines()))
    assert {row["device"] for row in rows} == {"cuda:0"}


def test_the_figure_goes_over_widths(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the figure is an extra")
    from normkit.bench.figure import write_figure

    write_figure([timed(64), timed(4096), timed(262144)], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "elements of a row" in text
    assert "bytes that must move" not in text
    assert "262144" in text or "2^{18}" in text
