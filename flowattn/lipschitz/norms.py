"""Norms of sequences of tokens."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

#: "token": the longest token, in Euclidean length. "inf": the largest entry. "2": the length of all entries together.
Norm = Literal["token", "inf", "2"]


def token_norm(x: Float[Tensor, "*batch tokens features"]) -> Float[Tensor, "*batch"]:
    r"""The length of the longest token.

    .. math:: \|X\| = \max_i \|x_i\|_2

    Example:
        >>> token_norm(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
        tensor(5.)
    """
    return torch.linalg.vector_norm(x, dim=-1).amax(-1)


def sequence_norm(x: Float[Tensor, "*batch tokens features"], norm: Norm = "token") -> Float[Tensor, "*batch"]:
    """The norm of each sequence of a batch, by name.

    Example:
        >>> sequence_norm(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), "inf")
        tensor(4.)
    """
    check_norm(norm)
    if norm == "token":
        return token_norm(x)
    return torch.linalg.vector_norm(x, ord=float(norm), dim=(-2, -1))


def check_norm(norm: str) -> None:
    """Raises for a norm that has no such name."""
    if norm not in get_args(Norm):
        raise ValueError(f"norm must be one of {', '.join(map(repr, get_args(Norm)))}; got norm={norm!r}.")
