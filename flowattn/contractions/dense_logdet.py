r"""log|det(I + J)| of attention between all pairs of tokens, in one recorded step.

.. math:: J_{ij} = \sum_h P_{ij} S + t_{ij} u_{ij}^T + [i = j] \sum_l t_{il} b_l^T, \qquad
    S = B^T W^T, \quad t_{ij} = P_{ij} B^T (z_j - m_i), \quad u_{ij} = b_i - b_j, \quad b_j = \tfrac2s W z_j

see `flowattn.attention.heads_jacobian`; with a ball S and b differ from token to token, see `ball_logdet`. The gradient
of log|det(I + J)| after J is :math:`G = (I + J)^{-T}`, which comes with the value. While it is in the cache it is
reduced to gradients after P, t, S and b, all far smaller; backward takes those to the tokens and weights. Recorded step
by step the same takes a third longer.

Rows of P sum to 1, and the more a token sees of itself, the nearer J is to S for every token. A matrix K that is the
same for all of them then brings :math:`I + J` nearer to the identity, where series need fewer terms:

.. math:: \det(I + J) = \det\bigl((I + J) (I \otimes K)\bigr) / \det(K)^N, \qquad K = I - \tfrac34 \sum_h S.

Its product with J has :math:`W^T K` in place of :math:`W^T`. Where tokens see little of themselves, or S is large, K is
the identity.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.attention import heads_jacobian
from flowattn.checks import can_look, in_forward_mode
from flowattn.contractions.ball_logdet import ball_logabsdet
from flowattn.contractions.pair_desk import (
    Desk,
    Pull,
    average,
    invert_all,
    multiply_out,
    sums,
    take_off_weighted,
    through_means,
    through_weights,
    weights,
)
from flowattn.kernels.determinants import logabsdet_of_blocks, precise
from flowattn.kernels.fused_l2 import centre_of

Found = tuple[Float[Tensor, "batch tokens features"], Float[Tensor, " batch"]]

#: How much of S is taken off by K.
SHARE = 0.75

#: How much of themselves tokens must see on average. Where they are all alike K does not help, and what it adds to each
#: of them, to be taken off again, costs digits.
LEAST_OWN = 0.1


def attention_logabsdet(
    z: Float[Tensor, "batch tokens inner"] | Float[Tensor, "batch heads tokens width"],
    B: Float[Tensor, "inner features"] | Float[Tensor, "heads width features"],
    R: Float[Tensor, "features inner"] | Float[Tensor, "batch heads tokens width features"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
    *,
    num_heads: int | None = None,
) -> Found:
    r"""The sum over heads :math:`f_i = \sum_h B_h^T m^h_i`, and log|det(I + J)| if :math:`dz_j = R_j\, dx_j`.

    R is another one for each token, as a ball makes it, or, given `num_heads`, the transpose of one for all. Then all
    heads lie side by side, which leaves less to record.

    Cost: O(N^3 D^3) time, O(N^2 D^2) memory.

    Example:
        >>> z, one = torch.zeros(1, 3, 1), torch.ones(1, 1)
        >>> attention_logabsdet(z, one, one, num_heads=1)[1].exp()  # P is 1/3 everywhere
        tensor([2.0000])
    """
    given = (z, B, R) if bias is None else (z, B, R, bias)
    is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if not (is_recorded and can_look(*given)) or in_forward_mode():
        return _step_by_step(num_heads, *given)
    found: Found = _AttentionLogAbsDet.apply(z, B, R, bias, num_heads)
    return found


def _step_by_step(num_heads: int | None, z: Tensor, B: Tensor, R: Tensor, bias: Tensor | None = None) -> Found:
    value, J = heads_jacobian(*_by_heads(num_heads, z, B, R), bias)
    return value, logabsdet_of_blocks(J)


def _by_heads(num_heads: int | None, z: Tensor, B: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if num_heads is None:
        return z, B, R
    heads = num_heads, len(B) // num_heads
    return z.unflatten(2, heads).transpose(1, 2), B.unflatten(0, heads), R.mT.unflatten(0, heads)


class _AttentionLogAbsDet(torch.autograd.Function):
    """All is computed of -J, so t has the other sign."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, B: Tensor, R: Tensor, bias: Tensor | None, num_heads: int | None) -> Found:
        ctx.save_for_backward(z, B, R, bias)
        ctx.num_heads = num_heads
        z, B, R = _by_heads(num_heads, z, B, R)
        ctx.centre = centre_of(z, causal=False)
        z = z.mT.clone(memory_format=torch.contiguous_format).sub_(ctx.centre.mT)
        mean, logabsdet, ctx.pull = (ball_logabsdet if num_heads is None else _logabsdet)(z, weights(z, bias), B, R)
        return _value(mean, ctx.centre, B), logabsdet

    @staticmethod
    def backward(ctx: Any, g_value: Tensor, g: Tensor) -> Any:
        given = ctx.saved_tensors  # now, since a checkpoint runs forward here, at the same desk
        if torch.is_grad_enabled() or not can_look(g_value, g):
            return *_differentiable(ctx.num_heads, given, g_value, g), None
        dz, dB, dR, dlogits = ctx.pull(g_value, g.neg().view(-1, 1, 1, 1))
        dB += ctx.centre.squeeze(2).movedim(0, -1) @ g_value.sum(1)
        dbias = _of_bias(dlogits, given[3]) if ctx.needs_input_grad[3] else None
        if ctx.num_heads is None:
            return dz.mT, dB, dR, dbias, None
        return dz.flatten(1, 2).mT, dB.flatten(0, 1), dR.flatten(0, 1).mT, dbias, None


def _of_bias(dlogits: Tensor, bias: Tensor) -> Tensor:
    """The gradient after a bias like this one. It fills in the diagonal: those of a softmax add up to zero."""
    dlogits.diagonal(dim1=-2, dim2=-1).sub_(dlogits.sum(-1))
    # The sum is the gradient itself, in scratch memory, if there is nothing to sum up.
    return dlogits.sum_to_size(bias.shape).clone()


def _value(mean: Tensor, centre: Tensor, B: Tensor) -> Tensor:
    """The map from the means of centred tokens, times B already, and their centre."""
    return mean.sum(1).mT + (centre.flatten(1) @ B.flatten(0, 1)).unsqueeze(1)


def _differentiable(num_heads: int | None, given: tuple[Tensor | None, ...], g_value: Tensor, g: Tensor) -> Any:
    """The gradients of all that is given, recorded."""
    tensors = [t for t in given if t is not None]
    pull = torch.func.vjp(functools.partial(_step_by_step, num_heads), *tensors)[1]
    return *pull((g_value, g)), *[None] * (len(given) - len(tensors))


def _logabsdet(z: Tensor, P: Tensor, B: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Pull]:
    """The means times B, log|det(I + J)|, and what takes gradients after both to those of z, B, R and the logits."""
    _, width, features = B.shape
    steep, desk = 2 / math.sqrt(width), Desk.of(z, features)
    S = B.mT @ R
    K = _common_factor(S, P, desk.identity)
    RK, SK = R @ K, S @ K
    BR = torch.cat([B, RK * steep], -1)
    ab = BR.mT @ z
    a, b = ab[:, :, :features], ab[:, :, features:]
    mean = average(a, P, desk)
    torch.sub(b.unsqueeze(-1), b.unsqueeze(-2), out=desk.u)
    # A token's own block is minus the sum of its t u^T, since rows of t add up to zero.
    own = torch.sum(multiply_out(desk), -1, out=desk.blocks).neg_().add_((desk.identity - K).unsqueeze(-1))
    take_off_weighted(P, SK[None, ..., None], desk)
    desk.own.add_(own)
    logabsdet = invert_all(desk).sub_(P.shape[-1] * _logabsdet_of(K))
    of_logits, of_mean, of_a, of_S, of_b = _reduced(P, SK, desk)

    def pull(g_value: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        da, moved, dlogits = through_means(g_value, g, of_mean, of_a, of_logits, a, P, z)
        dab = torch.cat([da, of_b * g], 2)
        dz = (BR @ dab).add_(moved, alpha=steep)
        dBR = (z @ dab.mT).sum(0)
        dS = (g.view(1, -1) @ of_S.flatten(1)).view(of_S.shape[1:])
        dB = torch.baddbmm(dBR[..., :features], RK, dS.mT, alpha=-1)
        dRK = torch.baddbmm(dBR[..., features:], B, dS, beta=steep, alpha=-1)
        return dz, dB, dRK @ K.mT, dlogits

    return mean, logabsdet, pull


def _common_factor(S: Tensor, P: Tensor, identity: Tensor) -> Tensor:
    """K, or the identity where K would not help or might lose digits."""
    total, own = S.sum(0), P.diagonal(dim1=-2, dim2=-1).mean()
    # Not for what is not a number either.
    is_worth_it = own.item() > LEAST_OWN and torch.linalg.vector_norm(total).item() < 1
    return torch.sub(identity, total, alpha=SHARE if is_worth_it else 0.0)


def _logabsdet_of(K: Tensor) -> float:
    # An error here is one of every token.
    pivots = torch.linalg.lu_factor_ex(precise(K))[0].diagonal()
    return sum(math.log(abs(pivot)) for pivot in pivots.tolist())


def _reduced(P: Tensor, S: Tensor, desk: Desk) -> tuple[Tensor, ...]:
    """What backward needs of the gradient that is in the inverses of the desk, but for the sign.

    With d for the gradient after what follows, these are P dP, t being a product with P, but for a multiple of each row
    of P, which is nothing to the logits; the sums of P dt over keys and over queries, which are for the means and for
    a; dS; and db.
    """
    heads, features = S.shape[:2]
    G, flat = desk.A.copy_(desk.inverses_by_pairs), desk.A.flatten(1, 2).flatten(2)
    own = desk.blocks.copy_(desk.own)
    dS = torch.bmm(P.flatten(2), flat.mT).unflatten(2, (features, features))
    # A token's own block being minus the sum of its t u^T, these have the difference of their gradient and its own.
    G.sub_(own.unsqueeze(-1))
    torch.bmm(S.flatten(1).expand(len(P), -1, -1), flat, out=desk.dP.flatten(2))
    for h in range(heads):  # du is where u is, so it comes last
        torch.sum(torch.mul(G, desk.columns[h], out=desk.room), 2, out=desk.dt[h])
        torch.sum(torch.mul(G, desk.rows[h], out=desk.room), 1, out=desk.du[h])
    of_logits = through_weights(P, desk)
    over_keys, over_queries = sums(desk.dtu, desk)
    return of_logits, over_keys[0], over_queries[0], dS, over_keys[1] - over_queries[1]
