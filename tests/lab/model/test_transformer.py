import itertools
from dataclasses import replace

import pytest
import torch

from normkit.lab.draws import Draws
from normkit.lab.model.attention import CausalAttention, rotate, rotations
from normkit.lab.model.feedforward import hidden_width
from normkit.lab.model.initial import INITIALS
from normkit.lab.model.norms import NORMS
from normkit.lab.model.transformer import TransformerConfig, build
from normkit.placement import WIRINGS, deepnorm_constants

SMALL = TransformerConfig(layers=2, width=16, heads=2, context=12)
POINTWISE = ("layer", "rms", "dyt", "derf", "none")


def tokens(rows: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))


def draws(arm: str = "a", seed: int = 0) -> Draws:
    return Draws("test", arm, seed)


@pytest.mark.parametrize(("wiring", "norm"), list(itertools.product(WIRINGS, NORMS)))
def test_every_wiring_runs_forward_and_backward_with_every_norm(wiring, norm):
    model = build(replace(SMALL, wiring=wiring, norm=norm, qk_norm=True), draws())
    logits = model(tokens())
    assert logits.shape == (3, 12, 256)
    logits.square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name


@pytest.mark.parametrize("norm", POINTWISE)
@pytest.mark.parametrize("wiring", WIRINGS)
def test_a_future_byte_changes_nothing_before_it(wiring, norm):
    model = build(replace(SMALL, wiring=wiring, norm=norm, feed_forward="relu", qk_norm=True), draws())
    x = tokens()
    y = x.clone()
    y[:, 7] = (y[:, 7] + 1) % 256
    a, b = model(x), model(y)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.equal(a[:, 7:], b[:, 7:])


def test_instance_norm_reads_the_future():
    model = build(replace(SMALL, norm="instance"), draws())
    x = tokens()
    y = x.clone()
    y[:, -1] = (y[:, -1] + 1) % 256
    assert not torch.equal(model(x)[:, 0], model(y)[:, 0])


def test_attention_scores_depend_on_distance_alone():
    rotation = rotations(64, 16)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    turned_q, turned_k = (rotate(v.expand(64, 1, 16), rotation)[:, 0] for v in (q, k))
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(distance)
        # 16 products of magnitude ≤ |q||k| in float32, and sines rounded to float32.
        assert float(diagonal.max() - diagonal.min()) < 32 * 2**-24 * float(q.norm() * k.norm())
    assert float(scores.diagonal(1)[0] - scores.diagonal(17)[0]) != 0


def test_rotation_is_the_textbook_one():
    x = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))
    y = rotate(x, rotations(5, 4))
    for t, j in itertools.product(range(5), range(2)):
        angle = torch.tensor(t * 10_000.0 ** (-2 * j / 4))
        a, b = x[t, :, 2 * j], x[t, :, 2 * j + 1]
        torch.testing.assert_close(y[t, :, 2 * j], a * angle.cos() - b * angle.sin())
        torch.testing.assert_close(y[t, :, 2 * j + 1], a * angle.sin() + b * angle.cos())


def test_attention_matches_explicit_softmax():
    attention = CausalAttention(16, 2, 8, qk_norm=True)
    assert attention.qk_norm is not None
    with torch.no_grad():
        attention.qk_norm.q_norm.weight.copy_(torch.linspace(0.5, 2, 8))
    x = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = (m(x).view(3, 8, 2, 8) for m in (attention.query, attention.key, attention.value))
    rms = lambda t: t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    q = rotate(rms(q) * torch.linspace(0.5, 2, 8), attention.rotation)
    k = rotate(rms(k), attention.rotation)
    scores = torch.einsum("nthd,nshd->nhts", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), float("-inf"))
    expected = attention.output(torch.einsum("nhts,nshd->nthd", scores.softmax(-1), v).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=1e-4, atol=1e-5)


def test_deepnorm_scales_exactly_the_named_weights():
    for kind, scaled in (("swiglu", {"value", "output", "up", "down"}), ("relu", {"value", "output", "up", "down"})):
        pre = build(replace(SMALL, feed_forward=kind), draws()).weights()
        deep = build(replace(SMALL, feed_forward=kind, wiring="deepnorm"), draws()).weights()
        beta = deepnorm_constants(SMALL.layers, "decoder-only").beta
        assert pre.keys() == deep.keys()
        for name, linear in pre.items():
            factor = beta if name.rpartition("/")[2] in scaled else 1.0
            torch.testing.assert_close(deep[name].weight, factor * linear.weight, msg=name)


def test_a_sublayer_scales_by_the_square_of_beta():
    """Why the gate of a SwiGLU keeps gain 1: with it scaled as well the sublayer would shrink by more than β²."""
    beta = deepnorm_constants(SMALL.layers, "decoder-only").beta
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    pre, deep = (build(replace(SMALL, wiring=w), draws()) for w in ("pre", "deepnorm"))
    torch.testing.assert_close(deep.feed_forwards[0](x), beta**2 * pre.feed_forwards[0](x))
    torch.testing.assert_close(deep.attentions[0](x), beta**2 * pre.attentions[0](x))


@pytest.mark.parametrize("init", INITIALS)
def test_initial_weights_have_their_named_spread(init):
    config = replace(SMALL, width=64, feed_forward="relu", hidden=128, init=init)
    model = build(config, draws())
    up = model.weights()["0/up"].weight.detach()
    std = {
        "xavier": (2 / 192) ** 0.5,
        "normal-0.02": 0.02,
        "normal-0.02-unit": 0.02,
        "normal-1/d": 0.125,
        "torch": (1 / 192) ** 0.5,
    }[init]
    # The spread of n normal draws scatters by 1/√(2n); uniform draws by less. Five of those.
    assert float(up.std()) == pytest.approx(std, rel=5 / (2 * up.numel()) ** 0.5)
    embedding = {"normal-0.02": 0.02, "normal-1/d": 0.125}.get(init, 1.0)
    table = model.embedding.weight.detach()
    assert float(table.std()) == pytest.approx(embedding, rel=5 / (2 * table.numel()) ** 0.5)
    if init == "torch":
        assert 0.99 * 64**-0.5 < float(up.abs().max()) <= 64**-0.5


def test_wirings_share_draws_where_shapes_match_and_arms_never_matter():
    a = build(replace(SMALL, wiring="pre"), draws("one")).weights()
    b = build(replace(SMALL, wiring="parallel", norm="layer"), draws("two")).weights()
    assert all(torch.equal(a[name].weight, b[name].weight) for name in a)
    other = build(SMALL, draws("one", seed=1)).weights()
    assert not torch.equal(a["0/query"].weight, other["0/query"].weight)
    assert not torch.equal(a["0/query"].weight, a["1/query"].weight)
    assert not torch.equal(a["0/query"].weight, a["0/key"].weight)


def test_building_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    build(SMALL, draws())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("wiring", WIRINGS)
def test_the_final_norm_follows_the_table_unless_told(wiring):
    assert (build(replace(SMALL, wiring=wiring), draws()).final_norm is not None) == WIRINGS[wiring].final_norm
    for wanted in (True, False):
        model = build(replace(SMALL, wiring=wiring, final_norm=wanted), draws())
        assert (model.final_norm is not None) == wanted


def test_the_stream_ends_where_forward_reads_it():
    model = build(SMALL, draws())
    *_, last = model.stream(tokens())
    assert model.final_norm is not None
    assert torch.equal(model.head(model.final_norm(last)), model(tokens()))
    assert len(list(model.stream(tokens()))) == 1 + 2 * SMALL.layers


def test_a_swiglu_costs_what_a_relu_of_four_widths_costs():
    assert hidden_width("relu", 64) == 256
    assert hidden_width("swiglu", 64) == 176
    assert hidden_width("swiglu", 96) == 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "nrom"}, "unknown norm 'nrom'"),
        ({"wiring": "prae"}, "unknown wiring 'prae'"),
        ({"init": "he"}, "unknown init 'he'"),
        ({"feed_forward": "gelu"}, "unknown feed-forward 'gelu'"),
        ({"heads": 3}, "multiple of 2 × heads"),
    ],
)
def test_unknown_names_and_odd_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        build(replace(SMALL, **change), draws())


def test_a_sequence_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="13 positions, but the context is 12"):
        build(SMALL, draws())(tokens(length=13))
