"""C5: messages of shards against the whole batch, in other orders and with one message lost."""

from __future__ import annotations

import pytest
import torch

from normkit.functional import moments
from normkit.lab.claim import Evidence
from normkit.lab.claims.c5_shards import CLAIMS, EPS, STUDY, C, _backward, merged, packed, unpacked
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

SETTINGS = Settings(seeds=(0, 1, 2))
(C5,) = CLAIMS


def _shards(offset: float = 0.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 5, 7, dtype=torch.float64, generator=generator) + offset for n in (3, 1, 6)]


def test_a_message_comes_back_as_it_was_sent():
    sent = moments(_shards()[0], axes=(0, 1))
    message = packed(sent)
    assert message.shape == (2 * 7 + 1,)
    got = unpacked(message)
    assert int(got.count[0]) == 15
    torch.testing.assert_close(got.mean, sent.mean + sent.remainder, rtol=0, atol=0)
    torch.testing.assert_close(got.m2, sent.m2, rtol=0, atol=0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_messages_merge_in_any_order(order):
    shards = _shards(offset=100.0)
    whole = torch.cat(shards)
    found = merged([packed(moments(shards[i], axes=(0, 1))) for i in order])
    torch.testing.assert_close(found.mean + found.remainder, whole.mean((0, 1)), rtol=1e-14, atol=0)
    torch.testing.assert_close(found.variance(), whole.var((0, 1), unbiased=False), rtol=1e-12, atol=0)
    lost = merged([packed(moments(shards[i], axes=(0, 1))) for i in order[:2]])
    assert float((lost.variance() - found.variance()).abs().max()) > 1e-3


def test_the_backward_by_hand_is_that_of_torch():
    shards = _shards()
    x = torch.cat(shards).requires_grad_()
    g = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weight = torch.linspace(-2, 2, 7, dtype=torch.float64)
    y = torch.nn.functional.batch_norm(x.transpose(1, 2), None, None, weight, training=True, eps=EPS)
    (want,) = torch.autograd.grad(y.transpose(1, 2), x, g)
    whole = moments(x.detach(), axes=(0, 1))
    got = torch.cat(_backward(shards, g.split([3, 1, 6]), whole, weight))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_the_claim_holds_and_the_control_fails(measure_study, judge_claim, told):
    measured = measure_study(STUDY, SETTINGS)
    verdict = judge_claim(C5, C5.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(C5, C5.control.plays, measured).verdict)
    e = Evidence(measured, C5.plays, SETTINGS)
    assert f"{2 * C + 1} numbers" in told(C5, e)
    (chart,) = C5.figures(e)
    assert chart.panels[1].series[1].y[-1] > 1e3 * chart.panels[1].series[0].y[-1]


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("merged", lambda v: v + 1e-11),
        ("output", lambda v: v + 1e-11),
        ("gradient", lambda v: v + 1e-11),
        ("numbers", lambda v: v + 1),
        ("least", lambda v: 1e-4),
    ],
)
def test_a_broken_merge_is_seen(key, change, measure_study, judge_claim, altered):
    wrong = altered(measure_study(STUDY, SETTINGS), key, change)
    assert judge_claim(C5, C5.plays, wrong).verdict is Verdict.FAILS
