"""The Jacobian between all pairs of tokens: its formula block by block, and its derivatives."""

import pytest
import torch

from flowattn.kernels.pair_blocks import pair_blocks


def factors(heads=2, tokens=3, each=True, out=2, features=4, batch=2):
    """What the blocks are made of; S one for all tokens, or for each its own."""
    shapes = [
        (batch, heads, tokens, tokens),
        (batch, heads, out, tokens, tokens),
        (batch, heads, out, features, tokens) if each else (1, heads, out, features, 1),
        (batch, heads, features, tokens, tokens),
        (batch, out, features, tokens),
    ]
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def block_by_block(P, t, S, u, own):
    batch, heads, out, tokens, _ = t.shape
    S = S.expand(batch, -1, -1, -1, tokens)
    J = torch.zeros(batch, out, tokens, S.shape[3], tokens, dtype=P.dtype)
    for i in range(tokens):
        J[:, :, i, :, i] += own[..., i]
        for j in range(tokens):
            for h in range(heads):
                J[:, :, i, :, j] += P[:, h, i, j, None, None] * S[:, h, :, :, j]
                J[:, :, i, :, j] += t[:, h, :, i, j, None] * u[:, h, None, :, i, j]
    return J


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 3])
def test_it_is_the_formula_block_by_block(heads, tokens, each):
    given = factors(heads, tokens, each)
    torch.testing.assert_close(pair_blocks(*given), block_by_block(*given), rtol=0, atol=1e-14)


@pytest.mark.parametrize("each", [False, True])
def test_derivatives_of_first_and_second_order_are_right(each):
    given = factors(each=each)
    assert torch.autograd.gradcheck(pair_blocks, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(pair_blocks, given)


@pytest.mark.parametrize("which", range(5))
def test_a_derivative_may_be_taken_along_one_factor_only(which):
    given = [t.detach() for t in factors()]

    def of_one(one):
        return pair_blocks(*given[:which], one, *given[which + 1 :])

    forward, backward = torch.func.jacfwd(of_one)(given[which]), torch.func.jacrev(of_one)(given[which])
    torch.testing.assert_close(forward, backward, rtol=0, atol=1e-13)
