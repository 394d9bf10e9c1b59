import math

import pytest
import torch
import torch.nn.functional as F

from normkit.lab.corpus import CONTEXT, HELDOUT_WINDOWS, Corpus, bigram_entropy, unigram_entropy
from normkit.lab.draws import Draws
from normkit.lab.model.training import (
    CURVE,
    Plateau,
    Schedule,
    heldout_loss,
    heldout_windows,
    next_byte_loss,
    plateau_of,
    train,
)
from normkit.lab.model.transformer import TransformerConfig, build

TINY = TransformerConfig(layers=1, width=16, heads=2)


def markov(size: int, seed: int) -> torch.Tensor:
    """Bytes 0–7; each is its predecessor plus 1 (mod 8) three times in four, else anything."""
    g = torch.Generator().manual_seed(seed)
    jump = torch.where(torch.rand(size, generator=g) < 0.75, 1, torch.randint(0, 8, (size,), generator=g))
    return (jump.cumsum(0) % 8).to(torch.uint8)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus("markov", "0", 440_000, markov(400_000, 0), markov(40_000, 1))


def draws(arm: str = "a", seed: int = 0) -> Draws:
    return Draws("test", arm, seed)


def test_a_run_is_the_same_bits_twice_whatever_arm_and_process_state(corpus):
    schedule = Schedule(3e-3, warmup=5, steps=30)
    a = train(TINY, schedule, corpus, draws("one"))
    torch.manual_seed(123)
    b = train(TINY, schedule, corpus, draws("two"))
    assert a == b
    assert a.curve != train(TINY, schedule, corpus, draws("one", seed=1)).curve


@pytest.mark.slow
def test_a_network_that_learns_the_order_of_bytes_has_trained(corpus):
    run = train(TINY, Schedule(1e-2, steps=60), corpus, draws())
    assert run.outcome == "trained"
    assert run.heldout is not None
    assert run.heldout < run.plateau.unigram - run.plateau.margin
    assert run.curve[-1] < run.curve[0]
    assert len(run.curve) == len(run.excess) == 60 // CURVE


def test_a_network_that_never_moves_is_stuck(corpus):
    run = train(TINY, Schedule(0.0, steps=10), corpus, draws())
    assert run.outcome == "stuck"
    assert run.heldout is not None
    assert run.heldout > math.log(8)


@pytest.mark.parametrize("steps", [30, 33])
def test_divergence_is_recorded_and_raises_nothing(corpus, steps):
    config = TransformerConfig(layers=2, width=16, heads=2, norm="none", init="normal-1/d")
    run = train(config, Schedule(1e15, steps=steps), corpus, draws())
    assert run.outcome == "diverged"
    assert run.heldout is None
    assert run.diverged_at is not None
    assert 0 < run.diverged_at < steps
    assert len(run.curve) == run.diverged_at // CURVE
    assert all(map(math.isfinite, run.curve + run.excess))


@pytest.mark.slow
def test_training_loss_decides_nothing(corpus):
    """Held-out text without order cannot be learnt, however well training goes."""
    noise = torch.randint(0, 8, (40_000,), generator=torch.Generator().manual_seed(5)).to(torch.uint8)
    other = Corpus("mixed", "1", 440_000, corpus.train, noise)
    run = train(TINY, Schedule(1e-2, steps=60), other, draws())
    assert run.curve[-1] < run.plateau.unigram - run.plateau.margin
    assert run.outcome == "stuck"


def test_warmup_is_linear_then_constant():
    schedule = Schedule(2.0, warmup=4)
    assert [schedule.lr_at(s) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert [Schedule(2.0).lr_at(s) for s in range(2)] == [2.0, 2.0]


def test_warmup_reaches_the_optimizer(corpus):
    """The first update of Adam is lr · sign(g): a tenth of the rate moves the weights a tenth as far."""
    cold, warm = (train(TINY, Schedule(1e-3, w, steps=10), corpus, draws()) for w in (0, 10))
    assert cold.curve[0] < warm.curve[0]


def test_held_out_windows_are_fixed_and_span_the_text(corpus):
    windows = heldout_windows(corpus)
    assert windows.shape == (HELDOUT_WINDOWS, CONTEXT + 1)
    assert torch.equal(windows[0], corpus.heldout[: CONTEXT + 1].long())
    assert torch.equal(windows[-1], corpus.heldout[-(CONTEXT + 1) :].long())


def test_held_out_loss_is_the_mean_over_all_windows(corpus):
    model = build(TINY, draws())
    with torch.no_grad():
        whole = float(next_byte_loss(model, heldout_windows(corpus)))
        logits = model(heldout_windows(corpus)[:2, :-1])
        picked = -F.log_softmax(logits, -1).gather(2, heldout_windows(corpus)[:2, 1:, None]).mean()
        assert float(next_byte_loss(model, heldout_windows(corpus)[:2])) == pytest.approx(float(picked), rel=1e-6)
    # Means of 16,384 float32 losses, summed in two orders.
    assert heldout_loss(model, corpus) == pytest.approx(whole, rel=1e-5)
    assert model.training


def test_the_plateau_bounds_every_constant_prediction(corpus):
    plateau = plateau_of(corpus, 16)
    targets = heldout_windows(corpus)[:, 1:]
    p = torch.bincount(targets.flatten(), minlength=256).double() / targets.numel()
    assert plateau.unigram == pytest.approx(-float((p[p > 0] * p[p > 0].log()).sum()), rel=1e-12)
    for seed in range(5):
        tilt = torch.randn(8, generator=torch.Generator().manual_seed(seed)).double()
        q = (p[:8].log() + 0.1 * tilt).log_softmax(0)
        assert -float(q[targets].mean()) > plateau.unigram
    information = unigram_entropy(corpus.train) - bigram_entropy(corpus.train)
    assert plateau.margin == pytest.approx(information / 10)


def test_the_noise_of_a_point_is_that_of_its_bytes():
    """Independent bytes: the loss of one has variance Σ p ln²p − H², a point holds 16 · 64 · 10 of them."""
    g = torch.Generator().manual_seed(0)
    p = torch.tensor([0.6, 0.3, 0.1])
    text = torch.multinomial(p, 1_000_000, replacement=True, generator=g).to(torch.uint8)
    noise = plateau_of(Corpus("iid", "2", 0, text, text), 16).noise
    variance = float((p * p.log() ** 2).sum() - (p * p.log()).sum() ** 2)
    # 15,625 windows: their spread is known to 1/√(2n) = .6 %; five of those.
    assert noise == pytest.approx((variance / (16 * CONTEXT * CURVE)) ** 0.5, rel=0.03)


@pytest.mark.parametrize(
    ("heldout", "outcome"),
    [(2.8, "trained"), (2.95, "stuck"), (3.0, "stuck"), (5.0, "stuck"), (math.nan, "diverged"), (math.inf, "diverged")],
)
def test_outcomes_follow_the_plateau(heldout, outcome):
    assert Plateau(unigram=3.0, margin=0.1, noise=0.0).outcome(heldout) == outcome
