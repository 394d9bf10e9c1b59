"""Text to train on and models of one's own, small enough for a run to take a fraction of a second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

MODELS = '''
"""Models that somebody might bring, good ones and bad ones."""

import os
from types import SimpleNamespace

import torch
from torch import nn

import normkit as nk


class Net(nn.Module):
    def __init__(self, wrap=lambda logits: logits, width=8):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.mix = nk.PreNorm(width, nn.Linear(width, width))
        self.norm = nk.RMSNorm(width)
        self.head = nn.Linear(width, 256)
        self.wrap = wrap

    def forward(self, tokens):
        return self.wrap(self.head(self.norm(self.mix(self.embed(tokens)))))


def logits_only():
    return Net()


def in_a_tuple():
    return Net(lambda logits: (logits, None))


def in_a_dict():
    return Net(lambda logits: {"loss": None, "logits": logits})


def in_an_object():
    return Net(lambda logits: SimpleNamespace(logits=logits))


class Overflowing(Net):
    """A branch that leaves half precision's range, and is mended before the logits: only a watch sees it."""

    def __init__(self):
        super().__init__()
        self.side = nk.RMSNorm(8)

    def forward(self, tokens):
        side = self.side((self.embed(tokens) * 1e6).half()).float().nan_to_num()
        return super().forward(tokens) + 0 * side.mean(-1, keepdim=True)


def overflowing():
    return Overflowing()


class Lost(Net):
    """Its process ends in the middle of a run, if it is rank 1 and a file says so."""

    def forward(self, tokens):
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == 15 and os.environ.get("RANK") == "1" and os.path.exists("lose"):
            os._exit(7)
        return super().forward(tokens)


def lost():
    return Lost()


def nan():
    return Net(lambda logits: logits * float("nan"))


def narrow():
    return Net(lambda logits: logits[..., :100])


def time_first():
    return Net(lambda logits: logits.transpose(0, 1))


def whole_numbers():
    return Net(lambda logits: logits.long())


def no_logits():
    return Net(lambda logits: {"scores": logits})


def nothing():
    return Net(lambda logits: None)


def detached():
    return Net(lambda logits: logits.detach())


def not_causal():
    return Net(lambda logits: logits + logits.mean(1, keepdim=True))


def raising():
    net = Net()
    net.mix = nn.Linear(5, 5)
    return net


def frozen():
    return Net().requires_grad_(False)


def a_number():
    return 3


def failing():
    raise RuntimeError("no weights here")


_ONE = Net()


def the_same():
    return _ONE


COUNT = [0]


def unseeded():
    net = Net()
    COUNT[0] += 1
    net.head.bias.data += COUNT[0]
    return net
'''


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Letters, each its predecessor's successor three times in four: much to learn from one byte of context."""
    g = torch.Generator().manual_seed(0)
    jump = torch.where(torch.rand(200_000, generator=g) < 0.75, 1, torch.randint(0, 8, (200_000,), generator=g))
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_bytes(bytes((jump.cumsum(0) % 8 + ord("a")).tolist()))
    return path


@pytest.fixture(scope="session")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of ``brought_models.py``."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "brought_models.py").write_text(MODELS)
    return folder
