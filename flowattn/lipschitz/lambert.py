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
    if torch.compiler.is_compiling():
        solution = _lambert_w0(z.detach())
        return solution + (z - z.detach()) / (solution.exp() * (1 + solution))
    w: Tensor = _LambertW0.apply(z)
    return w


def wright_omega(t: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    r"""The Lambert function of an exponential that may be too large for a number.

    .. math:: \omega(t) = W_0(e^t), \qquad \omega + \log \omega = t

    Example:
        >>> wright_omega(torch.tensor([-math.inf, 1.0, 1e30]))
        tensor([0.0000e+00, 1.0000e+00, 1.0000e+30])
    """
    small = lambert_w0(t.clamp_max(5.0).exp())
    large = t.clamp_min(5.0)
    with torch.no_grad():
        w = large - large.log()
        for _ in range(4):  # Newton's method on omega + log(omega) = t
            w = (1 + large - w.log()) * (w / (1 + w))
    # One more step, recorded: its derivative omega / (1 + omega) is that of the solution.
    w = (1 + large - w.log()) * (w / (1 + w))
    return torch.where(t < 5, small, w)


def _lambert_w0(z: Tensor) -> Tensor:
    root = (2 * (math.e * z + 1)).clamp_min(0).sqrt()
    near_branch = -1 + root * (1 - root * (1 / 3 - root * (11 / 72)))
    log = z.clamp_min(1.0).log()
    far = log - (1 + log).log() * 0.8
    w = torch.where(z < 1, near_branch.clamp_max(0.6), far)
    for _ in range(6):  # Halley's method; its error is cubed by each step
        excess = w - z * torch.exp(-w)
        slope = (1 + w).clamp_min(torch.finfo(z.dtype).eps)
        w = w - excess / (slope - (w + 2) * excess / (2 * slope))
    return torch.where(z == math.inf, z, w)


class _LambertW0(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        return _lambert_w0(z)

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
