"""The Jacobian between all pairs of tokens: its formula block by block, and its derivatives."""

import pytest
import torch

from flowattn.pair_blocks import pair_blocks


def factors(heads=2, tokens=3, out=2, features=4, batch=2):
    shapes = [
        (batch, heads, tokens, tokens),
        (batch, heads, out, tokens, tokens),
        (heads, out, features),
        (batch, heads, features, tokens),
    ]
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def block_by_block(P, t, S, b):
    batch, heads, out, tokens, _ = t.shape
    J = torch.zeros(batch, out, tokens, S.shape[-1], tokens, dtype=P.dtype)
    for h in range(heads):
        for i in range(tokens):
            for j in range(tokens):
                J[:, :, i, :, j] += P[:, h, i, j, None, None] * S[h]
                J[:, :, i, :, j] += t[:, h, :, i, j, None] * (b[:, h, :, i] - b[:, h, :, j]).unsqueeze(1)
                J[:, :, i, :, i] += t[:, h, :, i, j, None] * b[:, h, :, j].unsqueeze(1)
    return J


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 3])
def test_it_is_the_formula_block_by_block(heads, tokens):
    given = factors(heads, tokens)
    torch.testing.assert_close(pair_blocks(*given), block_by_block(*given), rtol=0, atol=1e-14)


def test_derivatives_of_first_and_second_order_are_right():
    given = factors()
    assert torch.autograd.gradcheck(pair_blocks, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(pair_blocks, given)


@pytest.mark.parametrize("which", range(4))
def test_a_derivative_may_be_taken_along_one_factor_only(which):
    given = [t.detach() for t in factors()]

    def of_one(one):
        return pair_blocks(*given[:which], one, *given[which + 1 :])

    forward, backward = torch.func.jacfwd(of_one)(given[which]), torch.func.jacrev(of_one)(given[which])
    torch.testing.assert_close(forward, backward, rtol=0, atol=1e-13)
