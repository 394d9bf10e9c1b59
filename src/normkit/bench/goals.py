"""What the times are held against: geometric means with their goals, the copy's shares, and where normkit loses.

The factors and the shares by cache are a CPU's; a GPU has a goal for each width, in `normkit.bench.roofline`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normkit.bench.gpu_peers import FlashAttention, Liger, Quack
from normkit.bench.measure import Measured
from normkit.bench.peers import (
    CompiledFormula,
    Copy,
    CopyAgain,
    Normkit,
    NormkitGraph,
    NormkitInto,
    OnnxRuntime,
    TorchAddRMSNorm,
    TorchLayerNorm,
    TorchRMSNorm,
)
from normkit.bench.ratios import Ratio, geometric_mean

# (pass, operator, peer) → by which factor normkit is to be faster in the geometric mean over shapes and dtypes.
SPEEDUPS = {
    ("forward", "rms", TorchRMSNorm.name): 4.0,
    ("forward", "layer", TorchLayerNorm.name): 1.5,
    ("forward", "rms", CompiledFormula.name): 2.0,
    ("forward", "layer", CompiledFormula.name): 2.0,
    ("forward", "add_rms", CompiledFormula.name): 2.0,
    ("forward", "add_rms", TorchAddRMSNorm.name): 4.0,
    ("step", "rms", TorchRMSNorm.name): 3.0,
}
# (dtype, within the last-level cache) → which share of the copy's bandwidth the kernel is to reach.
SHARES = {
    ("float32", True): 0.75,
    ("float32", False): 0.80,
    ("bfloat16", True): 0.40,
    ("bfloat16", False): 0.60,
}
# Whom normkit is nowhere to be slower than, and how much of a difference is put down to noise.
_NO_PEERS = (Normkit.name, NormkitInto.name, NormkitGraph.name, Copy.name, CopyAgain.name)
RIVALS = (
    *(TorchLayerNorm.name, TorchRMSNorm.name, TorchAddRMSNorm.name, CompiledFormula.name, OnnxRuntime.name),
    *(Liger.name, Quack.name, FlashAttention.name),
)
ALLOWED = 1.10


@dataclass(frozen=True)
class Mean:
    """How much slower a peer is than normkit, in the geometric mean over cases."""

    which: str
    op: str
    peer: str
    ratio: Ratio
    cases: int
    goal: float | None

    @property
    def reached(self) -> bool | None:
        """Say whether the goal is reached, None without one."""
        return None if self.goal is None else self.ratio.median >= self.goal


@dataclass(frozen=True)
class Share:
    """Which part of the copy's bandwidth the kernel reaches into a given output."""

    dtype: str
    cached: bool
    mean: float
    lowest: float
    where: str
    cases: int
    goal: float | None

    @property
    def reached(self) -> bool | None:
        """Say whether every case reaches the goal, None without one."""
        return None if self.goal is None else self.lowest >= self.goal


@dataclass(frozen=True)
class Loss:
    """A case in which a peer is faster than normkit by more than noise is allowed."""

    measured: Measured
    peer: str
    ratio: Ratio


def means(run: Sequence[Measured]) -> list[Mean]:
    """Return the geometric means, a line for each pass, operator and peer."""
    found: dict[tuple[str, str, str], list[Sequence[float]]] = {}
    for measured in run:
        for name, samples in measured.samples.items():
            base = measured.samples.get(measured.base(name))
            if base is None or name in _NO_PEERS:
                continue
            ratios = [a / b for a, b in zip(samples.seconds, base.seconds, strict=True)]
            found.setdefault((measured.case.which, measured.case.op, name), []).append(ratios)
    speedups = {} if any(measured.case.gpu for measured in run) else SPEEDUPS
    return [
        Mean(*key, ratio=geometric_mean(columns), cases=len(columns), goal=speedups.get(key))
        for key, columns in found.items()
    ]


def shares(run: Sequence[Measured], cache: int | None) -> list[Share]:
    """Return a CPU's shares of the copy's bandwidth, by dtype and by whether the data fit ``cache`` bytes."""
    found: dict[tuple[str, bool], list[tuple[float, str]]] = {}
    for measured in run:
        if NormkitInto.name in measured.samples and not measured.case.gpu:
            within = cache is None or measured.case.moved <= cache
            entry = (measured.share(NormkitInto.name).median, f"{measured.case.op} {measured.case.shape}")
            found.setdefault((measured.case.dtype, within), []).append(entry)
    result: list[Share] = []
    for (dtype, within), entries in found.items():
        lowest, where = min(entries)
        mean = math.exp(math.fsum(math.log(value) for value, _ in entries) / len(entries))
        result.append(Share(dtype, within, mean, lowest, where, len(entries), SHARES.get((dtype, within))))
    return result


def losses(run: Sequence[Measured]) -> list[Loss]:
    """Return where normkit is slower than a rival by more than the allowed noise, the worst first."""
    found: list[Loss] = []
    for measured in run:
        for name in RIVALS:
            ratio = measured.ratio(name)
            if ratio is not None and ratio.median * ALLOWED < 1 and ratio.differs(measured.noise.again):
                found.append(Loss(measured, name, ratio))
    return sorted(found, key=lambda loss: loss.ratio.median)


def last_level_cache() -> int | None:
    """Return the bytes of the first core's largest cache, or None where the system does not say."""
    sizes: list[int] = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        except OSError:
            continue
        if match is not None:
            sizes.append(int(match.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[match.group(2)])
    return max(sizes, default=None)
