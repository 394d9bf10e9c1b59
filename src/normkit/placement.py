"""Where norms sit around a residual stream: one table, and the modules made from its rows.

Every wiring here is one formula with parts switched on or off,

    x ← N_out( α·x + N_branch( Σ F( N_in(x) ) ) ),

so a row of the table says which norms exist, what scales the stream, how weights are initialised and whether the
stack needs a norm at its end. Modules, docs, diagrams and the lab all read the row; adding a wiring is adding a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.kernels.rounding import keep_rounded, round_to
from normkit.kernels.statistics import accumulation_dtype
from normkit.modules import RMSNorm
from normkit.modules.parameters import check_width

Architecture = Literal["encoder-only", "decoder-only", "encoder-decoder/encoder", "encoder-decoder/decoder"]


@dataclass(frozen=True)
class Constants:
    """α scales the residual stream before the sum; β is the gain of the named weights at initialisation."""

    alpha: float = 1.0
    beta: float = 1.0


def unscaled(depth: int, architecture: Architecture = "decoder-only", *, other_depth: int | None = None) -> Constants:
    """Return α = β = 1 at every depth."""
    return Constants()


def deepnorm_constants(
    depth: int, architecture: Architecture = "decoder-only", *, other_depth: int | None = None
) -> Constants:
    r"""Return DeepNorm's α and β.

    With N encoder and M decoder layers (a layer is two or, in a decoder with cross-attention, three sublayers):

    ==========================  =======================  =========================
    part                        α                        β
    ==========================  =======================  =========================
    encoder-only                (2N)^(1/4)               (8N)^(−1/4)
    decoder-only                (2M)^(1/4)               (8M)^(−1/4)
    encoder of encoder-decoder  0.81·(N⁴M)^(1/16)        0.87·(N⁴M)^(−1/16)
    decoder of encoder-decoder  (3M)^(1/4)               (12M)^(−1/4)
    ==========================  =======================  =========================

    For a stack of one kind they satisfy 2N · 2β²/α² = 1, which bounds the first update of the whole stack.

    Args:
        depth: layers of the part asked for.
        architecture: which part.
        other_depth: for ``"encoder-decoder/encoder"``, the decoder's layers (default: as many).

    Raises:
        ValueError: for a depth below 1 or an unknown architecture.

    Source: DeepNet, arXiv 2203.00555, table of α and β.

    Example:
        >>> c = deepnorm_constants(12, "encoder-only")
        >>> round(c.alpha, 4), round(c.beta, 4)
        (2.2134, 0.3195)
    """
    other = depth if other_depth is None else other_depth
    if depth < 1 or other < 1:
        raise ValueError(f"deepnorm_constants: depth counts layers and must be at least 1, got {min(depth, other)}")
    if architecture in ("encoder-only", "decoder-only"):
        return Constants((2 * depth) ** 0.25, (8 * depth) ** -0.25)
    if architecture == "encoder-decoder/encoder":
        return Constants(0.81 * (depth**4 * other) ** (1 / 16), 0.87 * (depth**4 * other) ** (-1 / 16))
    if architecture == "encoder-decoder/decoder":
        return Constants((3 * depth) ** 0.25, (12 * depth) ** -0.25)
    raise ValueError(
        f"deepnorm_constants: unknown architecture {architecture!r}; one of 'encoder-only', 'decoder-only', "
        "'encoder-decoder/encoder', 'encoder-decoder/decoder'"
    )


@dataclass(frozen=True)
class InitRule:
    """Which weights are initialised with gain β instead of 1, in words and by role.

    Roles are ``"query"``, ``"key"``, ``"value"``, ``"output"``, ``"gate"``, ``"up"``, ``"down"``.
    """

    text: str
    scaled: frozenset[str] = frozenset()


_AS_IS = InitRule("the model's own initialisation")


@dataclass(frozen=True)
class Wiring:
    """A row of the table.

    Args:
        name: what `placement` and the lab call it.
        class_name: its module's class.
        before: a norm on the sublayer's input.
        branch: a norm on the sublayer's output, before the sum.
        after: a norm on the sum.
        parallel: one norm feeds several sublayers whose outputs are summed.
        final_norm: the stream leaves the stack unnormalised, so the head needs a norm before it.
        constants: (depth, architecture, *, other_depth=None) → α, β.
        init: which weights β scales.
        source: where it comes from.
        used_by: models that use it.
    """

    name: str
    class_name: str
    final_norm: bool
    source: str
    used_by: str
    before: bool = False
    branch: bool = False
    after: bool = False
    parallel: bool = False
    scaled_residual: bool = False
    constants: Callable[..., Constants] = unscaled
    init: InitRule = _AS_IS

    @property
    def formula(self) -> str:
        """The update of the stream in one line, e.g. ``x ← x + F(N(x))``; repeated Ns are separate norms."""
        inner = "N(x)" if self.before else "x"
        branch = f"F₁({inner}) + F₂({inner})" if self.parallel else f"F({inner})"
        branch = f"N({branch})" if self.branch else branch
        total = f"{'α·x' if self.scaled_residual else 'x'} + {branch}"
        return f"x ← N({total})" if self.after else f"x ← {total}"


WIRINGS: dict[str, Wiring] = {
    row.name: row
    for row in (
        Wiring(
            name="pre",
            class_name="PreNorm",
            before=True,
            final_norm=True,
            source="Xiong et al. 2020, arXiv 2002.04745",
            used_by="GPT-2, Llama, Mistral, Qwen, DeepSeek",
        ),
        Wiring(
            name="post",
            class_name="PostNorm",
            after=True,
            final_norm=False,
            source="Vaswani et al. 2017, arXiv 1706.03762",
            used_by="the original Transformer, BERT, BART",
        ),
        Wiring(
            name="deepnorm",
            class_name="DeepNorm",
            after=True,
            final_norm=False,
            scaled_residual=True,
            constants=deepnorm_constants,
            init=InitRule(
                "Xavier; gain β on value, output and both feed-forward weights, gain 1 on query and key. A gated "
                "feed-forward's gate keeps gain 1, so that the sublayer still scales by β².",
                frozenset({"value", "output", "up", "down"}),
            ),
            source="Wang et al. 2022, arXiv 2203.00555",
            used_by="DeepNet, GLM-130B",
        ),
        Wiring(
            name="sandwich",
            class_name="SandwichNorm",
            before=True,
            branch=True,
            final_norm=True,
            source="Ding et al. 2021 (CogView), arXiv 2105.13290; Kim et al. 2025 (Peri-LN), arXiv 2502.02732",
            used_by="CogView, Gemma 2 and 3, GLM-4",
        ),
        Wiring(
            name="reordered",
            class_name="ReorderedNorm",
            branch=True,
            final_norm=True,
            source="OLMo 2, arXiv 2501.00656; Swin Transformer v2, arXiv 2111.09883",
            used_by="OLMo 2 and 3, EXAONE 4, Chameleon, Swin v2",
        ),
        Wiring(
            name="parallel",
            class_name="ParallelNorm",
            before=True,
            parallel=True,
            final_norm=True,
            source="Wang and Komatsuzaki 2021 (GPT-J); Chowdhery et al. 2022 (PaLM), arXiv 2204.02311",
            used_by="GPT-J, PaLM, Phi, Command R",
        ),
    )
}


class Residual(nn.Module):
    r"""One step of a residual stream under a `Wiring`.

    ``x ← N_out(α·x + N_branch(F(N_in(x))))`` with the norms and α that the row names. Not used directly: `placement`
    and the named classes (`PreNorm`, `PostNorm`, …) bind the row.

    Args:
        dim: width of the stream.
        sublayers: what reads the stream; exactly one, except for parallel wirings.
        norm: makes a norm from a width; any callable, e.g. ``nk.LayerNorm`` or ``functools.partial(nk.RMSNorm,
            spec=nk.GEMMA)``.
        depth: layers of the stack, where the row's constants depend on it.
        architecture, other_depth: likewise; see `deepnorm_constants`.

    Shapes: x is (…, dim) and so is the result; extra arguments of ``forward`` go to every sublayer.

    Raises:
        TypeError, ValueError: a dim below 1, a number of sublayers that the wiring does not take, a missing ``depth``;
            in ``forward``, x of another width, a sublayer whose result has another shape than x.

    Example:
        >>> import torch, normkit as nk
        >>> block = nk.PreNorm(8, torch.nn.Linear(8, 8), norm=nk.LayerNorm)
        >>> block(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    wiring: Wiring

    def __init__(
        self,
        dim: int,
        *sublayers: nn.Module,
        norm: Callable[[int], nn.Module] = RMSNorm,
        depth: int | None = None,
        architecture: Architecture = "decoder-only",
        other_depth: int | None = None,
    ) -> None:
        super().__init__()
        row = self.wiring
        if not sublayers or (len(sublayers) > 1 and not row.parallel):
            wanted = "at least one sublayer" if row.parallel else "exactly one sublayer"
            raise ValueError(f"{row.class_name}: expected {wanted} after dim, got {len(sublayers)}")
        if row.scaled_residual and depth is None:
            raise ValueError(f"{row.class_name}: depth (layers of the stack) is needed for its constants; pass depth=…")
        self.dim = check_width(dim, row.class_name)
        self.constants = row.constants(1 if depth is None else depth, architecture, other_depth=other_depth)
        self.norm_in = norm(dim) if row.before else None
        self.norm_branch = norm(dim) if row.branch else None
        self.norm_out = norm(dim) if row.after else None
        self.sublayers = nn.ModuleList(sublayers)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the stream after this step."""
        if x.dim() == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"{self.wiring.class_name}: built for width {self.dim}, got x of shape {tuple(x.shape)}")
        read = x if self.norm_in is None else self.norm_in(x)
        branch: Tensor = self.sublayers[0](read, *args, **kwargs)
        for sublayer in self.sublayers[1:]:
            branch = branch + sublayer(read, *args, **kwargs)
        self._check_branch(branch, x)
        if self.norm_branch is not None:
            branch = self.norm_branch(branch)
        alpha = self.constants.alpha
        total = keep_rounded(x + branch) if alpha == 1 else _weighted_sum(x, alpha, branch)
        return total if self.norm_out is None else self.norm_out(total)

    def _check_branch(self, branch: object, x: Tensor) -> None:
        if not isinstance(branch, Tensor) or branch.shape != x.shape:
            came = tuple(branch.shape) if isinstance(branch, Tensor) else type(branch).__name__
            raise ValueError(
                f"{self.wiring.class_name}: a sublayer must return one tensor of x's shape {tuple(x.shape)}, "
                f"got {came}; wrap one that returns more"
            )

    def extra_repr(self) -> str:
        """Show the formula and the constants."""
        scaled = f", α={self.constants.alpha:.4g}, β={self.constants.beta:.4g}" if self.wiring.scaled_residual else ""
        return f"{self.wiring.formula}{scaled}"


def _weighted_sum(x: Tensor, alpha: float, branch: Tensor) -> Tensor:
    """Return α·x + branch, rounded once, as the fused `normkit.add_rms_norm` forms it."""
    dtype = torch.promote_types(x.dtype, branch.dtype)
    wide = accumulation_dtype(dtype)
    return round_to(x.to(wide) * alpha + branch.to(wide), dtype)


def _build(row: Wiring) -> type[Residual]:
    norms = sum((row.before, row.branch, row.after))
    doc = (
        f"{row.formula}: a residual step with {norms} norm{'s' if norms > 1 else ''}.\n\n"
        f"Final norm needed after the stack: {'yes' if row.final_norm else 'no'}. Initialisation: {row.init.text}\n"
        f"Used by: {row.used_by}. Source: {row.source}.\n\nArguments as for `Residual`."
    )
    return type(row.class_name, (Residual,), {"wiring": row, "__doc__": doc, "__module__": __name__})


_modules: dict[Wiring, type[Residual]] = {}


def _module(row: Wiring) -> type[Residual]:
    """Return the row's class, the same one every time."""
    if row not in _modules:
        _modules[row] = _build(row)
    return _modules[row]


PreNorm = _module(WIRINGS["pre"])
PostNorm = _module(WIRINGS["post"])
DeepNorm = _module(WIRINGS["deepnorm"])
SandwichNorm = _module(WIRINGS["sandwich"])
ReorderedNorm = _module(WIRINGS["reordered"])
ParallelNorm = _module(WIRINGS["parallel"])


def __getattr__(name: str) -> type[Residual]:
    """Find the class of a row that has no name of its own here, as pickle needs for rows added to `WIRINGS`."""
    for row in WIRINGS.values():
        if row.class_name == name:
            return _module(row)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def placement(name: str | Wiring) -> type[Residual]:
    """Return the module class of a wiring by name, or of a row of one's own.

    A row added to `WIRINGS` has a class at once. A row that is not added has one too; its modules work alike, but
    cannot be pickled whole, since only the table tells which row a class name stands for.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.

    Example:
        >>> placement("pre").__name__
        'PreNorm'
        >>> from dataclasses import replace
        >>> double = replace(WIRINGS["pre"], name="double", class_name="Double", after=True)
        >>> placement(double).wiring.formula
        'x ← N(x + F(N(x)))'
    """
    if isinstance(name, Wiring):
        return _module(name)
    if name not in WIRINGS:
        raise ValueError(f"placement: unknown wiring {name!r}; one of {', '.join(sorted(WIRINGS))}")
    return _module(WIRINGS[name])
