r"""Samples of :math:`e^{-U}` on the mean-free space: annealed populations and Markov chains, all walkers at once."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flowattn.data.potentials import Potential, centred, energy_and_gradient


class Population(NamedTuple):
    """Walkers [W, N, D] that are distributed as e^-U, and the logarithm of its integral Z as they estimate it."""

    walkers: Tensor
    log_integral: Tensor


class Langevin:
    r"""Metropolis-adjusted Langevin steps of many walkers.

    .. math:: x' = x - \tfrac{\epsilon^2}{2} \nabla U + \epsilon\, \xi, \qquad \xi \text{ normal on the mean-free space}

    A proposal is accepted with the probability that keeps :math:`e^{-U}` as it is. The drift is cut to a length of
    :math:`\epsilon \sqrt{(N-1) D}`, as long as the noise, because near collisions gradients have no bound; any drift is
    corrected for. While `adapt` is on, the step follows the rate of acceptance, towards 0.6.
    """

    def __init__(self, generator: torch.Generator, step: float = 0.1) -> None:
        self.generator = generator
        self.step = step
        self.acceptance = 0.0

    def run(self, potential: Potential, x: Tensor, num_steps: int, *, adapt: bool) -> Tensor:
        """The walkers after so many steps each."""
        energy, gradient = energy_and_gradient(potential, x)
        for _ in range(num_steps):
            there = self._drift(gradient)
            moved = there + self.step * centred(self._normal(x.shape, x))
            new = x + moved
            new_energy, new_gradient = energy_and_gradient(potential, new)
            back = self._drift(new_gradient)
            log_ratio = energy - new_energy + self._log_density(-moved - back) - self._log_density(moved - there)
            uniform = torch.rand(len(x), generator=self.generator, dtype=x.dtype)
            accepted = uniform.log() < log_ratio  # false for NaN, where particles collide
            pick = accepted[:, None, None]
            x, energy = torch.where(pick, new, x), torch.where(accepted, new_energy, energy)
            gradient = torch.where(pick, new_gradient, gradient)
            self.acceptance = accepted.double().mean().item()
            if adapt:
                self.step *= math.exp(0.2 * (self.acceptance - 0.6))
        return x

    def _drift(self, gradient: Tensor) -> Tensor:
        drift = -0.5 * self.step**2 * centred(gradient)
        longest = self.step * math.sqrt((gradient.shape[1] - 1) * gradient.shape[2])
        length = torch.linalg.vector_norm(drift, dim=(1, 2), keepdim=True)
        return drift * (longest / length.clamp_min(longest))

    def _log_density(self, noise: Tensor) -> Tensor:
        return -noise.square().sum((1, 2)) / (2 * self.step**2)

    def _normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=like.dtype)


def anneal(
    potential: Potential,
    shape: tuple[int, int],
    num_walkers: int,
    generator: torch.Generator,
    *,
    scale: float = 2.0,
    num_steps: int = 10,
    kept: float = 0.9,
) -> Population:
    r"""Sequential Monte Carlo from a normal distribution to e^-U.

    .. math:: U_\beta = (1 - \beta) \frac{\|x\|^2}{2 \sigma^2} + \beta U, \qquad
        \log Z = \tfrac{(N-1) D}{2} \log 2 \pi \sigma^2 + \sum_k \log \overline{e^{-(U_{\beta_{k+1}} - U_{\beta_k})}}

    Each temperature is as far from the last as leaves the share `kept` of the effective sample size; the walkers
    are resampled and take `num_steps` Langevin steps there.

    Args:
        potential: the energy U.
        shape: number of particles and of dimensions.
        num_walkers: number of walkers.
        generator: where all randomness comes from.
        scale: standard deviation of the normal distribution at the start.
        num_steps: steps at each temperature.
        kept: share of the effective sample size.

    References:
        | Sequential Monte Carlo Samplers (Del Moral, Doucet, Jasra, 2006)
    """
    dimensions = (shape[0] - 1) * shape[1]
    x = scale * centred(torch.randn(num_walkers, *shape, generator=generator, dtype=torch.float64))
    log_integral = torch.tensor(0.5 * dimensions * math.log(2 * math.pi * scale**2), dtype=torch.float64)
    chain, beta = Langevin(generator), 0.0
    while beta < 1:
        change = potential(x) - x.square().sum((1, 2)) / (2 * scale**2)
        change = change.nan_to_num(torch.inf, posinf=torch.inf)
        step = _next_step(change, 1 - beta, kept)
        log_weights = -step * change
        log_integral = log_integral + log_weights.logsumexp(0) - math.log(num_walkers)
        x = x[_resample(log_weights.softmax(0), generator)]
        beta = 1.0 if step == 1 - beta else beta + step

        def between(x: Tensor, beta: float = beta) -> Tensor:
            return (1 - beta) * x.square().sum((1, 2)) / (2 * scale**2) + beta * potential(x)

        x = chain.run(between, x, num_steps, adapt=True)
    return Population(x, log_integral)


def sample(
    potential: Potential,
    shape: tuple[int, int],
    num_samples: int,
    generator: torch.Generator,
    *,
    num_walkers: int,
    burn_in: int,
    thinning: int,
    scale: float = 2.0,
) -> Tensor:
    """Samples [num_samples, N, D] of e^-U, mean-free, in double precision and in random order.

    The walkers start from an annealed population, so that every mode has its share of them; they forget where they
    started over `burn_in` steps, in which the size of a step is found, and are then looked at every `thinning` steps.
    Every look is numbered and turned at random, which U does not feel.
    """
    walkers = anneal(potential, shape, num_walkers, generator, scale=scale).walkers
    chain = Langevin(generator)
    walkers = chain.run(potential, walkers, burn_in, adapt=True)
    looks = []
    for _ in range(math.ceil(num_samples / num_walkers)):
        walkers = chain.run(potential, walkers, thinning, adapt=False)
        looks.append(symmetrised(walkers, generator))
    samples = torch.cat(looks)
    return samples[torch.randperm(len(samples), generator=generator)[:num_samples]]


def symmetrised(x: Tensor, generator: torch.Generator) -> Tensor:
    """The systems [B, N, D], each with its particles in random order, turned and mirrored at random."""
    order = torch.rand(x.shape[:2], generator=generator).argsort(1)
    return x.take_along_dim(order.unsqueeze(-1), 1) @ rotations(len(x), x.shape[-1], generator).to(x)


def rotations(number: int, dimensions: int, generator: torch.Generator) -> Tensor:
    """So many random matrices, uniform over all rotations and mirror images, in double precision."""
    normal = torch.randn(number, dimensions, dimensions, generator=generator, dtype=torch.float64)
    Q, R = torch.linalg.qr(normal)
    # The signs make it uniform: Q R with a positive diagonal of R is unique.
    return Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def anneal_estimate(
    potential: Potential, shape: tuple[int, int], num_walkers: int, generator: torch.Generator, scale: float = 2.0
) -> tuple[float, float]:
    """One estimate of log Z and of the mean energy, whose sum is the entropy, by `anneal`."""
    walkers, log_integral = anneal(potential, shape, num_walkers, generator, scale=scale)
    return log_integral.item(), potential(walkers).mean().item()


def _next_step(change: Tensor, longest: float, kept: float) -> float:
    """The longest step of beta that keeps so much of the effective sample size, by bisection of its logarithm."""

    def share(step: float) -> float:
        w = (-step * change).softmax(0)
        return 1 / (w.square().sum().item() * len(w))

    if share(longest) >= kept:
        return longest
    low, high = 1e-30, longest
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if share(middle) >= kept else (low, middle)
    return low


def _resample(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Indices of the walkers that go on, each as often as it weighs, up to one (systematic resampling)."""
    places = torch.arange(len(weights), dtype=weights.dtype) + torch.rand((), generator=generator, dtype=weights.dtype)
    return torch.searchsorted(weights.cumsum(0), places / len(weights)).clamp_max(len(weights) - 1)
