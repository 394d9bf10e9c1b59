"""Norms that nobody here wrote: the classes of the installed transformers, identified, swapped, compared.

The quick test takes the families whose arithmetic differs; `make test-slow` takes every class and prints the table.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.surgery.candidates import aligned
from normkit.surgery.findings import name_of
from normkit.testing.ulp import ulp
from rows import randn

pytest.importorskip("transformers", reason="transformers is not installed (pip install normkit[hf])")
from surgery import hub_classes

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = ((F32, F32), (BF16, BF16), (F16, F16), (BF16, F32))
SCALES = (1e-3, 1.0, 30.0)
# Class → its spec (the first of its class of equals), or its reason. One family stands for all with the same code.
EXPECTED = {
    "llama.LlamaRMSNorm": "LLAMA",
    "llama4.Llama4TextL2Norm": "WEIGHTLESS_RMS",  # called L2
    "olmo2.Olmo2RMSNorm": "TORCH_RMS_NORM",
    "helium.HeliumRMSNorm": "TORCH_RMS_NORM",
    "gemma.GemmaRMSNorm": "GEMMA",
    "gemma4.Gemma4RMSNorm": "TORCH_RMS_NORM",  # a power, which no input tells from a root here
    "t5.T5LayerNorm": "T5",  # called LayerNorm
    "imagegpt.ImageGPTLayerNorm": "IMAGE_GPT",
    "cohere.CohereLayerNorm": "TORCH_LAYER_NORM",
    "deberta.DebertaLayerNorm": "DEBERTA",
    "olmo.OlmoLayerNorm": "OLMO",
    "nemotron.NemotronLayerNorm1P": "NEMOTRON",
    "convnext.ConvNextLayerNorm": "TORCH_LAYER_NORM",
    "mamba2.MambaRMSNormGated": "MAMBA2",
    "qwen3_next.Qwen3NextRMSNormGated": "QWEN3_NEXT_GATED",
    "kimi_linear.KimiLinearRMSNormGated": "KIMI_GATED",
    "deepseek_v4.DeepseekV4UnweightedRMSNorm": "ROUNDED_ROOT_RMS",
    "muse_spark.MuseSparkTextCenteredRMSNorm": "MUSE_SPARK",
    "muse_spark.MuseSparkTextInputScaledRMSNorm": "scales x before its statistic is taken",
    "hy_v4.HYV4UnweightedRMSNorm": "it returns shape (4, 4, 1)",
    "voxtral_realtime.VoxtralRealtimeTextAdaRmsNorm": "contains modules",  # no norm at all
    "detr.DetrFrozenBatchNorm2d": "affine in x, element by element",
}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_each_arithmetic_is_known(name: str) -> None:
    family, _, wanted = name.partition(".")
    modules = [m for m in hub_classes.families() if m.startswith(f"transformers.models.{family}.")]
    kinds = {k.__name__: k for k in hub_classes.classes(modules)}
    if wanted not in kinds:
        pytest.skip(f"this transformers has no {wanted}")
    found = nk.identify(hub_classes.build(kinds[wanted]))
    told = name_of(found.spec) if isinstance(found, nk.Identified) else found.reason
    assert EXPECTED[name] in told, found


@dataclass
class Line:
    """One distinct piece of code, and everybody who has it."""

    outcome: str
    names: list[str]
    norm: bool
    accepted: bool
    elsewhere: tuple[str, ...] = ()
    worst: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def judged(module: nn.Module, name: str) -> Line:
    """Swap one module and hold it to its own forward in every dtype and scale."""
    own = copy.deepcopy(module)
    report = nk.swap_(module)
    if not report.accepted:
        reason = report.rejected[0].reason if report.rejected else "passed over"
        found = nk.identify(own)
        norm = isinstance(found, nk.Identified) or found.statistic
        return Line(reason, [name], norm, accepted=False)
    entry = report.accepted[0]
    if entry.name:  # a norm inside of something else
        return Line(f"{entry.spec} inside", [name], norm=False, accepted=True)
    line = Line(entry.spec, [name], norm=True, accepted=True, elsewhere=entry.elsewhere)
    for x_dtype, held in CASES:
        ours, theirs = copy.deepcopy(module).to(held), copy.deepcopy(own).to(held)
        for scale in SCALES:
            compare(line, entry, ours, theirs, x_dtype, scale)
    return line


def compare(line: Line, entry: object, ours: nn.Module, own: nn.Module, dtype: torch.dtype, scale: float) -> None:
    found, plan = entry.found, entry.plan  # type: ignore[attr-defined]
    shape = (200, *found.evidence.shape[1:])
    inputs = [(randn(*shape, seed=77) * scale).to(dtype)]
    if found.spec.gate != "none":
        inputs.append(randn(*shape, seed=78).to(dtype))
    try:
        expected = own(*inputs).detach()
    except RuntimeError:
        with pytest.raises(RuntimeError):  # what it refuses it goes on refusing
            ours(*inputs)
        return
    got = ours(*inputs).detach()
    case = f"{str(dtype)[6:]}/{str(next(own.parameters(), inputs[0]).dtype)[6:]} at {scale:g}"
    if got.dtype != expected.dtype:
        line.wrong.append(f"{case}: {got.dtype}, not {expected.dtype}")
        return
    half = expected.dtype if expected.dtype != F32 else dtype if found.spec.cast == "first" else F32
    unit = ulp(torch.maximum(expected.double().abs(), sizes(own, found, plan, inputs[0])), half)
    steps = float(((got.double() - expected.double()).abs() / unit).max())
    same = float((got == expected).double().mean())
    # Two float32 results differ by at most the sum of their bounds: (k + 3)/2 + 6 roundings each (see tests/rows.py),
    # of which one is half an ULP of a number just above a power of two, a whole one just below.
    allowed = 2.0 * ((64 + 3) / 2 + 6) if half == F32 else 1.0
    if half != F32 and (found.spec.cast != "last" or found.spec.gate == "after"):
        allowed = 2.0
    line.worst[str(half)[6:]] = max(line.worst.get(str(half)[6:], 0.0), steps)
    if steps > allowed or (half != F32 and same < 0.995):
        line.wrong.append(f"{case}: {steps:.2f} ULP, {same:.2%} identical")


def sizes(own: nn.Module, found: nk.Identified, plan: object, x: Tensor) -> Tensor:
    """Return at what size an element's rounding is measured: |γ| where a mean was subtracted, |β|, else itself."""
    total = torch.zeros((), dtype=torch.float64)
    if found.spec.centered:
        w = None if found.weight is None else getattr(own, found.weight).detach().double()
        gain = torch.ones((), dtype=torch.float64) if w is None else w + (found.spec.weight != "plain")
        total = total + (gain if w is None else aligned(gain, x, plan.coverage)).abs()  # type: ignore[attr-defined,union-attr]
    if found.bias is not None:
        total = total + aligned(getattr(own, found.bias).detach().double(), x, plan.coverage).abs()  # type: ignore[attr-defined,union-attr]
    return total


@pytest.mark.slow
def test_every_norm_class(capsys: pytest.CaptureFixture[str]) -> None:
    lines: dict[object, Line] = {}
    unbuilt: Counter[str] = Counter()
    for kind in hub_classes.classes(hub_classes.families()):
        name = f"{kind.__module__.split('.')[2]}.{kind.__name__}"
        try:
            module = hub_classes.build(kind)
        except hub_classes.NotBuiltError as why:
            unbuilt[str(why).splitlines()[0][:60]] += 1
            continue
        key = hub_classes.code_of(module)
        if key in lines:
            lines[key].names.append(name)
        else:
            lines[key] = judged(module, name)
    merged: dict[tuple[str, bool], list[Line]] = defaultdict(list)
    for line in lines.values():
        merged[line.outcome, line.accepted].append(line)
    wrong = {n: line.wrong for line in lines.values() for n in line.names if line.wrong}
    norms = [line for line in lines.values() if line.norm and "gated norms have no kernel" not in line.outcome]
    accepted, total = sum(len(x.names) for x in norms if x.accepted), sum(len(x.names) for x in norms)
    with capsys.disabled():
        told = f"{accepted} of {total} classes that are norms with a kernel swapped, {len(wrong)} wrong"
        sys.stdout.write("\n".join(["", *table(merged, unbuilt), told, ""]))
    assert wrong == {}
    assert total >= 240
    assert accepted >= 0.95 * total, f"{accepted} of {total}"


def table(merged: dict[tuple[str, bool], list[Line]], unbuilt: Counter[str]) -> Iterator[str]:
    yield f"{'classes':>7}  {'code':>4}  outcome; largest distance in ULP by the dtype that is rounded to"
    order = sorted(merged.items(), key=lambda item: (not item[0][1], -sum(len(line.names) for line in item[1])))
    for (outcome, accepted), same in order:
        names = [n for line in same for n in line.names]
        worst: dict[str, float] = {}
        for line in same:
            worst |= {d: max(v, worst.get(d, 0.0)) for d, v in line.worst.items()}
        distances = ", ".join(f"{d} {v:.2f}" for d, v in worst.items())
        elsewhere = f"; {'; '.join(sorted({e for line in same for e in line.elsewhere}))}" if accepted else ""
        told = f"swapped: {outcome} ({distances}){elsewhere}" if accepted else f"left alone: {outcome}"
        yield f"{len(names):>7}  {len(same):>4}  {told}  [{names[0]}{', …' if len(names) > 1 else ''}]"
    yield f"{sum(unbuilt.values()):>7}        not built standalone: {dict(unbuilt.most_common(6))}, …"
