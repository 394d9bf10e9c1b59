import pytest
import torch

from normkit.lab.claim import Bench, Evidence, Measurement
from normkit.lab.claims import g2_model_update as module
from normkit.lab.claims.g2_model_update import ARMS, CLAIMS, DEPTHS, ROWS, STUDY, WIDTH, moved
from normkit.lab.corpus import load_corpus
from normkit.lab.draws import Draws
from normkit.lab.model.fresh import random_windows
from normkit.lab.model.training import next_byte_loss
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

G2, G4 = CLAIMS
THEORY = {"post": 1.5, "pre": 0.7, "deepnorm": 0.0, "fixed": 0.5, "branch": 1.2}


def invented(powers: dict[str, float]) -> list[Measurement]:
    return [
        Measurement(STUDY.id, name, seed, {"moved": [float(d) ** (power + 0.01 * seed) for d in DEPTHS]})
        for name, power in powers.items()
        for seed in range(3)
    ]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.id)
@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        ({}, (Verdict.HOLDS, Verdict.HOLDS)),
        ({"deepnorm": 0.5}, (Verdict.FAILS, Verdict.FAILS)),
        ({"post": 0.5}, (Verdict.FAILS, Verdict.HOLDS)),
        ({"fixed": 0.0}, (Verdict.HOLDS, Verdict.FAILS)),
        ({"branch": 0.0}, (Verdict.HOLDS, Verdict.FAILS)),
    ],
)
def test_each_verdict_is_reached(claim, change, verdicts, judge_claim):
    measured = invented(THEORY | change)
    verdict = judge_claim(claim, claim.plays, measured).verdict
    assert verdict is verdicts[CLAIMS.index(claim)]
    if verdict is Verdict.HOLDS:
        assert flips(verdict, judge_claim(claim, claim.control.plays, measured).verdict)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(Settings(), Draws(STUDY.id, "post", 5), load_corpus())


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.id)
def test_the_control_flips_what_is_measured(claim, measure_text, judge_claim):
    measured = measure_text(STUDY, Settings(seeds=(0, 1, 2)))
    verdict = judge_claim(claim, claim.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(claim, claim.control.plays, measured).verdict)


@pytest.mark.parametrize("name", ARMS)
def test_the_step_is_linear(name, bench):
    """Ten times the rate moves ten times as far: the quadratic part is far below the step's."""
    assert moved(ARMS[name], 8, bench, 1e-5) == pytest.approx(moved(ARMS[name], 8, bench), rel=1e-3)


def test_the_change_is_the_derivative_along_the_gradient(bench):
    config = TransformerConfig(layers=2, width=WIDTH, heads=4, feed_forward="relu", norm="layer", wiring="deepnorm")
    model = build(config, bench.draws).double()
    windows = random_windows(bench, bench.draws, ROWS)
    names = [name for name, p in model.named_parameters() if p.dim() == 2 and "head" not in name]
    names = [name for name in names if "embedding" not in name and "norm" not in name]
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = torch.autograd.grad(next_byte_loss(model, windows), [model.get_parameter(n) for n in names])

    def output(step: float) -> torch.Tensor:
        shifted = {n: parameters[n] - step * g for n, g in zip(names, gradients, strict=True)}
        old = {n: model.get_parameter(n).data for n in shifted}
        for n, value in shifted.items():
            model.get_parameter(n).data = value
        with torch.no_grad():
            result = module._output(model, windows[:, :-1])
        for n, value in old.items():
            model.get_parameter(n).data = value
        return result

    central = (output(1e-4) - output(-1e-4)) / 2e-4  # error of second order, another step size
    assert moved(ARMS["deepnorm"], 2, bench) == pytest.approx(float(central.square().mean().sqrt()), rel=1e-4)


def test_the_wrong_copies_compute_what_they_are_called(bench):
    """α on the branch: N(x/α + F) is N(x + α·F) up to ε; fixed: right at 32 blocks and nowhere else."""
    x, f = (bench.draws.randn(5, WIDTH, stream=s, dtype=torch.float64) for s in ("x", "f"))
    alpha = ARMS["branch"].constants(8).alpha
    assert alpha == pytest.approx(1 / ARMS["deepnorm"].constants(8).alpha)
    norm = torch.nn.LayerNorm(WIDTH, eps=0.0).double()
    torch.testing.assert_close(norm(alpha * x + f), norm(x + f / alpha))
    assert ARMS["fixed"].constants(32).alpha == pytest.approx(ARMS["deepnorm"].constants(32).alpha)
    assert ARMS["fixed"].constants(4).alpha != pytest.approx(ARMS["deepnorm"].constants(4).alpha, rel=0.3)


def test_summaries_and_figures(told):
    for claim in CLAIMS:
        e = Evidence(invented(THEORY), claim.plays, Settings())
        assert "L^p" in told(claim, e)
        assert claim.figures(e)
