"""One frozen value that says every convention of a norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints


@dataclass(frozen=True)
class NormSpec:
    r"""What a norm computes, down to its roundings, apart from its numbers.

    Every norm here is ``y = (x − μ) · 1/√(σ² + ε) · γ + β``. A spec fixes the conventions in which libraries and
    model families differ; ε, the axes, groups and widths are arguments, because instances of one family differ in them.

    Args:
        centered: subtract the mean (LayerNorm) or not (RMSNorm).
        statistic: ``"mean"`` of the squares; ``"unbiased"``: variance with n − 1, whether or not x itself is
            centred afterwards; ``"sum"`` of the squares, which makes the result an L2-normalised vector.
        eps: ``"inside"`` the root, ``√(σ² + ε)``; ``"outside"`` it, ``σ + ε``; or ``"max"``, ``max(‖x‖, ε)``.
        statistic_dtype: ``"float32"`` (float64 for float64 input) or ``"input"``: every intermediate in x's dtype.
        root: ``"reciprocal"`` multiplies by 1/√v, ``"divide"`` divides by √v, ``"power"`` multiplies by v^(−1/2).
        root_rounding: ``"none"``, or ``"input"``: the inverse root is rounded to x's dtype and multiplied there.
        weight: ``"none"``, ``"plain"`` γ = w, ``"one_plus"`` γ = 1 + w added in float32, or ``"one_plus_rounded"``
            γ = 1 + w rounded to w's dtype first.
        cast: ``"last"``: weight and bias act before the one rounding; ``"first"``: the normalised value is rounded to
            x's dtype, then weighted; ``"t5"``: rounded to the weight's dtype if that is a half type, then weighted.
        output: ``"input"``: the dtype of x. ``"promote"``: PyTorch's promotion of what is multiplied last.
        gate: ``"none"``; ``"before"``: the norm sees x·a(g); ``"after"``: the normalised, weighted value is
            multiplied by a(g).
        activation: a, ``"silu"`` or ``"sigmoid"``, in float32; ``"none"`` without a gate.

    Raises:
        ValueError: for a value outside these, and for combinations that cannot exist.

    Example:
        >>> LLAMA_LIKE = NormSpec(weight="plain", cast="first", output="promote")
        >>> LLAMA_LIKE.code
        'rms.mean.eps-inside.stat-float32.reciprocal.root-none.w-plain.cast-first.out-promote.gate-none'
        >>> NormSpec.from_code(LLAMA_LIKE.code) == LLAMA_LIKE
        True
    """

    centered: bool = False
    statistic: Literal["mean", "unbiased", "sum"] = "mean"
    eps: Literal["inside", "outside", "max"] = "inside"
    statistic_dtype: Literal["float32", "input"] = "float32"
    root: Literal["reciprocal", "divide", "power"] = "reciprocal"
    root_rounding: Literal["none", "input"] = "none"
    weight: Literal["none", "plain", "one_plus", "one_plus_rounded"] = "plain"
    cast: Literal["last", "first", "t5"] = "last"
    output: Literal["input", "promote"] = "input"
    gate: Literal["none", "before", "after"] = "none"
    activation: Literal["none", "silu", "sigmoid"] = "none"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed or (allowed == (True, False) and not isinstance(value, bool)):
                raise ValueError(f"NormSpec.{name}: expected one of {allowed}, got {value!r}")
        for wrong, why in self._contradictions():
            if wrong:
                raise ValueError(f"impossible NormSpec: {why}")
        # Specs are dictionary keys on the path of every call: hashing eleven fields each time would cost a microsecond.
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, name) for name in _ALLOWED)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return NormSpec.from_code, (self.code,)  # a hash of strings differs from process to process, a code does not

    def _contradictions(self) -> list[tuple[bool, str]]:
        return [
            (
                self.statistic == "sum" and self.centered,
                "statistic='sum' (an L2 norm) has no centred form; use centered=False",
            ),
            (
                self.eps == "max" and self.statistic != "sum",
                "eps='max' compares ε with ‖x‖ and needs statistic='sum'",
            ),
            (
                self.root == "power" and self.eps != "inside",
                f"root='power' raises σ² + ε to −1/2, but eps={self.eps!r}; use root='reciprocal'",
            ),
            (
                self.weight == "none" and self.cast != "last",
                f"cast={self.cast!r} says when the weight acts, but weight='none'",
            ),
            (
                self.cast == "t5" and (self.weight != "plain" or self.output != "promote"),
                "cast='t5' is defined for weight='plain', output='promote' only",
            ),
            (
                self.root == "divide" and self.root_rounding == "input",
                "root_rounding='input' rounds an inverse root; root='divide' has none",
            ),
            (
                (self.gate == "none") != (self.activation == "none"),
                "gate and activation go together: both 'none' or neither",
            ),
        ]

    @property
    def kind(self) -> Literal["layer", "rms", "l2"]:
        """``"layer"`` if centred, ``"l2"`` for sums of squares, else ``"rms"``."""
        if self.centered:
            return "layer"
        return "l2" if self.statistic == "sum" else "rms"

    @property
    def code(self) -> str:
        """A stable string for operator schemas, exports and reports; `from_code` is its inverse."""
        parts = [
            "layer" if self.centered else "rms",
            self.statistic,
            f"eps-{self.eps}",
            f"stat-{self.statistic_dtype}",
            self.root,
            f"root-{self.root_rounding}",
            f"w-{self.weight}",
            f"cast-{self.cast}",
            f"out-{self.output}",
            f"gate-{self.gate}" + ("" if self.gate == "none" else f"-{self.activation}"),
        ]
        return ".".join(parts)

    @classmethod
    def from_code(cls, code: str) -> NormSpec:
        """Rebuild a spec from its `code`.

        Raises:
            ValueError: when ``code`` is not one that `code` produces.
        """
        parts = code.split(".")
        if len(parts) != 10 or parts[0] not in ("layer", "rms"):
            raise ValueError(f"not a NormSpec code: expected ten parts such as {NormSpec().code!r}, got {code!r}")
        gate, _, activation = parts[9].removeprefix("gate-").partition("-")
        values = {
            "centered": parts[0] == "layer",
            "statistic": parts[1],
            "eps": parts[2].removeprefix("eps-"),
            "statistic_dtype": parts[3].removeprefix("stat-"),
            "root": parts[4],
            "root_rounding": parts[5].removeprefix("root-"),
            "weight": parts[6].removeprefix("w-"),
            "cast": parts[7].removeprefix("cast-"),
            "output": parts[8].removeprefix("out-"),
            "gate": gate,
            "activation": activation or "none",
        }
        spec = cls(**values)  # type: ignore[arg-type]  # __post_init__ checks every value
        if spec.code != code:
            raise ValueError(f"not a NormSpec code: {code!r} reads as {spec.code!r}")
        return spec


# Resolved once: it takes 0.3 ms, gated_rms_norm makes a spec per call, and a compiler cannot trace it.
_ALLOWED: dict[str, tuple[object, ...]] = {
    name: get_args(hint) or (True, False) for name, hint in get_type_hints(NormSpec).items()
}
