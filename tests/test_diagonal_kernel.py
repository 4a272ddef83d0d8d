"""The mean of what each token sees and its derivative after the token itself: the formula, and autograd of it."""

import math

import pytest
import torch

from flowattn.kernels import diagonal_desk
from flowattn.kernels.diagonal import ROWS, mean_and_blocks
from flowattn.kernels.dot_products import HIDDEN


def formula(z, bias=None, causal=False):
    apart = z.unsqueeze(-2) - z.unsqueeze(-3)
    logits = -apart.square().sum(-1) / math.sqrt(z.shape[-1])
    logits = logits if bias is None else logits + bias
    if causal:
        logits = logits.masked_fill(torch.ones(z.shape[-2], z.shape[-2]).triu(1).bool(), -math.inf)
    P = logits.softmax(-1)
    m = P @ z
    away = z.unsqueeze(-3) - m.unsqueeze(-2)
    covariance = torch.einsum("...nk,...nki,...nkj->...nij", P, away, away)
    own = P.diagonal(dim1=-2, dim2=-1)[..., None, None] * torch.eye(z.shape[-1], dtype=z.dtype)
    return m, own + 2 / math.sqrt(z.shape[-1]) * covariance


def tokens(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def gradients(function, given, weights):
    found = function(*given)
    value = sum((part * weight).sum() for part, weight in zip(found, weights, strict=True))
    return *found, *torch.autograd.grad(value, [t for t in given if t is not None])


def padding(shape):
    return torch.zeros(shape[0], 1, 1, shape[2], dtype=torch.float64).masked_fill(
        torch.arange(shape[2]) >= torch.arange(shape[2], shape[2] - shape[0], -1).view(-1, 1, 1, 1), HIDDEN
    )


#: The last has more rows than are computed at a time under a causal mask, the next to last as many, of one feature.
SHAPES = [(1, 1, 1, 2), (3, 2, 5, 4), (2, 3, 7, 3), (2, 1, ROWS, 1), (2, 2, 2 * ROWS + 9, 2)]

BIASES = {
    "no bias": lambda *_: None,
    "a bias of pairs": lambda batch, heads, n, _: tokens(n, n),
    "a bias of heads": lambda batch, heads, n, _: tokens(heads, n, n),
    "a bias of keys": lambda batch, heads, n, _: tokens(heads, 1, n),
    "a bias of samples": lambda batch, heads, n, _: tokens(batch, 1, n, n),
}


@pytest.mark.parametrize("at_a_time", [1, 2**22], ids=["one by one", "all at once"])
@pytest.mark.parametrize("causal", [False, True], ids=["sees all", "causal"])
@pytest.mark.parametrize("make_bias", BIASES.values(), ids=BIASES.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_formula(shape, make_bias, causal, at_a_time, monkeypatch):
    monkeypatch.setattr(diagonal_desk, "KEPT", at_a_time)
    monkeypatch.setattr(diagonal_desk, "small_enough_for_the_cache", lambda like: at_a_time)
    given = tokens(*shape), make_bias(*shape)
    weights = torch.randn(shape, dtype=torch.float64), torch.randn(*shape, shape[-1], dtype=torch.float64)
    got = gradients(lambda *a: mean_and_blocks(*a, causal=causal), given, weights)
    want = gradients(lambda *a: formula(*a, causal=causal), given, weights)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(mean_and_blocks(*given, causal=causal), want[:2], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True], ids=["sees all", "causal"])
def test_padding_is_not_read_and_has_no_gradient(causal):
    shape = (3, 2, 6, 3)
    z, bias = tokens(*shape), padding(shape)
    real = (bias == 0).transpose(-2, -1)
    weights = [
        torch.randn(shape, dtype=torch.float64) * real,
        torch.randn(*shape, 3, dtype=torch.float64) * real[..., None],
    ]
    got = gradients(lambda z: mean_and_blocks(z, bias, causal=causal), (z,), weights)
    far = torch.where(real, z, 100.0).detach().requires_grad_()
    for one, other in zip(
        got, gradients(lambda z: mean_and_blocks(z, bias, causal=causal), (far,), weights), strict=True
    ):
        visible = real if one.ndim == 4 else real[..., None]
        torch.testing.assert_close(one * visible, other * visible, rtol=1e-11, atol=1e-11)
    assert (got[2] * ~real == 0).all()


@pytest.mark.parametrize("causal", [False, True], ids=["sees all", "causal"])
def test_derivatives_of_every_kind_are_right(causal):
    given = tokens(2, 2, 3, 2), tokens(2, 3, 3)

    def function(*given):
        return mean_and_blocks(*given, causal=causal)

    assert torch.autograd.gradcheck(function, given, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, given)


@pytest.mark.parametrize("causal", [False, True], ids=["sees all", "causal"])
def test_functional_transforms_go_step_by_step(causal):
    z = tokens(3, 2, 4, 2).detach()

    def each(function):
        return torch.func.vmap(torch.func.jacrev(lambda z: function(z, None, causal=causal)[1].sum()))(z.unsqueeze(1))

    torch.testing.assert_close(each(mean_and_blocks), each(formula), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["sees all", "causal"])
def test_single_precision_loses_its_last_digits_only(shape, causal):
    z = tokens(*shape)
    weights = torch.randn(shape, dtype=torch.float64), torch.randn(*shape, shape[-1], dtype=torch.float64)
    want = gradients(lambda z: formula(z, causal=causal), (z,), weights)
    z, weights = z.detach().float().requires_grad_(), [weight.float() for weight in weights]
    got = gradients(lambda z: mean_and_blocks(z, causal=causal), (z,), weights)
    for one, other in zip(got, want, strict=True):
        assert (one.double() - other).abs().max() < 2e-5 * other.abs().max().clamp_min(1)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("causal", [False, True], ids=["sees all", "causal"])
def test_a_sequence_does_not_depend_on_its_batch_mates(width, causal):
    z = torch.randn(9, 2, 100, width)
    mates = torch.cat([z[:1], 1e3 * z[1:]])
    for one, other in zip(mean_and_blocks(z, causal=causal), mean_and_blocks(mates, causal=causal), strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=1e-6)


def test_tokens_need_not_be_contiguous_and_are_not_changed():
    z = torch.randn(2, 70, 3, 2, dtype=torch.float64).transpose(1, 2).requires_grad_()
    before = z.detach().clone()
    weights = torch.randn_like(z), torch.randn(*z.shape, 2, dtype=torch.float64)
    got = gradients(lambda z: mean_and_blocks(z, causal=True), (z,), weights)
    torch.testing.assert_close(got, gradients(lambda z: formula(z, causal=True), (z,), weights), rtol=1e-11, atol=1e-11)
    assert torch.equal(z, before)


@pytest.mark.parametrize("causal", [False, True], ids=["sees all", "causal"])
@pytest.mark.parametrize("shape", [(0, 2, 5, 3), (2, 2, 0, 3), (0, 5, 3), (2, 0, 3)], ids=str)
def test_what_is_empty_comes_back_empty(shape, causal):
    given, weights = (tokens(*shape),), [torch.empty(shape), torch.empty(*shape, 3)]
    m, C, dz = gradients(lambda z: mean_and_blocks(z, causal=causal), given, weights)
    assert m.shape == dz.shape == shape
    assert C.shape == (*shape, 3)


def test_one_graph_serves_every_length_when_compiled(without_shape_checks):
    torch.compiler.reset()
    graphs = []
    compiled = torch.compile(mean_and_blocks, backend=lambda graph, _: graphs.append(graph) or graph, dynamic=True)
    for num_tokens in range(5, 9):
        z = torch.randn(1, 2, num_tokens, 3)
        torch.testing.assert_close(compiled(z), mean_and_blocks(z))
    assert len(graphs) == 1


def test_a_token_far_from_all_others_has_exactly_no_covariance():
    blocks = mean_and_blocks(1000 * torch.randn(1, 2, 16, 4), causal=True)[1]
    assert torch.equal(blocks, torch.eye(4).expand_as(blocks))


def test_a_gradient_may_be_taken_twice_from_one_graph_with_other_calls_between():
    z = tokens(2, 2, 80, 3)
    m, C = mean_and_blocks(z, causal=True)
    (first,) = torch.autograd.grad(C.sum() + m.sum(), z, retain_graph=True)
    gradients(lambda z: mean_and_blocks(z, causal=True), (tokens(2, 2, 80, 3),), (m.detach(), C.detach()))
    assert torch.equal(torch.autograd.grad(C.sum() + m.sum(), z)[0], first)
