"""The simplest densities there are, fitted by maximum likelihood: what every flow must beat."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.context import split_context, sum_over_tokens
from flowattn.data.batch import Batch, Sequences


class Gaussian:
    r"""A normal distribution of whole sequences, or of single tokens.

    .. math:: \log p(x) = -\tfrac12 \bigl(\|L^{-1} (x - \mu)\|^2 + D \log 2\pi\bigr) - \sum_i \log L_{ii},
        \qquad \Sigma = L L^\top

    A covariance as wide as whole sequences gives their density at once; one as wide as a token gives each real token
    its own term, all alike and independent. Computed in float64.

    Args:
        mean: the mean of a flattened sequence, or of a token.
        scale: the lower triangular factor L of the covariance.

    Example:
        >>> standard = Gaussian(torch.zeros(2), torch.eye(2))
        >>> standard(Sequences(torch.zeros(1, 3, 2)).all())
        tensor([-5.5136], dtype=torch.float64)
    """

    def __init__(self, mean: Float[Tensor, " width"], scale: Float[Tensor, "width width"]) -> None:
        self.mean, self.scale = mean.double(), scale.double()

    @classmethod
    def fit(cls, train: Sequences, diagonal: bool = False) -> Gaussian:
        """The Gaussian of largest likelihood: of whole sequences, or of tokens where sequences are masked."""
        mean, covariance = _moments(train)
        if diagonal:
            variances = covariance.diagonal()
            if (variances <= 0).any():
                raise ValueError(
                    f"The train split is constant in dimension {int(variances.argmin())} of {len(variances)}: "
                    "it has no density."
                )
            return cls(mean, variances.sqrt().diag())
        if not cls.has_full_covariance(train):
            raise ValueError(
                f"The covariance of the train split, {len(covariance)} wide, is singular or estimated from too few "
                f"samples: {len(_rows(train))}."
            )
        return cls(mean, torch.linalg.cholesky(covariance))

    @staticmethod
    def has_full_covariance(train: Sequences) -> bool:
        """Whether the covariance of the train split is safely positive definite.

        Asks for twice as many samples as dimensions, and that no direction is explained by the others up to a
        standard deviation of 1e-5 of its own.
        """
        if len(_rows(train)) < 2 * _rows(train).shape[1]:
            return False
        _, covariance = _moments(train)
        deviations = covariance.diagonal().sqrt()
        if (deviations <= 0).any():
            return False
        factor, failed = torch.linalg.cholesky_ex(covariance / deviations.outer(deviations))
        return int(failed) == 0 and bool((factor.diagonal() > 1e-5).all())

    def __call__(self, batch: Batch) -> Float[Tensor, " batch"]:
        """The log-density of each sequence, in nats."""
        inputs = batch.inputs.double()
        mean, scale = self.mean.to(inputs.device), self.scale.to(inputs.device)
        _, mask = split_context(batch.context, batch.inputs)
        whole = len(mean) == inputs[0].numel() and mask is None
        if not whole and len(mean) != inputs.shape[2]:
            raise ValueError(
                f"A Gaussian of width {len(mean)} has no density for sequences of shape {list(inputs.shape[1:])}"
                f"{'' if mask is None else ' with a mask'}."
            )
        rows = (inputs.flatten(1).unsqueeze(1) if whole else inputs) - mean
        if mask is not None:
            rows = rows.masked_fill(~mask.unsqueeze(-1), 0)
        noise = torch.linalg.solve_triangular(scale.T, rows, upper=True, left=False)
        terms = 0.5 * (noise.square() + math.log(2 * math.pi)) + scale.diagonal().log()
        return -sum_over_tokens(terms, None if whole else mask)


def helmert(num_tokens: int) -> Float[Tensor, "less tokens"]:
    r"""An orthonormal basis of the vectors of N numbers that add up to zero: N - 1 rows, in double precision.

    Example:
        >>> helmert(2)
        tensor([[ 0.7071, -0.7071]], dtype=torch.float64)
    """
    k = torch.arange(1, num_tokens, dtype=torch.float64).unsqueeze(1)
    column = torch.arange(num_tokens)
    rows = torch.where(column < k, 1.0, torch.where(column == k, -k, 0.0))
    return rows / (k * (k + 1)).sqrt()


def mean_free_coordinates(inputs: Float[Tensor, "sequences tokens features"]) -> Sequences:
    """Sequences whose tokens add up to zero, in orthonormal coordinates [N - 1, D] of the space of such sequences."""
    return Sequences(torch.einsum("kn,bnd->bkd", helmert(inputs.shape[1]).to(inputs), inputs))


def _rows(train: Sequences) -> Tensor:
    return train.inputs.flatten(1) if train.mask is None else train.tokens()


def _moments(train: Sequences) -> tuple[Tensor, Tensor]:
    rows = _rows(train).double()
    mean = rows.mean(0)
    centred = rows - mean
    return mean, centred.T @ centred / len(rows)
