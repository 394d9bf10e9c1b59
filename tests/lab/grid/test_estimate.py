import torch
from torch import nn

from normkit.lab.corpus import CONTEXT
from normkit.lab.grid.estimate import available_bytes, cost, process_bytes
from normkit.lab.grid.options import Grid

GRID = Grid(wirings=("pre",), norms=("rms",), rows=2)


def test_what_a_step_keeps_for_its_backward_is_counted_once_and_weights_are_not():
    net = nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256, bias=False))
    net.register_parameter("idle", nn.Parameter(torch.zeros(1000), requires_grad=False))
    windows = torch.randint(0, 256, (3, 2, CONTEXT + 1))
    found = cost(net, GRID, windows, "cpu")
    bytes_in = 2 * CONTEXT
    kept = {
        "the embedded bytes, for the linear map's gradient": bytes_in * 4 * 4,
        "the bytes themselves, a view of all windows": 3 * 2 * (CONTEXT + 1) * 8,
        "ln softmax of the logits": bytes_in * 256 * 4,
        "the bytes to predict, copied": bytes_in * 8,
        "the sum of weights that the mean was divided by": 4,
    }
    assert found.saved == sum(kept.values())
    weights = 256 * 4
    assert found.parameters == 2 * weights + 1000
    assert found.state == 4 * (2 * weights * 4 + 1000)  # what is frozen has neither gradient nor moments
    assert found.run > GRID.steps * found.step > 0


def test_memory_is_told_in_plausible_bytes():
    assert 50 * 2**20 < process_bytes() < 2**36
    free = available_bytes("cpu")
    assert free is None or free > 0
