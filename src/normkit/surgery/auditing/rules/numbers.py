"""ε and dtypes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from normkit.surgery.auditing.finding import Finding
from normkit.surgery.auditing.norm import Inspection, Norm

_HALF = (torch.bfloat16, torch.float16)
_EPS_KEYS = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon",
    "rms_norm_epsilon", "layernorm_eps", "post_norm_eps", "layer_norm_eps_",
)  # fmt: skip


def eps_among_layers(seen: Inspection) -> Iterator[Finding]:
    """ε that differs between norms that do the same thing in different layers."""
    for norms in _roles(seen.norms):
        counts = Counter(n.eps for n in norms if n.eps is not None)
        if len(counts) < 2:
            continue
        usual, often = counts.most_common(1)[0]
        split = [e for e, n in counts.items() if n == often]
        if len(split) > 1:
            names = tuple(n.name for n in norms)
            yield _differs(
                "warning", names, f"ε is {_listed(counts)} in {norms[0].role}", "the right one of these values"
            )
            continue
        for eps in (e for e in counts if e != usual):
            names = tuple(n.name for n in norms if n.eps == eps)
            what = f"ε is {eps:g}; the other {often} norms of this kind have {usual:g}"
            yield _differs("danger", names, what, f"{usual:g}")


def _differs(severity: Any, names: tuple[str, ...], what: str, value: str) -> Finding:
    return Finding(
        severity, "eps-differs", names, what,
        "rows whose mean square is near ε come out at another scale than in the layers around",
        f"set ε to {value}",
    )  # fmt: skip


def eps_against_config(seen: Inspection) -> Iterator[Finding]:
    """ε that is none of the values that the model's config gives."""
    against: dict[tuple[float, str], list[Norm]] = defaultdict(list)
    for norms in _roles(seen.norms):
        wanted = config_eps(seen.nearest_config(norms[0].name))
        values = {n.eps for n in norms}
        eps = next(iter(values))
        if len(values) != 1 or eps is None or not wanted or any(_same(eps, w) for w in wanted.values()):
            continue
        against[eps, ", ".join(f"{key}={value:g}" for key, value in wanted.items())] += norms
    for (eps, said), norms in against.items():
        yield Finding(
            "warning", "eps-against-config", tuple(n.name for n in norms), f"ε is {eps:g}; the config says {said}",
            "if the checkpoint was trained with the config's value, quality is lost everywhere by a little",
            "compare with the code that trained it; some families fix this ε whatever their config says",
        )  # fmt: skip


def config_eps(config: Any) -> dict[str, float]:
    """Return the values of ε that a config gives, by key.

    Example:
        >>> from types import SimpleNamespace
        >>> config_eps(SimpleNamespace(rms_norm_eps=1e-6, hidden_size=64))
        {'rms_norm_eps': 1e-06}
    """
    values = {key: getattr(config, key, None) for key in _EPS_KEYS}
    return {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}


def promoted(seen: Inspection) -> Iterator[Finding]:
    """Half precision in, float32 out, and nobody rounds it back."""
    if seen.flow is None:
        return
    leaks: list[str] = []
    kinds: set[str] = set()
    for sighting in seen.sightings:
        out = seen.flow.nodes[sighting.out].outputs[0].dtype
        if sighting.x.dtype not in _HALF or out != torch.float32:
            continue
        consumers = [seen.flow.nodes[c] for c in seen.flow.consumers(sighting.out)]
        if consumers and all(c.op == "_to_copy" and c.out.dtype in _HALF for c in consumers):
            continue
        leaks.append(sighting.module or seen.flow.calls[sighting.call].name)
        kinds.add(str(sighting.x.dtype).removeprefix("torch."))
    if leaks:
        stopped = seen.flow.error is not None and "dtype" in str(seen.flow.error)
        yield Finding(
            "danger" if stopped else "warning", "promoted", tuple(dict.fromkeys(leaks)),
            f"gets {', '.join(sorted(kinds))} and returns float32",
            "the next matrix product refuses it: " + _first_line(seen.flow.error) if stopped
            else "what follows is float32: twice the memory, slower products, or an error where dtypes must agree",
            "keep the norm's weight in the model's dtype, or use a norm that returns its input's dtype",
        )  # fmt: skip


def mixed_dtypes(seen: Inspection) -> Iterator[Finding]:
    """Weights of one role in different dtypes."""
    for norms in _roles(seen.norms):
        counts = Counter(str(n.weight_dtype).removeprefix("torch.") for n in norms if n.weight_dtype is not None)
        if len(counts) > 1:
            rare = [n.name for n in norms if str(n.weight_dtype).removeprefix("torch.") != counts.most_common(1)[0][0]]
            yield Finding(
                "warning", "mixed-dtypes", tuple(rare), f"weights of {norms[0].role} are {_listed(counts)}",
                "layers round differently; sharded training refuses mixed dtypes in one unit",
                "cast all of them to one dtype",
            )  # fmt: skip


def _roles(norms: Sequence[Norm]) -> list[list[Norm]]:
    """Group norms that do the same thing in different layers."""
    roles: dict[tuple[object, ...], list[Norm]] = defaultdict(list)
    for norm in norms:
        roles[norm.role, norm.class_name, norm.kind, norm.function].append(norm)
    return list(roles.values())


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-3 * max(abs(a), abs(b))  # read back from float32 operators, it has float32's digits


def _listed(counts: Counter[Any]) -> str:
    parts = [f"{value:g} ({n}×)" if isinstance(value, float) else f"{value} ({n}×)" for value, n in counts.items()]
    return ", ".join(parts)


def _first_line(error: Exception | None) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
