"""Norms that other people write: a right one, and five that are wrong in one way each."""

from __future__ import annotations

import torch
from torch import Tensor


def hugging_face(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def statistics_in_the_input_dtype(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def one_pass_variance(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = wide.pow(2).mean(-1, keepdim=True) - mean.pow(2)
    return ((wide - mean) * torch.rsqrt(variance + eps) * weight.float()).to(x.dtype)


def weight_before_the_cast(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * wide).to(torch.promote_types(x.dtype, weight.dtype))


class _InPlace(torch.autograd.Function):
    """The upcast of a float32 input is no copy, and what follows works in place."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x.detach().clone(), weight)
        ctx.eps = eps
        wide = x.detach().to(torch.float32)
        wide.mul_(torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))
        return weight * wide.to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (x, weight)]
            return (*torch.autograd.grad(hugging_face(*leaves, ctx.eps), leaves, dy), None)


def in_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _InPlace.apply(x, weight, eps)


def epsilon_outside(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + eps)
    return weight * wide.to(x.dtype)


def without_dw(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return hugging_face(x, weight.detach(), eps)
