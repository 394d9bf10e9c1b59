import pytest
import torch

from normkit.lab.claim import Bench, Claim, Measurement
from normkit.lab.claims import a3_residual_growth
from normkit.lab.claims.a3_residual_growth import CLAIMS, LAYERS, STUDY, increment_law
from normkit.lab.corpus import CONTEXT, load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.settings import Settings
from normkit.lab.verdict import Outcome, Verdict, combine, flips

A3, A4 = CLAIMS


def invented(power: float, scale: float = 1.0, spread: float = 0.0) -> list[Measurement]:
    """Measurements of a stream ∝ L^power whose feed-forwards add ``scale`` times their law."""
    made: list[Measurement] = []
    for wiring in ("pre", "post"):
        for k in (4, 1):
            for seed in range(5):
                p = (power + spread * (seed - 2)) if wiring == "pre" else 0.0
                stream = [1.0, *[float(n) ** p for n in range(1, LAYERS + 1)]]
                values = {
                    "stream": stream,
                    "read by feed-forward": stream[:-1],
                    "attention": [0.3] * LAYERS,
                    "feed-forward": [scale * increment_law(k)] * LAYERS,
                    "block": [0.3 + scale * increment_law(k)] * LAYERS,
                }
                made.append(Measurement(STUDY.id, f"{wiring}/k-{k}", seed, values))
    return made


@pytest.fixture(scope="module")
def measured() -> list[Measurement]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a3_residual_growth, "NETWORKS", {4: 1, 1: 1})
        return measure()


def measure() -> list[Measurement]:
    corpus, settings = load_corpus(), Settings()
    return [
        Measurement(
            STUDY.id,
            arm.name,
            seed,
            STUDY.measure(arm.params, Bench(settings, Draws(STUDY.id, arm.name, seed), corpus)),
        )
        for arm in STUDY.arms(settings)
        for seed in range(5)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.id)
def test_the_control_flips_what_is_measured(claim: Claim, measured, judge_claim):
    # One network a seed does not settle it at half tolerance; the run uses four.
    verdict = judge_claim(claim, claim.plays, measured).given
    assert flips(verdict, judge_claim(claim, claim.control.plays, measured).given)


@pytest.mark.parametrize(
    ("power", "scale", "verdict"),
    [
        (1.0, 1.0, Verdict.HOLDS),
        (0.5, 1.0, Verdict.FAILS),
        (2.0, 1.0, Verdict.FAILS),
        (1.0, 1.5, Verdict.FAILS),
        (1.07, 1.0, Verdict.UNDECIDED),  # inside the tolerance, outside half of it
    ],
)
def test_a3_tells_powers_and_increments_apart(power, scale, verdict, judge_claim):
    assert judge_claim(A3, A3.plays, invented(power, scale)).verdict == verdict


def test_noise_leaves_a3_open(judge_claim):
    judgement = judge_claim(A3, A3.plays, invented(1.0, spread=0.2))
    assert combine([c.outcome() for c in judgement.literal]) is Outcome.OPEN
    assert judgement.verdict == Verdict.UNDECIDED


@pytest.mark.parametrize(("power", "verdict"), [(1.0, Verdict.HOLDS), (0.0, Verdict.FAILS), (-0.5, Verdict.FAILS)])
def test_a4_asks_for_shares_that_fall(power, verdict, judge_claim):
    assert judge_claim(A4, A4.plays, invented(power)).verdict == verdict


@pytest.mark.slow
def test_the_recorded_stream_is_the_networks(measured):
    """Increments of a Pre-Norm block are differences of its stream."""
    corpus, draws = load_corpus(), Draws(f"{STUDY.id}/network-0", "pre/k-1", 0)
    config = TransformerConfig(
        layers=LAYERS, width=128, heads=4, hidden=128, feed_forward="relu", norm="layer", wiring="pre"
    )
    starts = torch.randint(0, len(corpus.train) - CONTEXT, (8,), generator=draws.shared("text"))
    tokens = corpus.train[starts[:, None] + torch.arange(CONTEXT)].long()
    with torch.no_grad():
        stream = list(build(config, draws).stream(tokens))
    (values,) = (m.values for m in measured if m.arm == "pre/k-1" and m.seed == 0)
    block = [float((b - a).square().mean()) for a, b in zip(stream[:-2:2], stream[2::2], strict=True)]
    feed_forward = [float((b - a).square().mean()) for a, b in zip(stream[1::2], stream[2::2], strict=True)]
    # Differences lose what rounding of a stream up to seven times larger took.
    assert values["block"] == pytest.approx(block, rel=1e-4)
    assert values["feed-forward"] == pytest.approx(feed_forward, rel=1e-4)
    assert len(values["stream"]) == LAYERS + 1


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_increment_law_against_random_matrices(k):
    g = torch.Generator().manual_seed(k)
    d, std = 256, (2 / (256 * (1 + k))) ** 0.5
    x = torch.randn(64, d, generator=g)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    added = torch.relu(x @ (std * torch.randn(d, k * d, generator=g))) @ (std * torch.randn(k * d, d, generator=g))
    # At most √(2/d + 5/kd) if the 64 rows were alike; they are not.
    assert float(added.square().mean()) == pytest.approx(increment_law(k), rel=(2 / d + 5 / (k * d)) ** 0.5)


@pytest.mark.slow
def test_summaries_and_figures_speak_of_the_numbers(measured, told):
    from normkit.lab.claim import Evidence

    for claim in CLAIMS:
        e = Evidence(measured, claim.plays, Settings())
        assert "p = " in told(claim, e)
        assert claim.figures(e)
