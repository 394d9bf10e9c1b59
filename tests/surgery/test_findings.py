"""One broken model for every finding, and the healthy one beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from surgery.stacks import HEADS, TOKENS, WIDTH, Attention, FeedForward, PreBlock, Stack, ids, pre, weighted, wired

pytestmark = pytest.mark.usefixtures("on_the_reference")


def found(model: nn.Module, *args: Any) -> dict[str, nk.Finding]:
    """Return the findings by code; no code comes twice in these models unless a test says so."""
    report = nk.audit(model, *(args or (ids(),)))
    assert report.notes == () or report.findings, report.notes
    codes = [finding.code for finding in report.findings]
    assert len(set(codes)) == len(codes), codes
    return {finding.code: finding for finding in report.findings}


HARMLESS = {"weight-decay"}  # norm1 and norm2 tell no filter that they are norms


@pytest.mark.parametrize("name", sorted(nk.WIRINGS))
@pytest.mark.parametrize("norm", [nk.RMSNorm, nn.LayerNorm])
def test_healthy_stacks_have_no_findings(name: str, norm: Any) -> None:
    assert set(found(wired(name, norm=norm))) <= HARMLESS


def test_healthy_written_out_stack() -> None:
    assert set(found(pre())) <= HARMLESS
    assert "weight-decay" not in found(pre(norm=nn.LayerNorm))


class SameNormTwice(PreBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm1(x))


class SecondNorm(PreBlock):
    """With a flag that switches its second norm off."""

    def __init__(self, use: bool):
        super().__init__()
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x) if self.use else x)


def test_one_norm_used_twice_and_its_neighbour_never() -> None:
    model = Stack([PreBlock(), SameNormTwice(), PreBlock()], nn.RMSNorm(WIDTH))
    findings = found(model)
    assert findings["never-called"].severity == "danger"
    assert findings["never-called"].where == ("layers.1.norm2", "layers.1.norm1")
    assert findings["called-more-than-once"].where == ("layers.1.norm1",)


def test_a_norm_that_one_layer_leaves_out() -> None:
    findings = found(Stack([SecondNorm(True), SecondNorm(True), SecondNorm(False)], nn.RMSNorm(WIDTH)))
    assert findings["never-called"].severity == "danger"
    assert findings["never-called"].where == ("layers.2.norm2",)
    assert findings["odd-one-out"].where == ("layers.2",)


def test_a_norm_that_no_layer_calls_is_a_warning() -> None:
    report = nk.audit(Stack([SecondNorm(False), SecondNorm(False)], nn.RMSNorm(WIDTH)), ids())
    never = [f for f in report.findings if f.code == "never-called"]
    assert [f.where for f in never] == [("layers.0.norm2",), ("layers.1.norm2",)]
    assert {f.severity for f in never} == {"warning"}


def test_weights_read_by_a_function_call_are_a_call() -> None:
    class ByFunction(PreBlock):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(nn.functional.rms_norm(x, (WIDTH,), self.norm1.weight, 1e-6))
            return x + self.mlp(self.norm2(x))

    report = nk.audit(Stack([ByFunction(), ByFunction()], nn.RMSNorm(WIDTH)), ids())
    assert not [f for f in report.findings if f.code == "never-called"]
    first = next(norm for norm in report.norms if norm.name == "layers.0.norm1")
    assert (first.function, first.calls, first.positions) == (True, 1, ("branch input",))


def test_shared_module_and_tied_weight() -> None:
    shared = nn.RMSNorm(WIDTH)
    block = PreBlock()
    block.norm2 = block.norm1
    findings = found(Stack([PreBlock(), block], shared))
    assert findings["shared-module"].where == ("layers.1.norm1", "layers.1.norm2")
    assert findings["shared-module"].severity == "info"
    tied = pre()
    tied.layers[1].norm1.weight = tied.layers[0].norm1.weight
    assert set(found(tied)["tied-weights"].where) == {"layers.0.norm1.weight", "layers.1.norm1.weight"}


def test_eps_of_one_layer() -> None:
    model = pre(norm=lambda width: nn.RMSNorm(width, eps=1e-6))
    model.layers[1].norm2.eps = 1e-3
    finding = found(model)["eps-differs"]
    assert (finding.severity, finding.where) == ("danger", ("layers.1.norm2",))
    assert "0.001" in finding.what
    assert "1e-06" in finding.remedy


def test_eps_against_the_config() -> None:
    norm = lambda width: nk.RMSNorm(width, eps=1e-5)  # noqa: E731
    finding = found(pre(norm=norm, config=SimpleNamespace(rms_norm_eps=1e-6)))["eps-against-config"]
    assert finding.severity == "warning"
    assert len(finding.where) == 7
    assert "eps-against-config" not in found(pre(norm=norm, config=SimpleNamespace(rms_norm_eps=1e-5)))


def test_one_plus_doubled() -> None:
    finding = found(pre(norm=weighted(nk.GEMMA, 1.0)))["one-plus-doubled"]
    assert finding.severity == "danger"
    assert len(finding.where) == 7
    assert set(found(pre(norm=weighted(nk.GEMMA, 0.0, 0.2)))) <= HARMLESS


def test_one_plus_on_weights_that_an_initialiser_left_at_one_is_a_warning() -> None:
    finding = found(pre(norm=weighted(nk.GEMMA, 1.0, 0.0)))["one-plus-doubled"]
    assert finding.severity == "warning"


def test_one_plus_missing() -> None:
    finding = found(pre(norm=weighted(nk.LLAMA, 0.0, 0.2)))["one-plus-missing"]
    assert finding.severity == "danger"
    # The first layers of a trained model may well have small weights; they keep their sign.
    assert set(found(pre(norm=weighted(nk.LLAMA, 0.05, 0.02)))) <= HARMLESS


@pytest.mark.parametrize(("spec", "mean"), [(nk.GEMMA, 0.1), (nk.LLAMA, 0.9)])
@pytest.mark.parametrize("step", [1.0, -1.0])
def test_one_layer_off_by_one(spec: nk.NormSpec, mean: float, step: float) -> None:
    model = pre(5, norm=weighted(spec, mean))
    with torch.no_grad():
        model.layers[3].norm1.weight.add_(step)
    finding = found(model)["off-by-one"]
    assert (finding.severity, finding.where) == ("danger", ("layers.3.norm1",))
    assert finding.remedy.startswith("subtract" if step > 0 else "add")


def test_weights_that_are_not_finite() -> None:
    model = pre()
    with torch.no_grad():
        model.layers[2].norm1.weight[3] = float("nan")
    assert found(model)["weights-not-finite"].where == ("layers.2.norm1",)


class OverPositions(PreBlock):
    """Transposed before the norm and back behind it: each channel is normalised over the positions."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x.transpose(1, 2)).transpose(1, 2))
        return x + self.mlp(self.norm2(x))


class OverBoth(PreBlock):
    pass


def test_normalised_over_positions() -> None:
    blocks = [OverPositions() for _ in range(2)]
    for block in blocks:
        block.norm1 = nn.LayerNorm(TOKENS)
    finding = found(Stack(blocks, nn.RMSNorm(WIDTH)))["wrong-axis"]
    assert finding.severity == "danger"
    assert finding.where == ("layers.0.norm1", "layers.1.norm1")
    assert f"{WIDTH} channels" in finding.what


def test_normalised_over_positions_and_channels() -> None:
    blocks = [OverBoth() for _ in range(2)]
    for block in blocks:
        block.norm2 = nn.LayerNorm((TOKENS, WIDTH))
    finding = found(Stack(blocks, nn.RMSNorm(WIDTH)))["wrong-axis"]
    assert finding.where == ("layers.0.norm2", "layers.1.norm2")
    assert f"2 axes ({TOKENS * WIDTH} values)" in finding.what


class Mixer(nn.Module):
    """A norm over channels that feeds a product over tokens is right: this is what an MLP-Mixer does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens, self.channels = nn.Linear(TOKENS, TOKENS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


def test_a_mixer_is_healthy() -> None:
    assert found(Stack([Mixer(), Mixer()], nn.LayerNorm(WIDTH))) == {}


def test_two_norms_in_a_row() -> None:
    model = wired("post", norm=nn.LayerNorm)
    model.norm = nn.LayerNorm(WIDTH)
    finding = found(model)["two-in-a-row"]
    assert finding.where[1] == "norm"
    assert finding.severity == "warning"


def test_promotion_that_the_next_product_refuses() -> None:
    model = pre(norm=weighted(nk.LLAMA, 1.0), dtype=torch.bfloat16)
    for block in model.layers:
        block.norm1.float()
    report = nk.audit(model, ids())
    finding = next(f for f in report.findings if f.code == "promoted")
    assert (finding.severity, finding.where) == ("danger", ("layers.0.norm1",))
    assert "layers.0.attention.query" in report.notes[-1]


def test_promotion_that_stays_in_the_stream() -> None:
    model = wired("post", norm=weighted(nk.LLAMA, 1.0))
    for module in model.modules():
        module.to(torch.float32 if isinstance(module, nk.RMSNorm) else torch.bfloat16)

    class Casting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias)

    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Casting
        if isinstance(module, nk.RMSNorm):
            module.float()
    findings = found(model)
    assert findings["promoted"].severity == "warning"
    assert "layers.0.norm_out" in findings["promoted"].where


def test_promotion_that_is_rounded_back_is_no_finding() -> None:
    class Back(nk.RMSNorm):
        pass

    class Rounded(PreBlock):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x).to(x.dtype))
            return x + self.mlp(self.norm2(x).to(x.dtype))

    model = Stack([Rounded(weighted(nk.LLAMA, 1.0)) for _ in range(2)], nn.RMSNorm(WIDTH), dtype=torch.bfloat16)
    for block in model.layers:
        block.norm1.float()
        block.norm2.float()
    assert "promoted" not in found(model)


def test_mixed_dtypes() -> None:
    model = pre(norm=nk.RMSNorm, dtype=torch.bfloat16)
    model.layers[1].norm1.float()
    finding = found(model)["mixed-dtypes"]
    assert finding.where == ("layers.1.norm1",)


def test_weight_decay_by_name_and_by_optimizer() -> None:
    model = pre()
    report = nk.audit(model, ids())
    finding = next(f for f in report.findings if f.code == "weight-decay")
    assert "layers.0.norm1.weight" in finding.where
    assert "norm.weight" not in finding.where  # a filter on names knows this one
    everything = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    assert len(report.decayed_by(everything)[0].where) == 7
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    rest = [p for name, p in model.named_parameters() if "norm" not in name]
    grouped = torch.optim.AdamW([{"params": norms, "weight_decay": 0.0}, {"params": rest}], weight_decay=0.1)
    assert report.decayed_by(grouped) == []


def test_the_first_operator_that_overflows_is_named_and_not_the_norm() -> None:
    model = pre(dtype=torch.float16)
    with torch.no_grad():
        model.layers[1].mlp[2].bias.fill_(6e4)
        model.layers[1].mlp[2].weight.fill_(60.0)
        model.layers[1].mlp[0].bias.fill_(1e3)
    finding = found(model)["not-finite"]
    assert (finding.severity, finding.where) == ("danger", ("layers.1.mlp.2",))
    assert "layers.2.norm1" in finding.consequence


class Unsafe(nn.Module):
    """Squares in the input's dtype: float16 overflows from 256 on, and the output is 0, finite and wrong."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def test_a_norm_that_overflows_inside() -> None:
    model = Stack([PreBlock(Unsafe)], Unsafe(WIDTH), dtype=torch.float16)
    with torch.no_grad():
        model.embed.weight.fill_(300.0)
    finding = found(model)["not-finite"]
    assert finding.where == ("layers.0.norm1",)
    assert finding.what.startswith("pow")


def test_infinity_in_a_mask_is_no_overflow() -> None:
    class Masked(Attention):
        def forward(self, x: Tensor) -> Tensor:
            scores = self.query(x) @ self.key(x).transpose(1, 2)
            future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            return self.out(scores.masked_fill(future, float("-inf")).softmax(-1) @ self.value(x))

    model = Stack([PreBlock(nn.RMSNorm, Masked())], nn.RMSNorm(WIDTH), dtype=torch.float16)
    assert "not-finite" not in found(model)
    with torch.no_grad():
        model.layers[0].mlp[2].bias.fill_(6e4)
        model.layers[0].mlp[2].weight.fill_(60.0)
        model.layers[0].mlp[0].bias.fill_(1e3)
    assert found(model)["not-finite"].where == ("layers.0.mlp.2",)  # and not the mask before it


def attending(query: nn.Module | None, key: nn.Module | None, full: bool = False) -> Stack:
    return Stack([PreBlock(nn.LayerNorm, Attention(query, key, full))], nn.LayerNorm(WIDTH))


HEAD = WIDTH // HEADS


def test_query_and_key_norms_that_match_are_no_finding() -> None:
    assert set(found(attending(nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)))) <= HARMLESS
    assert set(found(attending(nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), full=True))) <= HARMLESS


class FullKey(Attention):
    def forward(self, x: Tensor) -> Tensor:
        query = self._heads(self.query(x), self.query_norm, False)
        key = self._heads(self.key(x), self.key_norm, True)
        value = self._heads(self.value(x), None, False)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def test_query_and_key_norms_of_different_width() -> None:
    block = PreBlock(nn.LayerNorm, FullKey(nn.RMSNorm(HEAD), nn.RMSNorm(WIDTH)))
    finding = found(Stack([block], nn.LayerNorm(WIDTH)))["query-key"]
    assert finding.severity == "danger"
    assert finding.where == ("layers.0.attention.query_norm", "layers.0.attention.key_norm")


@pytest.mark.parametrize(
    ("query", "key", "severity", "word"),
    [
        (nn.RMSNorm(HEAD), nn.LayerNorm(HEAD), "danger", "layer norm"),
        (nn.RMSNorm(HEAD, eps=1e-6), nn.RMSNorm(HEAD, eps=1e-3), "warning", "ε"),
        (nn.RMSNorm(HEAD), None, "warning", "the key is not"),
        (None, nn.RMSNorm(HEAD), "warning", "the query is not"),
    ],
)
def test_other_mismatches_of_query_and_key(query: Any, key: Any, severity: str, word: str) -> None:
    finding = found(attending(query, key))["query-key"]
    assert finding.severity == severity
    assert word in finding.what


class ResidualAfterNorm(PreBlock):
    """The residual is taken before the norm, or, with the flag, behind it."""

    def __init__(self, late: bool):
        super().__init__()
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = (y if self.late else x) + self.attention(y)
        return x + self.mlp(self.norm2(x))


def test_a_residual_taken_behind_the_norm_in_one_layer() -> None:
    model = Stack([ResidualAfterNorm(i == 1) for i in range(4)], nn.RMSNorm(WIDTH))
    odd = [f for f in nk.audit(model, ids()).findings if f.code == "odd-one-out"]
    assert {f.where for f in odd} == {("layers.0",), ("layers.1",)}  # what leaves layer 0 is normed, layer 1 has no pre
    assert {f.severity for f in odd} == {"warning"}


def test_a_pre_norm_stack_without_a_final_norm() -> None:
    model = pre()
    model.norm = None
    finding = found(model)["no-final-norm"]
    assert finding.severity == "warning"
    assert "no-final-norm" not in found(wired("post"))


def test_every_finding_says_what_follows_and_what_to_do() -> None:
    model = Stack([SameNormTwice(), PreBlock()], None)
    for finding in nk.audit(model, ids()).findings:
        assert finding.what
        assert finding.consequence
        assert finding.remedy
        assert finding.where


def test_identity_sublayers_tell_pre_from_post() -> None:
    """On x = [3, 4] with F the identity: x + N(x) is pre, N(x + x) is post."""
    x = torch.tensor([[3.0, 4.0]])
    for name in ("pre", "post"):
        block = nk.placement(name)(2, nn.Linear(2, 2, bias=False), norm=nn.RMSNorm)
        with torch.no_grad():
            block.sublayers[0].weight.copy_(torch.eye(2))
        report = nk.audit(nn.Sequential(block), x)
        assert [stream.wiring for stream in report.streams] == [name]


def test_feed_forward_alone_is_no_stream() -> None:
    report = nk.audit(nn.Sequential(FeedForward(), nn.LayerNorm(WIDTH)), torch.randn(2, WIDTH))
    assert report.streams == ()
    assert report.norms[0].positions == ("elsewhere",)


class SharesKeys(nn.Module):
    """A layer whose whole key path is switched off, as in models that share keys between layers."""

    def __init__(self, own: bool):
        super().__init__()
        self.norm, self.key_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), own

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        key = self.key_norm(self.key(y)) if self.own else y
        return x + self.query(y) * key.mean(1, keepdim=True)


def test_a_path_that_one_layer_switches_off_is_no_danger() -> None:
    model = Stack([SharesKeys(True), SharesKeys(True), SharesKeys(False)], nn.LayerNorm(WIDTH))
    finding = found(model)["never-called"]
    assert (finding.severity, finding.where) == ("warning", ("layers.2.key_norm",))


def test_first_and_last_layers_may_differ() -> None:
    model = pre(5, norm=weighted(nk.LLAMA, 0.5))
    with torch.no_grad():
        model.layers[4].norm1.weight.add_(1)
    assert found(model)["off-by-one"].severity == "warning"


def test_a_flattened_sequence_is_the_right_axis() -> None:
    class Flat(Stack):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.layers[0](self.embed(tokens)).flatten(1))

    model = Flat([nk.PostNorm(WIDTH, nn.Linear(WIDTH, WIDTH), norm=nn.LayerNorm)])
    model.head = nn.Linear(TOKENS * WIDTH, 5)
    assert "wrong-axis" not in found(model)


def test_one_key_head_with_norms_over_the_whole_width() -> None:
    class OneKeyHead(Attention):
        def forward(self, x: Tensor) -> Tensor:
            assert self.query_norm is not None
            assert self.key_norm is not None
            query = self.query_norm(self.query(x)).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
            key = self.key_norm(self.key(x)[..., :HEAD])[:, None].expand(-1, HEADS, -1, -1)
            value = self.value(x)[..., :HEAD][:, None].expand(-1, HEADS, -1, -1)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value)
            return self.out(mixed.transpose(1, 2).flatten(-2))

    block = PreBlock(nn.LayerNorm, OneKeyHead(nn.RMSNorm(WIDTH), nn.RMSNorm(HEAD)))
    assert "query-key" not in found(Stack([block], nn.LayerNorm(WIDTH)))


def test_a_swapped_model_is_seen_as_it_was() -> None:
    model = pre(norm=lambda width: nn.RMSNorm(width, eps=1e-5))
    before = nk.audit(model, ids())
    with nk.use("auto"), nk.swap_(model) as swapped:  # swapping for the reference is refused
        assert len(swapped.accepted) == 7
        assert nk.audit(model, ids()).to_json() == before.to_json()


def test_normalised_over_as_many_positions_as_there_are_channels() -> None:
    """Sizes cannot tell here: the axis itself must be followed through the transpose."""

    class Alone(nn.Module):
        def __init__(self, swap: bool):
            super().__init__()
            self.norm, self.mlp, self.swap = nn.LayerNorm(WIDTH), FeedForward(), swap

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x.transpose(1, 2)).transpose(1, 2) if self.swap else self.norm(x)
            return x + self.mlp(y)

    for swap in (True, False):
        assert ("wrong-axis" in found(Stack([Alone(swap), Alone(swap)]), ids(WIDTH))) is swap
