"""D8: what each set of ratios would be judged as, without a clock; then the contestants and the clock itself."""

from __future__ import annotations

import time

import pytest
import torch
from pictures import check_pictures

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims import d8_memory_bound as module
from normkit.lab.claims.d8_memory_bound import CLAIMS, CONTESTANTS, STUDY, _seconds, contestants
from normkit.lab.draws import Draws
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings()
(D8,) = CLAIMS
NOISE = (0.95, 1.0, 1.05, 1.02, 0.98)


def _world(copy: float, fused: float, rms: float, chain: float) -> list[Measurement]:
    """Return measurements of a machine on which the contestants take these times."""
    times = {"copy": copy, "fused": fused, "rms": rms, "chain": chain}
    made: list[Measurement] = []
    for arm in STUDY.arms(SETTINGS):
        t = {role: times[arm.params[role]] for role in CONTESTANTS}
        for seed, noise in zip(SETTINGS.seeds, NOISE, strict=True):
            values = {
                "fused/copy": noise * t["fused"] / t["copy"],
                "chain/fused": t["chain"] / t["fused"] / noise,
                "rms/fused": noise * t["rms"] / t["fused"],
                **{f"ms/{role}": v for role, v in t.items()},
            }
            made.append(Measurement(STUDY.id, arm.name, seed, values))
    return made


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((1.0, 1.2, 1.1, 6.0), Verdict.HOLDS),
        ((1.0, 6.0, 6.0, 30.0), Verdict.FAILS),  # bound by arithmetic
        ((1.0, 1.2, 1.2, 1.3), Verdict.FAILS),  # fusing saves nothing
        ((1.0, 1.2, 2.0, 6.0), Verdict.FAILS),  # RMSNorm slower than LayerNorm
        ((1.0, 2.8, 2.8, 9.0), Verdict.UNDECIDED),
    ],
)
def test_verdict_of_times(times, expected, judge_claim):
    world = _world(*times)
    verdict = judge_claim(D8, D8.plays, world).verdict
    assert verdict is expected
    if verdict is Verdict.HOLDS:
        assert flips(verdict, judge_claim(D8, D8.control.plays, world).verdict)


def test_contestants_compute_what_they_are_called():
    generator = torch.Generator().manual_seed(3)
    x, w, b = (torch.randn(*s, generator=generator) for s in ((5, 37), (37,), (37,)))
    runs = contestants(x, w, b)
    found = {name: torch.as_tensor(run()).clone() for name, run in runs.items()}
    layer = torch.nn.functional.layer_norm(x.double(), (37,), w.double(), b.double(), 1e-5)
    rms = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    expected = {"copy": x.double(), "fused": layer, "rms": rms, "chain": layer}
    for name, y in expected.items():
        torch.testing.assert_close(found[name].double(), y, rtol=1e-5, atol=1e-5, msg=name)


def test_clock():
    """Work counts, waiting does not: what a neighbour takes is no time of ours."""

    def work():
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass

    assert 0.01 <= _seconds(work, "cpu") < 0.03
    assert _seconds(lambda: time.sleep(0.02), "cpu") < 0.01


def test_a_small_run_on_this_machine(monkeypatch, told, judge_claim):
    """In reach of every cache and with three blocks: the numbers are real, their verdict is nobody's business."""
    monkeypatch.setattr(module, "TOKENS", 256)
    monkeypatch.setattr(module, "BLOCKS", 3)
    made = [
        Measurement(STUDY.id, arm.name, 0, STUDY.measure(arm.params, Bench(SETTINGS, Draws(STUDY.id, arm.name, 0))))
        for arm in STUDY.arms(SETTINGS)
    ]
    assert all(v > 0 for m in made for v in m.values.values())
    evidence = Evidence(made, D8.plays, SETTINGS)
    assert told(D8, evidence)
    check_pictures(D8, made, SETTINGS)


def test_threads_are_given_back_even_after_an_error():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError):
            STUDY.measure({"copy": "copy"}, Bench(SETTINGS, Draws(STUDY.id, "x", 0)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
