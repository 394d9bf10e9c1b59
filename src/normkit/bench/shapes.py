"""What is timed: an operator, a pass, a shape and a dtype; its tensors; and the bytes that it cannot avoid moving."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

OPS = ("rms", "layer", "add_rms")
PASSES = ("forward", "backward", "step")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EPS = {"rms": 1e-6, "layer": 1e-5, "add_rms": 1e-6}


@dataclass(frozen=True)
class Shape:
    """The sizes of x; ``heads`` makes it the q slice of a fused qkv projection, (batch, length, heads, width)."""

    sizes: tuple[int, ...]
    heads: bool = False

    def __str__(self) -> str:
        return "×".join(map(str, self.sizes)) + (" heads" if self.heads else "")

    @property
    def width(self) -> int:
        """Return the length of a row."""
        return self.sizes[-1]

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return math.prod(self.sizes[:-1])


SHAPES = (
    Shape((1, 4096)),
    Shape((16, 4096)),
    Shape((512, 768)),
    Shape((2048, 4096)),
    Shape((8192, 4096)),
    Shape((1, 512, 32, 128), heads=True),
)
QUICK_SHAPES = (SHAPES[0], SHAPES[2], SHAPES[5])
BEYOND_CACHES = 1 << 28  # bytes of a tensor that no GPU's caches hold: the largest have an eighth of it
_ELEMENTS = BEYOND_CACHES // 2  # so many, of two bytes or more each
GPU_SHAPES = (
    Shape((1, 4096)),  # what a launch costs
    Shape((16, 4096)),
    Shape((8, 8192, 32, 64), heads=True),
    *(Shape((-(-_ELEMENTS // n), n)) for n in (128, 512, 1024, 4096, 5120, 8192, 16384, 32768, 65536, 262144)),
)
GPU_QUICK_SHAPES = (GPU_SHAPES[0], GPU_SHAPES[2], GPU_SHAPES[6])


def shapes_for(device: str, quick: bool) -> tuple[Shape, ...]:
    """Return what is timed on a device if nothing is asked for.

    Example:
        >>> [str(shape) for shape in shapes_for("cuda", quick=True)]
        ['1×4096', '8×8192×32×64 heads', '32768×4096']
    """
    if is_gpu(device):
        return GPU_QUICK_SHAPES if quick else GPU_SHAPES
    return QUICK_SHAPES if quick else SHAPES


def is_gpu(device: str) -> bool:
    """Say whether a device's name is a GPU's: ``cuda`` or ``cuda:1``, under ROCm as well."""
    return device.partition(":")[0] == "cuda"


def parse_shape(text: str) -> Shape:
    """Read ``512x768``, or ``1x512x32x128:heads`` for a strided slice.

    Raises:
        ValueError: for anything else.

    Example:
        >>> str(parse_shape("512x768")), str(parse_shape("1x8x2x64:heads"))
        ('512×768', '1×8×2×64 heads')
    """
    sizes, colon, kind = text.strip().lower().replace("×", "x").partition(":")
    parts = sizes.split("x")
    heads = kind == "heads"
    wanted = (len(parts) == 4) if heads else (len(parts) >= 2 and not colon)
    if not wanted or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"--shape {text!r}: expected sizes such as 512x768, the last the row's width, "
            "or 1x512x32x128:heads for the q slice of a fused qkv projection"
        )
    return Shape(tuple(map(int, parts)), heads)


@dataclass(frozen=True)
class Case:
    """One line of contenders."""

    op: str
    which: str
    shape: Shape
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.op} {self.which} {self.shape} {self.dtype}" + (f" {self.device}" if self.gpu else "")

    @property
    def gpu(self) -> bool:
        """Say whether its tensors lie on a GPU."""
        return is_gpu(self.device)

    @property
    def item(self) -> int:
        """Return the bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def plane(self) -> int:
        """Return the bytes of one tensor of x's shape."""
        return self.shape.rows * self.shape.width * self.item

    @property
    def copied(self) -> int:
        """Return the bytes that the yardstick moves: x read, y written."""
        return 2 * self.plane

    @property
    def moved(self) -> int:
        """Return the bytes that any implementation must move, each tensor once.

        Forward: x (and the residual) in, y (and the sum) out, the parameters in. Backward: x or the sum, dy (and the
        sum's gradient) in, dx out, the weight in, a gradient a parameter out. A step is both.
        """
        added, parameters = self.op == "add_rms", 2 if self.op == "layer" else 1
        row = self.shape.width * self.item
        forward = (4 if added else 2) * self.plane + parameters * row
        backward = (4 if added else 3) * self.plane + (1 + parameters) * row
        return {"forward": forward, "backward": backward, "step": forward + backward}[self.which]


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case, the same for every contender. Outputs exist and have been touched."""

    x: Tensor
    residual: Tensor | None
    weight: nn.Parameter
    bias: nn.Parameter | None
    dy: Tensor
    ds: Tensor | None
    y: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Return what gradients are taken of, in this order: x, residual, weight, bias."""
        return tuple(t for t in (self.x, self.residual, self.weight, self.bias) if t is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Return what the leaves' gradients are called."""
        pairs = (("dx", self.x), ("dresidual", self.residual), ("dw", self.weight), ("db", self.bias))
        return tuple(name for name, t in pairs if t is not None)

    @property
    def upstream(self) -> tuple[Tensor, ...]:
        """Return the gradients of the outputs, y's and the sum's."""
        return (self.dy,) if self.ds is None else (self.dy, self.ds)


def make_inputs(case: Case, seed: int) -> Inputs:
    """Draw the tensors of a case, on its device: a copy from the host would take longer than all that is timed."""
    generator = torch.Generator(case.device).manual_seed(seed)
    dtype, sizes = DTYPES[case.dtype], case.shape.sizes

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=case.device).to(dtype)

    def leaf() -> Tensor:
        if not case.shape.heads:
            return normal(*sizes).requires_grad_()
        batch, length, heads, width = sizes
        fused = normal(batch, length, 3 * heads * width)
        return fused.view(batch, length, 3, heads, width)[:, :, 0].detach().requires_grad_()

    added = case.op == "add_rms"
    return Inputs(
        x=leaf(),
        residual=leaf() if added else None,
        weight=nn.Parameter(1 + 0.1 * normal(case.shape.width)),
        bias=nn.Parameter(0.1 * normal(case.shape.width)) if case.op == "layer" else None,
        dy=normal(*sizes),
        ds=normal(*sizes) if added else None,
        y=torch.zeros(sizes, dtype=dtype, device=case.device),
    )
