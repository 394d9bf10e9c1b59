import pytest
import torch

from normkit.lab.claim import Evidence, Measurement
from normkit.lab.claims.h1_zoo import CLAIMS, NAMES, STUDY
from normkit.lab.draws import Draws
from normkit.lab.model.transformer import TransformerConfig
from normkit.lab.model.zoo import ZOO, build_zoo
from normkit.lab.settings import Settings
from normkit.lab.verdict import Verdict, flips

(H1,) = CLAIMS


@pytest.fixture(scope="module")
def measured(measure_text) -> list[Measurement]:
    return measure_text(STUDY, Settings(seeds=(0,)))


def test_it_holds_and_the_control_flips(measured, judge_claim, told):
    verdict = judge_claim(H1, H1.plays, measured).verdict
    assert verdict is Verdict.HOLDS
    assert flips(verdict, judge_claim(H1, H1.control.plays, measured).verdict)
    e = Evidence(measured, H1.plays, Settings())
    assert told(H1, e)
    assert len(H1.figures(e)[0].panels[0].series[0].x) == len(NAMES)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "pre"])
def test_every_row_is_told_from_pre_norm_or_from_one_that_stands_still(name, measured, judge_claim):
    """Each wiring has a criterion of its own: the wrong network in its place is seen."""
    wrong = "rezero" if name in ("parallel", "mix-ln") else "pre"
    assert judge_claim(H1, {**H1.plays, name: wrong}, measured).given is Verdict.FAILS


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


BY_HAND = {
    "keel": lambda x, f, block: rms(2 * 3 * x + f(rms(x))),
    "mix-ln": lambda x, f, block: rms(x + f(x)) if block == 0 else x + f(rms(x)),
    "lns": lambda x, f, block: x + f(rms(x) / (block + 1) ** 0.5),
    "rezero": lambda x, f, block: x,
    "layerscale": lambda x, f, block: x + 0.1 * f(rms(x)),
    "ngpt": lambda x, f, block: rms(x + 0.05 * (rms(f(x)) - x)),
}


@pytest.mark.parametrize("name", ZOO)
def test_every_wiring_of_the_zoo_against_its_formula(name):
    layers = 4 if name == "mix-ln" else 3
    config = TransformerConfig(layers=layers, width=24, heads=2)
    model = build_zoo(name, config, Draws("zoo", name, 3)).double()
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        *_, got = model.stream(tokens)
        x = model.embedding(tokens)
        for block, pair in enumerate(zip(model.attentions, model.feed_forwards, strict=True)):
            for f in pair:
                x = BY_HAND[name](x, f, block)
    # 0.1 and 0.05 were rounded to float32 before the network was widened.
    torch.testing.assert_close(got, x, rtol=1e-6, atol=1e-6)


def test_weights_are_the_same_in_every_wiring():
    config = TransformerConfig(layers=2, width=24, heads=2)
    first, *others = (build_zoo(name, config, Draws("zoo", name, 3)).weights() for name in ("pre", *ZOO))
    for weights in others:
        assert weights.keys() == first.keys()
        assert all(torch.equal(weights[key].weight, first[key].weight) for key in first)


def test_rezero_s_jacobian_is_the_identity():
    """Not only does nothing move: gradients come back to the bit."""
    model = build_zoo("rezero", TransformerConfig(layers=3, width=24, heads=2), Draws("zoo", "rezero", 1))
    stream = list(model.stream(torch.arange(8)[None]))
    sent = torch.randn(stream[-1].shape, generator=torch.Generator().manual_seed(2))
    (back,) = torch.autograd.grad(stream[-1], stream[0], sent)
    assert torch.equal(back, sent)
