r"""What dense log-determinants of attention share: room for pairs of tokens, and the steps that know no R.

Tokens come last in here, [batch, heads, width, tokens], and pairs of them, [batch, heads, width, i, j].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flowattn.kernels.determinants import invert
from flowattn.kernels.scratch import Scratch, as_they_are, shaped

#: Takes the gradients after the map and the log-determinant to those after z, B, R and the logits.
Pull = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class Desk:
    """Room for what there is of each pair of tokens, with the views that are wanted of it."""

    def __init__(self, *rooms: Tensor) -> None:
        self.dP, self.t, self.dtu, self.matrices, self.inverses, self.spare, self.blocks = rooms  # as in `of`
        heads, features, tokens, _ = self.t.shape[1:]
        n, size = features * tokens, (features, tokens)
        #: A is not needed while there are matrices to invert, nor are their inverses once they are in A.
        pairs = len(self.t), features, features, tokens, tokens
        self.A, self.room = shaped(self.spare, pairs), shaped(self.inverses, pairs)
        self.dt, self.du = self.dtu[0], self.dtu[1]
        self.dt_by_samples = self.dt.transpose(0, 1)
        #: Its gradient is written over u of a head, so dt of that head, which needs u, comes first.
        self.u = self.du.transpose(0, 1)
        #: Those of each head as factors of A.
        self.rows = [self.t[:, h].unsqueeze(2) for h in range(heads)]
        self.columns = [self.u[:, h].unsqueeze(1) for h in range(heads)]
        self.own = self.A.diagonal(dim1=3, dim2=4)
        #: The matrices and their inverses by pairs, as A is.
        self.by_pairs, self.inverses_by_pairs = (
            t[:, :n, :n].unflatten(2, size).unflatten(1, size).transpose(2, 3) for t in (self.matrices, self.inverses)
        )
        self.matrices.zero_()  # nobody writes where there are no pairs
        self.identity = torch.eye(features, dtype=self.A.dtype, device=self.A.device)
        #: A product with these is a sum over keys, in half the time of one.
        self.ones = self.A.new_ones(tokens)

    @staticmethod
    def of(z: Tensor, features: int) -> Desk:
        """That for tokens z and Jacobians of so many features. The next call has it in the same memory."""
        batch, heads, _, tokens = z.shape
        weights, pairs = (batch, heads, tokens, tokens), (features, tokens, tokens)
        # Matrices with rows and columns of zeros up to a multiple of eight are multiplied in two thirds of the time.
        wide = 8 * math.ceil(features * tokens / 8)
        t, dtu, blocks = (batch, heads, *pairs), (2, heads, batch, *pairs), (batch, features, features, tokens)
        return _scratch(z, weights, t, dtu, *[(batch, wide, wide)] * 3, blocks)


_scratch, _backward_scratch = Scratch(Desk), Scratch(as_they_are)


def weights(z: Tensor, bias: Tensor | None) -> Tensor:
    """The attention P of centred tokens."""
    logits = (z.mT @ z).mul_(2 / math.sqrt(z.shape[-2]))
    half = logits.diagonal(dim1=-2, dim2=-1) * 0.5
    logits.sub_(half.unsqueeze(-1)).sub_(half.unsqueeze(-2))
    if bias is not None:
        return (logits + bias).softmax(-1)
    # None is above that of a token itself, which is 0: a softmax of short rows takes three times as long.
    P = logits.clamp_max_(0).exp_()
    return P.div_(P.sum(-1, keepdim=True))


def average(a: Tensor, P: Tensor, desk: Desk) -> Tensor:
    """The means of a, leaving t, what each token takes of a beyond them, on the desk."""
    mean = a @ P.mT
    torch.sub(mean.unsqueeze(-1), a.unsqueeze(-2), out=desk.t).mul_(P.unsqueeze(2))
    return mean


def multiply_out(desk: Desk) -> Tensor:
    r"""Builds :math:`A = \sum_h t u^T` on the desk."""
    A = torch.mul(desk.rows[0], desk.columns[0], out=desk.A)
    for row, column in zip(desk.rows[1:], desk.columns[1:], strict=True):
        A.addcmul_(row, column)
    return A


def take_off_weighted(P: Tensor, S: Tensor, desk: Desk) -> None:
    """Subtracts P S from A, S being of each token or of all."""
    for h in range(P.shape[1]):
        desk.A.addcmul_(P[:, h, None, None], S[:, h].unsqueeze(-2), value=-1)


def invert_all(desk: Desk) -> Tensor:
    """log|det(I - A)|, leaving (I - A)^{-T} in the inverses of the desk."""
    desk.by_pairs.copy_(desk.A)  # quicker than to build A there, where rows are short
    return invert(desk.matrices, desk.inverses, desk.spare)


def through_weights(P: Tensor, desk: Desk) -> Tensor:
    """P dP, t being a product with P. It changes t, and dt to P dt."""
    of_logits = desk.t.mul_(desk.dt_by_samples).sum(2).addcmul_(P, desk.dP, value=-1)
    desk.dt_by_samples.mul_(P.unsqueeze(2))
    return of_logits


def sums(pairs: Tensor, desk: Desk) -> tuple[Tensor, Tensor]:
    """The sums over keys and over queries of pairs whose heads come before their samples, samples first."""
    over_keys, over_queries = pairs @ desk.ones, pairs.sum(-2)
    return over_keys.transpose(-4, -3), over_queries.transpose(-4, -3)


def through_means(
    g_value: Tensor, g: Tensor, of_mean: Tensor, of_a: Tensor, of_logits: Tensor, a: Tensor, P: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients after a, after the tokens by their weights, but for a factor of 2 / s, and after the logits.

    It takes those of the map and, in parts, of the log-determinant. The last one is in scratch memory, and zero on the
    diagonal, which is for biases only: what makes its rows add up to zero.
    """
    dmean = torch.addcmul(g_value.mT.unsqueeze(1), of_mean, g)
    da = (dmean @ P).addcmul_(of_a, g, value=-1)
    dlogits, pairs = _backward_scratch(P, P.shape, P.shape)
    torch.bmm(dmean.flatten(0, 1).mT, a.flatten(0, 1), out=dlogits.flatten(0, 1))
    dlogits.mul_(P).addcmul_(of_logits, g)
    dlogits.addcmul_(P, dlogits.sum(-1, keepdim=True), value=-1)
    dlogits.diagonal(dim1=-2, dim2=-1).zero_()  # where a token sees little but itself it is nothing but rounding
    torch.add(dlogits, dlogits.mT, out=pairs)
    return da, (z @ pairs).addcmul_(z, pairs.sum(-2, keepdim=True), value=-1), dlogits
