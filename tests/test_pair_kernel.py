"""Attention that looks at each pair once: the formula, its derivatives, and what rounding does to them."""

import math

import pytest
import torch

from flowattn.attention import attention_weights, l2_attention
from flowattn.pair_kernel import FEWEST, FEWEST_RECORDED, _block_size, is_worth_it, pair_attention


def formula(z):
    return (-(z.unsqueeze(-2) - z.unsqueeze(-3)).square().sum(-1) / math.sqrt(z.shape[-1])).softmax(-1) @ z


def tokens(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def gradient(function, z, weight):
    return torch.autograd.grad((function(z) * weight).sum(), z)[0]


#: One shape for every size of block, with a last block that is not full, and more heads than are taken at a time.
SHAPES = {128: (5, 7, 200, 2), 256: (3, 300, 4), 512: (2100, 1)}


@pytest.mark.parametrize("shape", [(1, 2), (3, 1), *SHAPES.values()])
def test_it_is_the_formula_and_so_is_its_gradient(shape):
    z = tokens(*shape)
    weight = torch.randn_like(z)
    torch.testing.assert_close(pair_attention(z), formula(z), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(pair_attention, z, weight), gradient(formula, z, weight), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SHAPES)
def test_every_size_of_block_is_tried(size):
    shape = SHAPES[size]
    assert _block_size(torch.empty(math.prod(shape[:-2]), shape[-1], shape[-2])) == size


def test_second_derivatives_are_right():
    assert torch.autograd.gradgradcheck(pair_attention, (tokens(2, 4, 3),))


def test_gradients_may_be_batched():
    z = tokens(2, 5, 3)
    weights = torch.randn(4, 2, 5, 3, dtype=torch.float64)
    batched = torch.autograd.grad(pair_attention(z), z, weights, is_grads_batched=True)[0]
    one_by_one = torch.stack([gradient(pair_attention, z, weight) for weight in weights])
    torch.testing.assert_close(batched, one_by_one, rtol=0, atol=1e-13)


def test_tokens_need_not_be_contiguous_and_are_not_changed():
    z = torch.randn(2, 6, 5, 3, dtype=torch.float64).transpose(1, 2)
    before = z.clone()
    torch.testing.assert_close(pair_attention(z), formula(z), rtol=0, atol=1e-13)
    assert torch.equal(z, before)


@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (1, 1e3), (30, 0), (1e4, 0), (1e9, 0)])
def test_single_precision_keeps_its_digits(scale, offset):
    z = (scale * torch.randn(400, 8) + offset).requires_grad_()
    weight = torch.randn(400, 8)
    exact = z.detach().double().requires_grad_()
    torch.testing.assert_close(pair_attention(z).double(), formula(exact), rtol=2e-6, atol=2e-6 * scale)
    # Where tokens see nobody but themselves gradients are those of the identity, without the noise of squares.
    error = gradient(pair_attention, z, weight).double() - gradient(formula, exact, weight.double())
    assert error.abs().max() < 1e-5 * max(1, offset)


def test_tokens_at_one_place_are_all_the_same():
    z = torch.full((300, 4), 1e6).requires_grad_()
    assert torch.equal(pair_attention(z), z)
    torch.testing.assert_close(gradient(pair_attention, z, torch.ones(300, 4)), torch.ones(300, 4))


def test_a_token_that_is_not_a_number_is_not_hidden():
    z = torch.randn(300, 2)
    z[7] = torch.nan
    assert pair_attention(z).isnan().all()


def test_attention_takes_it_for_many_tokens_where_it_can():
    few, many = torch.randn(FEWEST - 1, 2), torch.randn(FEWEST, 2)
    assert is_worth_it(many) and not is_worth_it(few)
    assert is_worth_it(torch.randn(FEWEST_RECORDED, 2).requires_grad_())
    assert not is_worth_it(many.to("meta")) and not is_worth_it(many.bfloat16())
    with torch.inference_mode():
        torch.testing.assert_close(l2_attention(many), attention_weights(many) @ many)


def test_transforms_of_functions_go_another_way():
    z, dz = tokens(FEWEST, 1).detach(), torch.randn(FEWEST, 1, dtype=torch.float64)
    _, forward = torch.func.jvp(l2_attention, (z,), (dz,))
    (backward,) = torch.func.vjp(l2_attention, z)[1](dz)
    torch.testing.assert_close((forward * dz).sum(), (backward * dz).sum())
    torch.testing.assert_close(torch.func.vmap(l2_attention)(z[None])[0], l2_attention(z))
    with torch.autograd.forward_ad.dual_level():
        dual = l2_attention(torch.autograd.forward_ad.make_dual(z, dz))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, forward)
