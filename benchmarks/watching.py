"""What `nk.watch` costs: training steps of a Transformer of width 512, watched and not, within the same rounds.

python benchmarks/watching.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk
from normkit.bench.timing import Contender, interleave

WIDTH, HEADS, DEPTH, TOKENS = 512, 8, 4, 256


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def model() -> nn.Module:
    blocks: list[nn.Module] = []
    for _ in range(DEPTH):
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        blocks += [nk.PreNorm(WIDTH, Attention()), nk.PreNorm(WIDTH, nn.Sequential(up, nn.GELU(), down))]
    return nn.Sequential(*blocks, nk.RMSNorm(WIDTH))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    torch.manual_seed(0)
    plain, watched = model(), model()
    watched.load_state_dict(plain.state_dict())
    x = torch.randn(2, TOKENS, WIDTH)

    def step(net: nn.Module) -> object:
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    with nk.watch(watched):
        step(watched)  # the audit, once
        pair = [Contender("plain", lambda: step(plain)), Contender("watched", lambda: step(watched))]
        # The watch sees attention of any model in this thread, so both run inside; hooks are on one of the two.
        found = interleave(pair, rounds, seed=0)
    ratios = [b / a for a, b in zip(found["plain"].seconds, found["watched"].seconds, strict=True)]
    middle = statistics.median(found["plain"].seconds)
    print(f"width {WIDTH}, {DEPTH} layers, 2 × {TOKENS} tokens, {torch.get_num_threads()} threads, {rounds} rounds")
    ratio = statistics.median(ratios)
    print(f"a step {1e3 * middle:.1f} ms; watched {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
