"""Attention that looks at each pair once: the formula, its derivatives, and what rounding does to them."""

import math

import pytest
import torch

from flowattn import attention
from flowattn.attention import attention_weights, l2_attention
from flowattn.kernels.pairs import AT_A_TIME, _block_size, is_worth_it, pair_attention


def formula(z):
    return (-(z.unsqueeze(-2) - z.unsqueeze(-3)).square().sum(-1) / math.sqrt(z.shape[-1])).softmax(-1) @ z


def tokens(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def gradient(function, z, weight):
    return torch.autograd.grad((function(z) * weight).sum(), z)[0]


#: Enough narrow tokens for anybody.
MANY = 1024

#: One shape for every size of block, with a last block that is not full, and more heads than are taken at a time.
SHAPES = {24: (950, 22, 2), 104: (8, 7, 200, 2), 208: (5, 3, 604, 1), 424: (3, 2100, 1)}


@pytest.mark.parametrize("shape", [(1, 2), (3, 1), *SHAPES.values()])
def test_it_is_the_formula_and_so_is_its_gradient(shape):
    z = tokens(*shape)
    weight = torch.randn_like(z)
    torch.testing.assert_close(pair_attention(z), formula(z), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(pair_attention, z, weight), gradient(formula, z, weight), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SHAPES)
def test_every_size_of_block_is_tried(size):
    *heads, num_tokens, _ = SHAPES[size]
    assert _block_size(num_tokens) == size
    assert num_tokens % size
    assert math.prod(heads) * size**2 > AT_A_TIME


def test_second_derivatives_are_right():
    assert torch.autograd.gradgradcheck(pair_attention, (tokens(2, 4, 3),))


def test_gradients_may_be_batched():
    z = tokens(2, 5, 3)
    weights = torch.randn(4, 2, 5, 3, dtype=torch.float64)
    batched = torch.autograd.grad(pair_attention(z), z, weights, is_grads_batched=True)[0]
    one_by_one = torch.stack([gradient(pair_attention, z, weight) for weight in weights])
    torch.testing.assert_close(batched, one_by_one, rtol=0, atol=1e-13)


def test_tokens_need_not_be_contiguous_and_are_not_changed():
    z = torch.randn(2, 300, 3, 2, dtype=torch.float64).transpose(1, 2).requires_grad_()
    before, weight = z.detach().clone(), torch.randn(2, 300, 3, 2, dtype=torch.float64).transpose(1, 2)
    torch.testing.assert_close(pair_attention(z), formula(z), rtol=0, atol=1e-13)
    torch.testing.assert_close(gradient(pair_attention, z, weight), gradient(formula, z, weight), rtol=0, atol=1e-12)
    assert torch.equal(z, before)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 16, 33])
def test_a_sequence_is_rounded_the_same_whatever_its_batch_mates(width):
    z = torch.randn(20, 600, width)
    mates = torch.cat([z[:1], 1e4 * z[1:]])
    assert torch.equal(pair_attention(z)[0], pair_attention(mates)[0])
    assert torch.equal(pair_attention(z)[0], pair_attention(z[:1])[0])


def test_an_empty_batch_comes_back_empty():
    z = torch.randn(0, 300, 2).requires_grad_()
    assert gradient(pair_attention, z, torch.empty(0, 300, 2)).shape == (0, 300, 2)


@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (1, 1e3), (30, 0), (1e4, 0), (1e9, 0)])
def test_single_precision_keeps_its_digits(scale, offset):
    z = (scale * torch.randn(400, 8) + offset).requires_grad_()
    weight = torch.randn(400, 8)
    exact = z.detach().double().requires_grad_()
    torch.testing.assert_close(pair_attention(z).double(), formula(exact), rtol=2e-6, atol=2e-6 * scale)
    # Where tokens see nobody but themselves gradients are those of the identity, without the noise of squares.
    expected = gradient(formula, exact, weight.double())
    torch.testing.assert_close(gradient(pair_attention, z, weight).double(), expected, rtol=0, atol=1e-5)
    graph = torch.autograd.grad((pair_attention(z) * weight).sum(), z, create_graph=True)[0]
    torch.testing.assert_close(graph.double(), expected, rtol=0, atol=1e-5)


def test_clusters_so_far_apart_that_squares_say_nothing_still_give_a_mean_of_tokens():
    place = torch.tensor([-1e6, 0.0, 1e6]).repeat_interleave(100)[:, None]
    z = (place + torch.randn(300, 8)).requires_grad_()
    # Within a cluster logits are rounded by thousands: whom a token sees is chance, but never a token elsewhere.
    assert (pair_attention(z) - place).abs().max() < 10
    assert gradient(pair_attention, z, torch.ones(300, 8)).isfinite().all()


def test_tokens_at_one_place_are_all_the_same():
    z = torch.full((300, 4), 1e6).requires_grad_()
    assert torch.equal(pair_attention(z), z)
    torch.testing.assert_close(gradient(pair_attention, z, torch.ones(300, 4)), torch.ones(300, 4))


def test_a_token_that_is_not_a_number_is_not_hidden():
    z = torch.randn(300, 2)
    z[7] = torch.nan
    assert pair_attention(z).isnan().all()


def test_it_is_worth_it_for_many_tokens_where_it_can_be_called():
    for width, tokens in {2: 256, 64: 1536}.items():
        many = torch.randn(tokens, width)
        assert is_worth_it(many) and not is_worth_it(many[1:])
    for heads, tokens, width in ((256, 64, 32), (16, 256, 64)):
        many = torch.randn(heads, tokens, width).requires_grad_()
        assert is_worth_it(many) and not is_worth_it(many[1:]) and not is_worth_it(many[:, 1:])
        assert not is_worth_it(many.detach())
    assert not is_worth_it(many.to("meta")) and not is_worth_it(many.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_worth_it(many)


@pytest.mark.parametrize("recorded", [False, True])
def test_attention_takes_it_where_it_is_worth_it(recorded, monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "pair_attention", lambda z: calls.append(z) or pair_attention(z))
    z = tokens(MANY, 2).requires_grad_(recorded)
    torch.testing.assert_close(l2_attention(z), attention_weights(z) @ z, rtol=0, atol=1e-12)
    assert len(calls) == 1
    with torch.inference_mode():
        l2_attention(z.detach())
    assert len(calls) == 2


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("rows", [None, 1, MANY])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_and_a_causal_mask_are_heeded_with_many_tokens_too(causal, rows, recorded):
    z = tokens(MANY, 2).requires_grad_(recorded)
    bias = None if rows is None else torch.randn(rows, MANY, dtype=torch.float64)
    expected = attention_weights(z, bias, causal=causal) @ z
    torch.testing.assert_close(l2_attention(z, bias, causal=causal), expected, rtol=0, atol=1e-12)


def test_transforms_of_functions_go_another_way():
    z, dz = tokens(MANY, 1).detach(), torch.randn(MANY, 1, dtype=torch.float64)
    _, forward = torch.func.jvp(l2_attention, (z,), (dz,))
    (backward,) = torch.func.vjp(l2_attention, z)[1](dz)
    torch.testing.assert_close((forward * dz).sum(), (backward * dz).sum())
    torch.testing.assert_close(torch.func.vmap(l2_attention)(z[None])[0], l2_attention(z))
    with torch.autograd.forward_ad.dual_level():
        dual = l2_attention(torch.autograd.forward_ad.make_dual(z, dz))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, forward)
