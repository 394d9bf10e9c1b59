"""Every row of the zoo by its formula, by the weights it starts from, and by an identity that no other row has."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from normkit.lab.draws import Draws
from normkit.lab.model.norms import NORMS
from normkit.lab.model.steps import BottomToTop, DualExit, DualResidual, Interpolated, NormedLinear, ScaledBranch
from normkit.lab.model.transformer import Transformer, TransformerConfig
from normkit.lab.model.zoo import KEEL, ZOO, build_zoo, sub_ln_constants
from normkit.modules import RMSNorm

SIZES = {"width": 24, "heads": 2, "context": 9}
SEEDS = (3, 8)


def made(name: str, layers: int = 5, seed: int = 3, **changes) -> Transformer:
    """Build a network with gains that are not all 1, so that a norm left out or used twice shows."""
    model = build_zoo(name, TransformerConfig(layers=layers, **{**SIZES, **changes}), Draws("zoo", name, seed))
    g = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.data = torch.rand(module.weight.shape, generator=g) + 0.5
    return model


def tokens(seed: int = 4) -> Tensor:
    return torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(seed))


def norms(model: nn.Module) -> list[RMSNorm]:
    return [m for m in model.modules() if isinstance(m, RMSNorm)]


def set_gains(model: nn.Module, value: float = 1.0, eps: float | None = None) -> None:
    for norm in norms(model):
        nn.init.constant_(norm.weight, value)
        norm.eps = norm.eps if eps is None else eps


def sublayers(model: Transformer) -> list[nn.Module]:
    return [f for pair in zip(model.attentions, model.feed_forwards, strict=True) for f in pair]


@torch.no_grad()
def streams(model: Transformer) -> list[Tensor]:
    return list(model.stream(tokens()))


@torch.no_grad()
def logits(model: Transformer) -> Tensor:
    return model(tokens())


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def inside(f: nn.Module, x: Tensor) -> Tensor:
    """Return a sublayer's result with a norm before its last map, which ``f`` has not."""
    last = f.get_submodule("output" if hasattr(f, "output") else "down")
    handle = last.register_forward_pre_hook(lambda module, args: (rms(args[0]),))
    try:
        return f(x)
    finally:
        handle.remove()


def by_hand(name: str, model: Transformer) -> Tensor:
    """Return the logits by the formula, with gains 1; ``model`` is Pre-Norm's network with the row's weights."""
    x = d = model.embedding(tokens())
    for block, (attention, feed_forward) in enumerate(zip(model.attentions, model.feed_forwards, strict=True)):
        entering = x
        for f in (attention, feed_forward):
            before = x
            x = {
                "sub-ln": lambda x, f, i: x + inside(f, rms(x)),
                "resi-dual": lambda x, f, i: rms(x + f(x)),
                "b2t": lambda x, f, i, e=entering: rms((e if hasattr(f, "down") else 0) + x + f(x)),
                "keel": lambda x, f, i: rms(2 * 5 * x + f(rms(x))),
                "mix-ln": lambda x, f, i: rms(x + f(x)) if i == 1 else x + f(rms(x)),
                "lns": lambda x, f, i: x + f(rms(x) / i**0.5),
                "rezero": lambda x, f, i: x,
                "layerscale": lambda x, f, i: x + 0.1 * f(rms(x)),
                "ngpt": lambda x, f, i: rms(x + 0.05 * (rms(f(x)) - x)),
            }[name](x, f, block + 1)
            d = d + f(before)
    final = {"resi-dual": x + rms(d), "b2t": x, "keel": x, "rezero": x, "ngpt": x}
    return model.head(final.get(name, rms(x)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ZOO)
def test_logits_are_the_formula_s(name, seed):
    """Five blocks: a quarter of them is one and a remainder."""
    model, plain = made(name, seed=seed).double(), made("pre", seed=seed).double()
    set_gains(model)
    for key, linear in plain.weights().items():
        linear.weight = model.weights()[key].weight
    with torch.no_grad():
        expected = by_hand(name, plain)
    # 0.1, 0.05 and the embedding's and head's weights were rounded to float32 before the networks were widened.
    torch.testing.assert_close(logits(model), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("feed_forward", ["swiglu", "relu"])
def test_weights_are_the_same_draws_in_every_wiring(feed_forward):
    first = made("pre", feed_forward=feed_forward).weights()
    for name in ZOO:
        weights = made(name, feed_forward=feed_forward).weights()
        assert weights.keys() == first.keys()
        for key, linear in weights.items():
            scaled = name == "sub-ln" and key.rpartition("/")[2] in {"value", "output", "up", "down"}
            expected = math.log(10) ** 0.5 * first[key].weight if scaled else first[key].weight
            # A scaled standard deviation times a draw: rounded in another order.
            torch.testing.assert_close(linear.weight, expected, rtol=2**-22 if scaled else 0, atol=0)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_that_can_learn_at_first_does_and_no_future_byte_is_read(name, norm):
    model = made(name, norm=norm)
    x = tokens()
    later = x.clone()
    later[:, 6] = (later[:, 6] + 1) % 256
    a, b = model(x), model(later)
    assert torch.equal(a[:, :6], b[:, :6])
    assert not torch.equal(a[:, 6:], b[:, 6:])
    a.square().mean().backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key
        zero = name == "rezero" and not key.endswith("scale") and key not in ("embedding.weight", "head.weight")
        assert bool(p.grad.any()) is not zero, key


def test_building_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    for name in ZOO:
        made(name)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["sub-ln", "resi-dual", "b2t"])
def test_any_norm_of_the_lab_can_stand_in_it(name, norm):
    """Inside a feed-forward the norm has another width than the stream."""
    model = made(name, layers=2, norm=norm)
    assert logits(model).shape == (2, 9, 256)
    assert logits(model).isfinite().all()


# Sub-LN


@pytest.mark.parametrize("feed_forward", ["swiglu", "relu"])
def test_sub_ln_without_its_inner_norms_is_pre_norm(feed_forward):
    model, pre = made("sub-ln", feed_forward=feed_forward), made("pre", feed_forward=feed_forward)
    inner = [m for m in model.modules() if isinstance(m, NormedLinear)]
    assert len(inner) == 2 * 5
    assert {m.norm.weight.numel() for m in inner} == {24, model.feed_forwards[0].down.in_features}
    for m in inner:
        m.norm = nn.Identity()
    pre.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), logits(pre))


@pytest.mark.parametrize("layers", [1, 5])
def test_sub_ln_s_gain_reaches_the_stream_through_the_last_maps_alone(layers):
    """N(γa) = N(a), and both sublayers are homogeneous in what γ scales within: F(x) = γ·W N(G(x)) of unscaled W, G."""
    model, plain = (made("sub-ln", layers=layers).double() for _ in range(2))
    gain = sub_ln_constants(layers).beta
    for m in (model, plain):
        set_gains(m, eps=0.0)
    for key, linear in plain.weights().items():
        if key.rpartition("/")[2] in {"value", "up"}:
            linear.weight.data /= gain
    torch.testing.assert_close(logits(model), logits(plain))
    for key, linear in plain.weights().items():
        if key.rpartition("/")[2] in {"output", "down"}:
            linear.weight.data /= gain
    x, f, g = torch.randn(2, 9, 24).double(), sublayers(model), sublayers(plain)
    for scaled, unscaled in zip(f, g, strict=True):
        torch.testing.assert_close(scaled(x), gain * unscaled(x))


def test_sub_ln_s_gain_is_the_published_one():
    assert sub_ln_constants(1).beta == math.log(2) ** 0.5
    for depth in (1, 12, 24):
        for part in ("encoder-only", "decoder-only"):
            assert math.exp(sub_ln_constants(depth, part).beta ** 2) == pytest.approx(2 * depth)
        decoder = sub_ln_constants(depth, "encoder-decoder/decoder")
        assert math.exp(decoder.beta**2) == pytest.approx(3 * depth)
    # The encoder's gain is the geometric mean of both alone, by √3.
    both = sub_ln_constants(6).beta * sub_ln_constants(18, "encoder-decoder/decoder").beta
    assert sub_ln_constants(6, "encoder-decoder/encoder", other_depth=18).beta == pytest.approx(both / 3**0.5)
    assert sub_ln_constants(6, "encoder-decoder/encoder") == sub_ln_constants(
        6, "encoder-decoder/encoder", other_depth=6
    )
    assert sub_ln_constants(6).alpha == 1
    with pytest.raises(ValueError, match="at least 1, got 0"):
        sub_ln_constants(0)
    with pytest.raises(ValueError, match="unknown architecture 'both'"):
        sub_ln_constants(3, "both")  # pyright: ignore[reportArgumentType]


# ResiDual


@pytest.mark.parametrize("seed", SEEDS)
def test_resi_dual_s_first_stream_is_post_norm_to_the_bit_and_its_exit_adds_the_normed_sum(seed):
    model, post = made("resi-dual", seed=seed), made("post", seed=seed)
    for step, other in zip(model.steps, post.steps, strict=True):
        step.norm.load_state_dict(other.norm_out.state_dict())
    text, *both = streams(model)
    alone = streams(post)
    assert torch.equal(text, alone[0])
    said = text
    for (x, d), reads, x_alone, f in zip(both, alone[:-1], alone[1:], sublayers(post), strict=True):
        assert torch.equal(x, x_alone)
        with torch.no_grad():
            said = said + f(reads)
        # The same sum in the same order; a sublayer may read the halves of a stack elsewhere in memory.
        torch.testing.assert_close(d, said)
    exit_norm = model.final_norm.norm
    with torch.no_grad():
        torch.testing.assert_close(logits(model), model.head(alone[-1] + exit_norm(both[-1][1])))


def test_resi_dual_s_streams_are_one_where_nothing_is_normed_between():
    model = made("resi-dual", layers=3, init="normal-0.02-unit")
    for step in model.steps:
        step.norm = nn.Identity()
    for x, d in streams(model)[1:]:
        assert torch.equal(x, d)


def test_resi_dual_s_second_stream_brings_gradients_back_whole():
    """No norm stands on it: where branches say nothing, what goes in at its end comes out at the text to the bit."""
    model = made("resi-dual", layers=3)
    for key, linear in model.weights().items():
        if key.rpartition("/")[2] in {"output", "down"}:
            nn.init.zeros_(linear.weight)
    stream = list(model.stream(tokens()))
    sent = torch.randn(stream[0].shape, generator=torch.Generator().manual_seed(2))
    (back,) = torch.autograd.grad(stream[-1], stream[0], torch.stack((torch.zeros_like(sent), sent)))
    assert torch.equal(back, sent)


# B2T


@pytest.mark.parametrize("seed", SEEDS)
def test_b2t_without_its_skip_is_post_norm(seed):
    model, post = made("b2t", seed=seed), made("post", seed=seed)
    for block, step in enumerate(model.steps):
        assert isinstance(step, BottomToTop)
        step.skip = False
        step.norm_inner.load_state_dict(post.steps[2 * block].norm_out.state_dict())
        step.norm_out.load_state_dict(post.steps[2 * block + 1].norm_out.state_dict())
    assert torch.equal(logits(model), logits(post))
    model.steps[2].skip = True
    assert not torch.allclose(logits(model), logits(post), atol=1e-2)


def test_b2t_s_skip_adds_the_block_s_own_input():
    """A feed-forward that takes the input away again leaves Post-Norm."""
    model, post = made("b2t", layers=1).double(), made("post", layers=1).double()
    text = post.embedding(tokens())
    step = model.steps[0]
    step.norm_inner.load_state_dict(post.steps[0].norm_out.state_dict())
    step.norm_out.load_state_dict(post.steps[1].norm_out.state_dict())
    own = step.feed_forward.forward
    step.feed_forward.forward = lambda y: own(y) - text
    torch.testing.assert_close(logits(model), logits(post))


# The others


def test_keel_with_unit_alpha_and_no_norm_before_is_post_norm():
    model, post = made("keel"), made("post")
    assert {step.constants.alpha for step in model.steps} == {10.0}
    assert KEEL.formula == "x ← N(α·x + F(N(x)))"
    for step, other in zip(model.steps, post.steps, strict=True):
        step.constants = replace(step.constants, alpha=1.0)
        step.norm_in = nn.Identity()
        step.norm_out.load_state_dict(other.norm_out.state_dict())
    assert torch.equal(logits(model), logits(post))


@pytest.mark.parametrize(("layers", "post_blocks"), [(3, 0), (4, 1), (7, 1), (8, 2)])
def test_mix_ln_is_post_norm_in_its_first_quarter_and_pre_norm_after_it(layers, post_blocks):
    model, post = made("mix-ln", layers=layers), made("post", layers=layers)
    pre = made("pre", layers=layers)
    for m in (model, post, pre):
        set_gains(m)
    mixed = streams(model)
    assert all(torch.equal(a, b) for a, b in zip(mixed[: 1 + 2 * post_blocks], streams(post), strict=False))
    with torch.no_grad():
        for place in range(2 * post_blocks, 2 * layers):
            assert torch.equal(pre.steps[place](mixed[place]), mixed[place + 1])
        assert torch.equal(pre.head(pre.final_norm(mixed[-1])), logits(model))
    if post_blocks == 0:
        assert torch.equal(logits(model), logits(pre))


def test_lns_is_pre_norm_with_gains_of_one_over_root_l():
    model, pre = made("lns").double(), made("pre").double()
    set_gains(model)
    set_gains(pre)
    for place, step in enumerate(pre.steps):
        nn.init.constant_(step.norm_in.weight, (1 + place // 2) ** -0.5)
    torch.testing.assert_close(logits(model), logits(pre))
    set_gains(pre)
    assert not torch.allclose(logits(model), logits(pre), atol=1e-2)


def test_rezero_s_jacobian_is_the_identity_and_with_unit_scales_it_is_a_plain_residual_network():
    model, plain = made("rezero"), made("pre", norm="none")
    stream = list(model.stream(tokens()))
    sent = torch.randn(stream[-1].shape, generator=torch.Generator().manual_seed(2))
    (back,) = torch.autograd.grad(stream[-1], stream[0], sent)
    assert torch.equal(back, sent)
    assert norms(model) == []
    for step in model.steps:
        assert isinstance(step, ScaledBranch)
        nn.init.ones_(step.scale)
    assert torch.equal(logits(model), logits(plain))


def test_layerscale_s_scales_are_rows_of_the_last_maps():
    model, pre = made("layerscale").double(), made("pre").double()
    set_gains(model)
    set_gains(pre)
    scales = torch.rand(10, 24, generator=torch.Generator().manual_seed(1)).double()
    for step in model.steps:
        assert torch.equal(step.scale, torch.full((24,), 0.1).double())
        step.scale.data = torch.ones(24).double()
    assert torch.equal(logits(model), logits(pre))
    for step, scale in zip(model.steps, scales, strict=True):
        step.scale.data = scale
    for place, f in enumerate(sublayers(pre)):
        last = f.get_submodule("down" if place % 2 else "output")
        last.weight.data *= scales[place][:, None]
    torch.testing.assert_close(logits(model), logits(pre))


def test_ngpt_s_alpha_goes_from_the_stream_to_the_branch():
    model = made("ngpt").double()
    set_gains(model, eps=0.0)
    text, *stream = streams(model)
    # rms 1 whatever α is, in float64.
    for x in stream:
        torch.testing.assert_close(x.square().mean(-1), torch.ones(2, 9).double())
    step = model.steps[0]
    assert isinstance(step, Interpolated)
    unit = text / text.square().mean(-1, keepdim=True).sqrt()
    with torch.no_grad():
        branch = model.attentions[0](text)
        for alpha, expected in ((0.0, unit), (1.0, branch / branch.square().mean(-1, keepdim=True).sqrt())):
            nn.init.constant_(step.alpha, alpha)
            torch.testing.assert_close(step(text), expected)


def test_final_norms_are_what_the_table_says():
    for name, row in ZOO.items():
        model = made(name)
        if name == "resi-dual":
            assert isinstance(model.final_norm, DualExit)
            assert [step.first for step in model.steps if isinstance(step, DualResidual)] == [True] + [False] * 9
            assert row.final_norm == "x + N(d)"
        else:
            assert (model.final_norm is not None) is {"yes": True, "no": False}[row.final_norm]


def test_names_of_the_placement_table_are_built_as_always_and_others_are_refused():
    assert torch.equal(logits(made("sandwich")), logits(made("sandwich")))
    with pytest.raises(ValueError, match="unknown wiring 'magneto'"):
        made("magneto")
