"""Chunks cover every valid position once, in order, and each level joins neighbours, a limited number at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normkit.kernels.cpu.chunks import FAN, Chunks, chunks_of, even_chunks, listed_chunks


def joined_to(chunks: Chunks) -> list[list[int]]:
    """Return the chunks of every segment, by following the levels."""
    found = [[i] for i in range(len(chunks.begins))]
    for bounds in chunks.levels:
        pairs = list(zip(bounds.tolist(), bounds.tolist()[1:], strict=False))
        assert all(0 <= b - a <= FAN for a, b in pairs)
        assert (pairs[0][0], pairs[-1][1]) == (0, len(found))
        found = [[i for part in found[a:b] for i in part] for a, b in pairs]
    return found


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [[5], [0], [64], [65, 0, 1], [0, 0], [3, 200, 64, 0, 129], [64 * 300 + 5, 7], [1] * 400, [64 * 128 * 130]],
)
def test_every_position_once_and_in_order(lengths: list[int], joined: bool):
    chunks = chunks_of(torch.tensor(lengths), 64, joined)
    spans = list(zip(chunks.begins.tolist(), chunks.counts.tolist(), strict=True))
    assert all(0 < count <= 64 for _, count in spans)
    positions = [(begin, begin + count) for begin, count in spans]
    assert [a for a, _ in positions] == [0, *(b for _, b in positions)][: len(positions)]
    assert sum(count for _, count in spans) == sum(lengths)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    assert all(not a < end < b for end in ends for a, b in positions)
    segments = joined_to(chunks)
    sizes: Tensor = torch.tensor([sum(spans[i][1] for i in segment) for segment in segments])
    assert sizes.tolist() == chunks.sizes.tolist() == ([sum(lengths)] if joined else lengths)
    assert [i for segment in segments for i in segment] == list(range(len(spans)))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.7, 1.0])
@pytest.mark.parametrize(
    ("runs", "length", "chunk"), [(1, 5, 64), (3, 200, 64), (7, 64, 64), (2, 64 * (FAN + 2), 64), (300, 3, 2)]
)
def test_the_kernel_lists_what_operators_would(runs: int, length: int, chunk: int, share: float, joined: bool):
    flags = torch.rand(runs, length, generator=torch.Generator().manual_seed(runs)) < share
    listed, chunks = listed_chunks(flags, runs, length, chunk, joined)
    assert torch.equal(listed, flags.view(-1).nonzero().view(-1))
    expected = chunks_of(flags.sum(1), chunk, joined)
    assert torch.equal(chunks.begins, expected.begins)
    assert torch.equal(chunks.counts, expected.counts)
    assert torch.equal(chunks.sizes, expected.sizes)
    assert len(chunks.levels) == len(expected.levels)
    assert all(map(torch.equal, chunks.levels, expected.levels))


def test_single_chunks_are_joined_to_nothing():
    assert even_chunks(7, 64, 64, False).levels == ()
    assert len(even_chunks(7, 65, 64, False).levels) == 1
    assert len(even_chunks(1, 64 * FAN, 64, False).levels) == 1
    assert len(even_chunks(1, 64 * FAN + 1, 64, False).levels) == 2


def test_launching_and_compiled_code_agree_on_sizes():
    """They stand twice, because what launches a kernel must not import what only compiling needs."""
    from normkit.kernels.cpu import chunks, column_launch, columns, merges, runs

    assert (chunks.FAN, chunks.CHUNK, chunks.RUN) == (merges.FAN, columns.CHUNK, runs.RUN)
    assert column_launch.BLOCK == columns.BLOCK
