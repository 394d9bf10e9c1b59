"""Triton's interpreter, made to round as a GPU does.

It cuts bfloat16 off where hardware rounds to nearest, ties to even, and before 3.9 rounds between the product and the
sum of a fused multiply-add. Both are replaced here, for tests: what a kernel declares is then held to the bit. Before
3.9 it also takes an array of one element for a number, as a loop's bound, which NumPy refuses since 2.4. And calls
from kernel to kernel are made faster, which changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def round_like_hardware() -> None:
    """Replace the interpreter's conversions between float32 and bfloat16, and its fused multiply-add."""
    from triton import language as tl
    from triton.runtime import interpreter

    slow = interpreter._convert_float

    def convert(value: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            wide = torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32))
            return wide.to(torch.bfloat16).view(torch.uint16).numpy()
        if source == tl.bfloat16 and target == tl.float32:
            return (np.asarray(value).astype(np.uint32) << 16).view(np.float32)
        return slow(value, source, target, mode)

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        # In float64 the product of two float32 is exact; the sum rounds twice, which differs from once where the
        # exact sum lies within 2^-53 of it of a tie: one in 2^28 draws.
        with np.errstate(all="ignore"):
            total = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
            return interpreter.TensorHandle(total.astype(np.float32), z.dtype.scalar)

    patch = interpreter._patch_lang_tensor

    def patch_index_too(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def call(self: Any, *args: Any, **options: Any) -> Any:
        # The launch has patched `triton.language`; to look through it at every call within takes most of the time.
        languages = [v for v in self.fn.__globals__.values() if v is tl or v is tl.core]
        if any(tl.core.is_builtin(language.full) for language in languages):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **options)

    interpreter._patch_lang_tensor = patch_index_too
    interpreter._convert_float = convert
    interpreter.InterpretedFunction.__call__ = call
    if not hasattr(interpreter._interpreter, "fma_fp32"):  # from 3.9 on it rounds once, in C
        interpreter.InterpreterBuilder.create_fma = fused
    np.seterr(all="ignore")  # rows that overflow on purpose are told from others by their sums, not by NumPy
