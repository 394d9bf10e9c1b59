"""What the table says, and what it refuses to say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from normkit.bench import table
from normkit.bench.goals import losses, means, shares
from normkit.bench.measure import Measured
from normkit.bench.ratios import Ratio
from normkit.bench.shapes import Case, Shape
from normkit.bench.table import against_one, case_block, microseconds, noise_warning, plus_minus, summary
from normkit.bench.timing import Samples

WAVE = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99]


def timed(**factors: float) -> Measured:
    """A case in which every contender takes so many times 100 µs."""
    names = {"copy": 1.0, "copy again": 1.0, "normkit": 1.5, "normkit, out=": 1.25} | factors
    samples = {name: Samples(8, tuple(1e-4 * factor * w for w in WAVE)) for name, factor in names.items()}
    case = Case("rms", "forward", Shape((512, 768)), "float32")
    return Measured(
        case, samples, {"onnxruntime": "not installed"}, {"odd": "wrong, not timed"}, dict.fromkeys(names, 0.0)
    )


def test_a_block_names_every_contender_and_every_reason() -> None:
    text = "\n".join(case_block(timed(**{"nn.RMSNorm": 6.0}), threads=2))
    assert "rms · forward · 512×768 · float32 · moves 3 MiB · 2 threads" in text
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert rows["copy"].split()[-2:] == ["100", "%"]
    assert "600" in rows["nn.RMSNorm"]
    assert " 4 " in rows["nn.RMSNorm"]
    assert "not installed" in rows["onnxruntime"]
    assert "wrong, not timed" in rows["odd"]
    assert "copy again" not in rows


@pytest.mark.parametrize(
    ("ratio", "floor", "text"),
    [
        (Ratio(1.02, 0.97, 1.06), 0.0, "no difference (1.02)"),
        (Ratio(1.04, 1.03, 1.05), 0.05, "no difference (1.04)"),
        (Ratio(1.5, 0.7, 6.0), 0.0, "not decided (0.7 to 6)"),
        (Ratio(4.123, 4.0, 4.2), 0.01, "4.1 ± 0.1"),
        (Ratio(2.0, 1.1, 5.0), 0.0, "2 (1.1 to 5)"),
    ],
)
def test_a_ratio_is_told_as_far_as_it_is_known(ratio: Ratio, floor: float, text: str) -> None:
    assert against_one(ratio, floor) == text


def test_who_writes_into_a_given_output_is_held_against_the_same() -> None:
    found = timed(onnxruntime=2.5)
    ratio = found.ratio("onnxruntime")
    assert ratio is not None
    assert ratio.median == pytest.approx(2.0)  # of out= at 1.25, not of the module at 1.5
    assert any(line.startswith("onnxruntime (to out=)") for line in case_block(found, 1))
    (mean,) = means([found])
    assert mean.ratio.median == pytest.approx(2.0)
    alone = replace(found, samples={n: s for n, s in found.samples.items() if n != "normkit, out="})
    without = alone.ratio("onnxruntime")
    assert without is not None
    assert without.median == pytest.approx(2.5 / 1.5)


def test_digits_follow_the_noise() -> None:
    assert plus_minus(Ratio(3.14159, 3.141, 3.142)) == "3.1416 ± 0.0005"
    assert plus_minus(Ratio(3.14159, 3.14158, 3.1416)) == "3.1416"  # never "± 0.0000"
    assert [microseconds(s) for s in (1.234e-6, 12.34e-6, 123.4e-6, 1234e-6)] == ["1.23", "12.3", "123", "1234"]


def test_the_end_holds_means_against_goals() -> None:
    good = timed(**{"nn.RMSNorm": 7.5})
    (mean,) = means([good])
    assert (mean.peer, mean.goal, mean.reached, mean.cases) == ("nn.RMSNorm", 4.0, True, 1)
    assert mean.ratio.median == pytest.approx(5.0)
    (missed,) = means([timed(**{"nn.RMSNorm": 4.5})])
    assert missed.reached is False
    text = "\n".join(summary([good]))
    assert "≥ 4 reached" in text
    assert "nowhere" in text
    assert "MISSED" in "\n".join(summary([timed(**{"nn.RMSNorm": 4.5})]))


def test_shares_are_judged_at_their_lowest_and_by_the_cache() -> None:
    (share,) = shares([timed()], cache=1 << 30)
    assert share.cached
    assert share.lowest == pytest.approx(0.8, rel=1e-2)
    assert share.reached
    (beyond,) = shares([timed()], cache=1 << 10)
    assert not beyond.cached
    assert beyond.goal == 0.80


def test_only_a_loss_beyond_the_allowance_is_one() -> None:
    assert losses([timed(**{"nn.RMSNorm": 1.4})]) == []  # 7 % faster than normkit: put down to noise
    (lost,) = losses([timed(**{"nn.RMSNorm": 1.2})])
    assert lost.peer == "nn.RMSNorm"
    assert losses([timed(**{"HF formula, eager": 0.1})]) == []  # no rival
    assert "nn.RMSNorm takes 0.8" in "\n".join(summary([timed(**{"nn.RMSNorm": 1.2})]))


def test_a_noisy_machine_is_told_what_to_do_in_view_of_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = timed()
    assert noise_warning([quiet], 2, 21, 0.1) is None
    wild = Samples(8, tuple(1e-4 * (1 + i % 2) for i in range(9)))
    noisy = replace(quiet, samples={**quiet.samples, "copy": wild})
    text = str(noise_warning([quiet, noisy], 2, 21, 3.25))
    assert "noisy in 1 of 2 cases" in text
    assert "load average 3.2" in text
    assert "--rounds 43, now 21" in text
    assert "--threads 1" in text
    assert "taskset" not in text
    monkeypatch.setattr(table, "usable_cores", lambda: 4)
    single = str(noise_warning([noisy], 1, 21, None))
    assert "taskset -c 0" in single
    assert "--threads 1)" not in single
    monkeypatch.setattr(table, "usable_cores", lambda: 1)  # pinned already
    assert "taskset" not in str(noise_warning([noisy], 1, 21, None))
