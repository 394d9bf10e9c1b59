"""Every code block of the article, and its counterpart here under the article's own assertion."""

import pytest
import torch
from torch import Tensor, nn

import normkit as nk

U = 2.0**-24


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_residual_stream_grows_with_the_root_of_depth() -> None:
    """Block 1: 64 sublayers whose output is noise of .1.

    Var(x_64) = 1 + 64 · .01 = 1.64. A variance from n = 524,288 numbers has a relative spread of √(2/n) = .2 %; 1 % is
    five of those.
    """

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.randn_like(x) * 0.1

    x, step = torch.randn(8, 128, 512), nk.PreNorm(512, Noise())
    stds = [float(x.std())]
    with torch.no_grad():
        for _ in range(64):
            x = step(x)
            stds.append(float(x.std()))
    for layers in (1, 16, 64):
        assert stds[layers] == pytest.approx((1 + 0.01 * layers) ** 0.5, rel=0.01)
    # What a sublayer reads keeps its scale: the other half of the block's point.
    assert step.norm_in is not None
    assert float(step.norm_in(x).detach().std()) == pytest.approx(1, rel=0.01)


class ArticleBatchNorm(nn.Module):
    """Block 2, put in our words: statistics over (N, L), a running mean and an unbiased running variance."""

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            mean, var = self.get_buffer("running_mean"), self.get_buffer("running_var")
        else:
            mean, var = x.mean((0, 1)), x.var((0, 1), correction=0)
            new = {"running_mean": mean, "running_var": x.var((0, 1), correction=1)}
            with torch.no_grad():
                for name, value in new.items():
                    buffer = self.get_buffer(name)
                    buffer.copy_((1 - self.momentum) * buffer + self.momentum * value)
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


def test_batch_norm_with_running_statistics() -> None:
    theirs, ours = ArticleBatchNorm(8), nk.BatchNorm(8)
    with torch.no_grad():
        theirs.weight.normal_()
        theirs.bias.normal_()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    lengths = (16, 5, 30, 9)
    for step, length in enumerate(lengths):
        x = torch.randn(4, length, 8) * (step + 1) + step
        one, other = (x.clone().requires_grad_() for _ in range(2))
        y, want = ours(one), theirs(other)
        # Two float32 sums of at most n = 120 numbers apart, each n·u off: outputs up to 5, at most 4 with the weight.
        assert (y - want).abs().max() <= 2 * 120 * U * 20
        dy = torch.randn_like(y)
        y.backward(dy)
        want.backward(dy)
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).abs().max() <= 2 * 240 * U * 20
        for name in ("running_mean", "running_var"):
            mine = ours.get_buffer(name)
            assert (mine - theirs.get_buffer(name)).abs().max() <= 2 * len(lengths) * 120 * U * float(mine.abs().max())
    x = torch.randn(2, 3, 8) + 5
    assert (ours.eval()(x) - theirs.eval()(x)).abs().max() <= 2 * len(lengths) * 120 * U * 20
    assert int(ours.get_buffer("num_batches_tracked")) == len(lengths)


@pytest.mark.parametrize("mu", [0.0, 2.0])
def test_padding_shifts_statistics_unless_masked(mu: float) -> None:
    """Block 3. Half zeros halve mean and second moment: var' = var/2 + mean²/4. At μ = 0 only the variance shows it."""
    x = torch.randn(4, 16, 8) + mu
    padded = torch.cat([x, torch.zeros(4, 16, 8)], dim=1)
    clean, dirty = nk.moments(x, axes=(0, 1)), nk.moments(padded, axes=(0, 1))
    slack = 128 * U * 8  # sums of at most 128 numbers of at most 8 in square root
    mean = clean.mean + clean.remainder
    assert (dirty.mean + dirty.remainder - mean / 2).abs().max() <= slack
    assert (dirty.variance() - (clean.variance() / 2 + mean.square() / 4)).abs().max() <= slack * 8
    mask = torch.arange(32).expand(4, 32) < 16
    real = nk.moments(padded, axes=(0, 1), mask=mask.unsqueeze(-1))
    assert (real.mean + real.remainder - mean).abs().max() <= slack
    assert (real.variance() - clean.variance()).abs().max() <= slack * 8
    norm = nk.BatchNorm(8)
    assert (norm(padded, mask)[:, :16] - nk.BatchNorm(8)(x)).abs().max() <= 2 * 64 * U * 8
    assert (norm(padded)[:, :16] - nk.BatchNorm(8)(x)).abs().max() > 0.1


def test_layer_norm_against_torch() -> None:
    """Blocks 4 and 5."""
    x = torch.randn(4, 16, 768)
    assert torch.allclose(nk.LayerNorm(768)(x), nn.LayerNorm(768)(x), atol=1e-6)
    assert nk.LayerNorm(768).eps == 1e-5


def test_rms_norm_against_torch() -> None:
    """Blocks 6 and 7: ε given on both sides, since the defaults differ."""
    x = torch.randn(4, 16, 768)
    assert torch.allclose(nk.RMSNorm(768, eps=1e-6)(x), nn.RMSNorm(768, eps=1e-6)(x), atol=1e-6)
    assert nk.RMSNorm(768).eps == 1e-6
    assert nk.RMSNorm(768, dtype=torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_articles_rms_norm_is_the_default_convention(kind: torch.dtype) -> None:
    """Block 6 computes in float32, weighs in float32 and rounds once: our default, not LLAMA's two roundings."""
    x, weight = torch.randn(64, 768).to(kind), torch.randn(768).to(kind)
    wide = x.float()
    article = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight).to(kind)
    off = (nk.rms_norm(x, weight) - article).abs() > (768 / 2 + 8) * 2 * U * article.abs()
    # In bfloat16 a float32 difference of its last bits flips a rounding about once in 2^16 / 8 elements.
    assert float(off.float().mean()) <= (0 if kind == torch.float32 else 1e-3)
    llama = nk.rms_norm(x, weight, spec=nk.LLAMA)
    assert kind == torch.float32 or float((llama != article).float().mean()) > 0.05


@pytest.mark.parametrize("name", ["post", "pre"])
def test_blocks(name: str) -> None:
    """Block 8: the two wirings differ in the order of one line."""
    sublayer, norm, x = nn.Linear(32, 32), nn.RMSNorm(32), torch.randn(2, 5, 32)
    block = nk.placement(name)(32, sublayer, norm=nn.RMSNorm)
    assert torch.equal(block(x), norm(x + sublayer(x)) if name == "post" else x + sublayer(norm(x)))
    ours = nk.placement(name)(32, sublayer)  # our norm and its ε of 1e-6 against torch's 1.2e-7
    assert (ours(x) - block(x)).abs().max() < 1e-5


def test_qk_norm_between_projection_and_rope() -> None:
    """Block 9: two more lines in attention, both before the rotation."""
    B, L, H, D = 2, 6, 4, 8
    q_proj, k_proj, x = nn.Linear(32, H * D), nn.Linear(32, H * D), torch.randn(B, L, 32)
    norm = nk.QKNorm(D, H)
    with torch.no_grad():
        norm.q_norm.weight.normal_()  # type: ignore[union-attr]
        norm.k_norm.weight.normal_()  # type: ignore[union-attr]
    q, k = norm(q_proj(x).view(B, L, H, D), k_proj(x).view(B, L, H, D))
    for got, proj, part in ((q, q_proj, norm.q_norm), (k, k_proj, norm.k_norm)):
        single = nk.RMSNorm(D)
        single.load_state_dict(part.state_dict(), strict=True)
        assert torch.equal(got, single(proj(x).view(B, L, H, D)))
