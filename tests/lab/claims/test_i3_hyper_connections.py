import itertools

import pytest
import torch

from normkit.lab.claim import Evidence, Measurement
from normkit.lab.claims import i3_hyper_connections as module
from normkit.lab.claims.i3_hyper_connections import CLAIMS, STUDY, sinkhorn
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(I3,) = CLAIMS
SETTINGS = Settings()


def test_it_holds_and_the_control_flips(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    verdict = judge_claim(I3, I3.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(I3, I3.control.plays, measured).verdict)
    e = Evidence(measured, I3.plays, SETTINGS)
    assert told(I3, e)
    assert I3.figures(e)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("log gain", lambda row: [0.1 * v for v in row]),
        ("rows off", lambda v: v + 1e-9),
        ("columns off", lambda v: v + 1e-9),
        ("least entry", lambda v: v - 1),
    ],
)
def test_what_would_break_it_is_seen(key, change, measure_study, judge_claim, altered):
    off = altered(measure_study(STUDY, SETTINGS), key, change)
    assert judge_claim(I3, I3.plays, off).given is Verdict.FAILS


def test_without_the_last_half_round_it_fails(judge_claim):
    """Rows alone make row sums exact and leave columns free."""

    def rows_only(logits, rounds):
        return logits.softmax(-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "sinkhorn", rows_only)
        measured = [
            Measurement(STUDY.id, arm.name, seed, values)
            for arm in STUDY.arms(SETTINGS)
            for seed in (0, 1)
            for values in [_measured(arm, seed)]
        ]
    assert judge_claim(I3, I3.plays, measured).given is Verdict.FAILS


def _measured(arm, seed):
    from normkit.lab.claim import Bench
    from normkit.lab.draws import Draws

    return STUDY.measure(arm.params, Bench(SETTINGS, Draws(STUDY.id, arm.name, seed)))


def test_the_projection_is_doubly_stochastic_and_keeps_cross_ratios():
    """Scaling rows and columns keeps m_ij·m_kl/(m_il·m_kj): what tells Sinkhorn's limit from any other such matrix."""
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    m = sinkhorn(logits, 500)
    torch.testing.assert_close(m.sum(0), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(m.sum(1), torch.ones(4, dtype=torch.float64))
    for i, k, j, n in itertools.product(range(3), (3,), range(3), (3,)):
        before = logits[i, j] + logits[k, n] - logits[i, n] - logits[k, j]
        torch.testing.assert_close(torch.log(m[i, j] * m[k, n] / (m[i, n] * m[k, j])), before)


def test_the_gain_is_the_larger_of_both_operator_norms():
    m = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = torch.maximum(
        torch.linalg.matrix_norm(m, ord=float("inf")),
        torch.linalg.matrix_norm(m, ord=1),
    )
    torch.testing.assert_close(module._gain(m), expected)
