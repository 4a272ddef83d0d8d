"""The Lambert function, which rules how far L2 attention can stretch."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import can_look


def lambert_w0(z: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    r"""The principal branch of the Lambert function, for real z >= -1/e.

    .. math:: W_0(z)\, e^{W_0(z)} = z, \qquad W_0'(z) = \frac{1}{e^{W_0(z)} (1 + W_0(z))}

    Differentiable any number of times. Outside its domain it raises.

    Example:
        >>> lambert_w0(torch.tensor([0.0, math.e]))
        tensor([0., 1.])
    """
    if can_look() and not (z.detach() >= -1 / math.e).all():
        lowest = z.detach().nan_to_num(-math.inf).min().item()
        raise ValueError(f"lambert_w0 is real for z >= -1/e only; got z={lowest}.")
    w: Tensor = _LambertW0.apply(z)
    return w


class _LambertW0(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        root = (2 * (math.e * z + 1)).clamp_min(0).sqrt()
        near_branch = -1 + root * (1 - root * (1 / 3 - root * (11 / 72)))
        log = z.clamp_min(1.0).log()
        far = log - (1 + log).log() * 0.8
        w = torch.where(z < 1, near_branch.clamp_max(0.6), far)
        for _ in range(8):  # Halley's method; its error is cubed by each step
            excess = w - z * torch.exp(-w)
            slope = (1 + w).clamp_min(torch.finfo(z.dtype).eps)
            w = w - excess / (slope - (w + 2) * excess / (2 * slope))
        return w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * _derivative(*ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, dz: Tensor) -> Tensor:
        return dz * _derivative(*ctx.saved_tensors)


def _derivative(z: Tensor) -> Tensor:
    w: Tensor = _LambertW0.apply(z)
    return 1 / (w.exp() * (1 + w))
