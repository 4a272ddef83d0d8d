r"""Tokens at which dot-product attention stretches as far as the ball lets it: one token that all others look at.

Let the first token be :math:`x_1` and all others w. Each of the others pays it the attention
:math:`P = 1 / (1 + (n-1) e^{-g})` with the gap :math:`g = (x_1 - w) \cdot A w`. When the first token moves, all outputs
move with it: the Jacobian is at least :math:`|V| P \sqrt{n - 1}`, which grows like :math:`\sqrt n` until
:math:`n = e^g`. With a causal mask the first token is seen by all, and the same holds.

References:
    | How Smooth Is Attention? (Castin, Ablin, Peyre, 2024)
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import check_choice, check_finite, check_positive

#: "half": (R u, R u / 2, ...), for an eigenvalue above 0. "opposite": (-R u, R u, ...), for one below 0. "free": any.
Kind = Literal["half", "opposite", "free"]


@torch.no_grad()
def adversarial_tokens(
    A: Float[Tensor, "features features"], num_tokens: int, radius: float, kind: Kind | None = None
) -> Float[Tensor, "tokens features"]:
    r"""One token that stands out and many that look at it, in the ball of radius R.

    .. math:: \text{half: } x_1 = R u,\; w = \tfrac R2 u,\; g = \tfrac14 \gamma R^2 \qquad
        \text{opposite: } x_1 = -R u,\; w = R u,\; g = 2 |\gamma| R^2

    for :math:`A u = \gamma u` with the largest, or the smallest, real eigenvalue: the two inputs of the paper.
    A matrix without real eigenvalues has neither, so there is a third, "free": :math:`x_1 = R A u / |A u|` and
    :math:`w = t R u` with the best :math:`t \le 1`, which for an eigenvector is one of the two. Its u is the best of
    the singular vectors of A and the eigenvectors of its symmetric part. Without a `kind` the largest gap decides.

    Example:
        >>> adversarial_tokens(-torch.eye(1), 3, radius=2.0, kind="opposite").flatten().abs()
        tensor([2., 2., 2.])
        >>> logit_gap(torch.eye(1), adversarial_tokens(torch.eye(1), 3, radius=2.0))
        tensor(1.)
    """
    check_positive(num_tokens=num_tokens)
    check_finite("A", A)
    if not 0 < radius < math.inf:
        raise ValueError(f"radius must be positive and finite; got radius={radius}.")
    if kind is not None:
        check_choice("kind", kind, ("half", "opposite", "free"))
        pairs = [_free_pair(A) if kind == "free" else _eigen_pair(A, kind)]
    else:
        values = torch.linalg.eigvals(A)
        real = values.real[_is_real(values)]
        pairs = [_free_pair(A)]
        pairs += [_eigen_pair(A, "half")] if (real > 0).any() else []
        pairs += [_eigen_pair(A, "opposite")] if (real < 0).any() else []
    first, others = max(pairs, key=lambda pair: logit_gap(A, torch.stack(pair)).item())
    return radius * torch.cat([first[None], others.expand(num_tokens - 1, -1)])


def logit_gap(A: Float[Tensor, "features features"], x: Float[Tensor, "tokens features"]) -> Float[Tensor, ""]:
    r"""How much more the last token looks at the first one than at itself: :math:`(x_1 - x_n) \cdot A x_n`."""
    return (x[0] - x[-1]) @ (A @ x[-1])


def _is_real(values: Tensor) -> Tensor:
    return values.imag.abs() <= 1e-6 * values.abs().amax()


def _eigen_pair(A: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eig(A)
    wanted = values.real * (1 if kind == "half" else -1)
    best = wanted.where(_is_real(values), -math.inf).argmax()
    if not (_is_real(values)[best] and wanted[best] > 0):
        sign = "positive" if kind == "half" else "negative"
        found = [complex(round(v.real, 4), round(v.imag, 4)) for v in values.tolist()]
        raise ValueError(f"A must have a real {sign} eigenvalue for kind={kind!r}; its eigenvalues are {found}.")
    u = torch.nn.functional.normalize(vectors[:, best].real, dim=0)
    return (u, u / 2) if kind == "half" else (-u, u)


def _free_pair(A: Tensor) -> tuple[Tensor, Tensor]:
    u = torch.cat([torch.linalg.svd(A).Vh, torch.linalg.eigh(A + A.mT).eigenvectors.mT])
    sought = u @ A.mT
    length = torch.linalg.vector_norm(sought, dim=-1)
    along = (u * sought).sum(-1)  # the gap is t |Au| - t^2 u.Au
    t = torch.where(along > length / 2, length / (2 * along.clamp_min(torch.finfo(A.dtype).tiny)), 1.0)
    best = (t * length - t.square() * along).argmax()
    return torch.nn.functional.normalize(sought[best], dim=0), t[best] * u[best]
