r"""Energies of systems of particles, and what follows from them.

A system is N particles in D dimensions, [B, N, D], whose energy U knows neither where its centre is nor how the
particles are numbered nor how it is turned. Its density :math:`e^{-U} / Z` lives on the mean-free space
:math:`\sum_i x_i = 0` of (N - 1) D dimensions, measured in any orthonormal coordinates of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

#: The energy [B] of systems [B, N, D].
Potential = Callable[[Tensor], Tensor]


def centred(x: Float[Tensor, "*batch particles space"]) -> Float[Tensor, "*batch particles space"]:
    """The systems with their centres moved to the origin."""
    return x - x.mean(-2, keepdim=True)


def pair_distances(x: Float[Tensor, "*batch particles space"]) -> Float[Tensor, "*batch pairs"]:
    """The distances of the N (N - 1) / 2 pairs of particles.

    Example:
        >>> pair_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 4.0]]))
        tensor([5., 4., 3.])
    """
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], 1, device=x.device)
    return torch.linalg.vector_norm(x[..., i, :] - x[..., j, :], dim=-1)


def double_well(x: Float[Tensor, "*batch particles space"]) -> Float[Tensor, "*batch"]:
    r"""The double-well potential of pairs, each pair counted once.

    .. math:: U = \sum_{i < j} -4 (d_{ij} - 4)^2 + 0.9 (d_{ij} - 4)^4

    Two particles are at rest 2.51 or 5.49 apart, with a barrier of 4.44 between.

    References:
        | Equivariant Flows: Exact Likelihood Generative Learning for Symmetric Densities (Koehler, Klein, Noe, 2020)
    """
    square = (pair_distances(x) - 4).square()
    return (-4 * square + 0.9 * square.square()).sum(-1)


def lennard_jones(
    x: Float[Tensor, "*batch particles space"], depth: float = 1.0, oscillator: float = 1.0
) -> Float[Tensor, "*batch"]:
    r"""The Lennard-Jones potential, each pair counted once, in a harmonic trap that keeps the particles together.

    .. math:: U = \epsilon \sum_{i < j} \bigl( d_{ij}^{-12} - 2 d_{ij}^{-6} \bigr)
        + \tfrac{o}{2} \sum_i \|x_i - \bar x\|^2

    Two particles are at rest 1 apart, with the energy :math:`-\epsilon`. Code that runs over all i and j and counts
    every pair twice has :math:`\epsilon = 2`.

    References:
        | Equivariant Flows: Exact Likelihood Generative Learning for Symmetric Densities (Koehler, Klein, Noe, 2020)
    """
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], 1, device=x.device)
    attraction = (x[..., i, :] - x[..., j, :]).square().sum(-1).pow(-3)
    pairs = (attraction * (attraction - 2)).sum(-1)
    return depth * pairs + 0.5 * oscillator * centred(x).square().sum((-2, -1))


def energy_and_gradient(potential: Potential, x: Tensor) -> tuple[Tensor, Tensor]:
    """The energies [B] and their gradients [B, N, D]."""
    with torch.enable_grad(), torch.inference_mode(False):
        leaf = x.detach().clone().requires_grad_()
        energy = potential(leaf)
        (gradient,) = torch.autograd.grad(energy.sum(), leaf)
    return energy.detach(), gradient


def virial(potential: Potential, x: Float[Tensor, "batch particles space"]) -> Float[Tensor, " batch"]:
    r"""The scalar :math:`x \cdot \nabla U`, whose mean over samples of :math:`e^{-U}` is (N - 1) D.

    Integration by parts on the mean-free space: :math:`E[x \cdot \nabla U] = E[\operatorname{div} x]`.
    """
    return (centred(x) * energy_and_gradient(potential, x)[1]).sum((-2, -1))
