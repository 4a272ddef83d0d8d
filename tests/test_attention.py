"""The pure functions of attention against formulas written naively, and against autograd."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowattn.attention import (
    HIDDEN,
    attention_weights,
    diagonal_blocks,
    dot_product_attention,
    into_ball,
    into_ball_jacobian,
    into_ball_jvp,
    jacobian_blocks,
    l2_attention,
    l2_attention_jvp,
)
from flowattn.contractions import Compose, DotProductSelfAttention, FeedForward, L2SelfAttention, TokenLinear

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 5, 4

BIASES = {
    "no bias": lambda: None,
    "a bias per key": lambda: torch.randn(HEADS, 1, TOKENS, dtype=torch.float64),
    "a bias per pair": lambda: torch.randn(TOKENS, TOKENS, dtype=torch.float64),
    "a bias per head and pair": lambda: torch.randn(HEADS, TOKENS, TOKENS, dtype=torch.float64),
}


def hide_padding(bias):
    """The same bias, with the last key of the first sequence hidden, and the last two of the second."""
    hidden = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.float64)
    hidden[0, ..., -1:], hidden[1, ..., -2:] = HIDDEN, HIDDEN
    return hidden if bias is None else bias + hidden


@pytest.fixture(params=[False, True], ids=["all real", "padding"])
def padding(request):
    return request.param


@pytest.fixture(params=BIASES.values(), ids=BIASES.keys())
def bias(request, padding, seed):
    return hide_padding(request.param()) if padding else request.param()


@pytest.fixture(params=[False, True], ids=["sees all", "causal"])
def causal(request):
    return request.param


@pytest.fixture
def z(seed):
    return torch.randn(BATCH, HEADS, TOKENS, WIDTH, dtype=torch.float64)


def naive_weights(z, bias=None, causal=False):
    logits = -(z.unsqueeze(-2) - z.unsqueeze(-3)).square().sum(-1) / math.sqrt(z.shape[-1])
    if bias is not None:
        logits = logits + torch.where(bias < HIDDEN / 2, -math.inf, bias)
    if causal:
        logits = logits.masked_fill(torch.ones(z.shape[-2], z.shape[-2]).triu(1).bool(), -math.inf)
    return logits.softmax(-1)


def naive(z, bias=None, causal=False):
    return naive_weights(z, bias, causal) @ z


def naive_jacobian(z, bias=None, causal=False):
    """[..., N, N, d, d], by autograd of the naive formula."""
    full = torch.autograd.functional.jacobian(lambda z: naive(z, bias, causal), z)
    own = full.flatten(4, 5).flatten(0, 1).diagonal(dim1=0, dim2=3)  # one sequence and head does not see another
    return own.movedim(-1, 0).unflatten(0, (BATCH, HEADS)).transpose(-3, -2)


def close(one, other, tolerance=1e-12):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# -- values


def test_weights_are_the_softmax_of_distances(z, bias, causal):
    close(attention_weights(z, bias, causal=causal), naive_weights(z, bias, causal))


def test_output_is_the_weighted_mean(z, bias, causal):
    close(l2_attention(z, bias, causal=causal), naive(z, bias, causal))


def test_output_while_training_is_the_weighted_mean(z, bias, causal):
    close(l2_attention(z.requires_grad_(), bias, causal=causal), naive(z, bias, causal))


@pytest.mark.parametrize("function", [attention_weights, l2_attention, diagonal_blocks, jacobian_blocks])
def test_tokens_may_come_without_batch_and_heads(function, z, bias, causal):
    if bias is not None:
        bias = bias.expand(BATCH, HEADS, -1, -1)
    many = tree_leaves(function(z, bias, causal=causal))
    one = tree_leaves(function(z[1, 2], None if bias is None else bias[1, 2], causal=causal))
    for all_of_them, this in zip(many, one, strict=True):
        close(this, all_of_them[1, 2])


def test_the_derivatives_come_with_the_output(z, bias, causal):
    expected = naive(z, bias, causal)
    close(l2_attention_jvp(z, torch.randn_like(z), bias, causal=causal)[0], expected)
    close(diagonal_blocks(z, bias, causal=causal)[0], expected)
    close(jacobian_blocks(z, bias, causal=causal)[0], expected)


def test_a_row_that_sees_no_key_is_finite(z):
    hidden = torch.full((1, TOKENS), HIDDEN, dtype=torch.float64)
    for causal in (False, True):
        for result in tree_leaves(
            (
                l2_attention(z, hidden, causal=causal),
                l2_attention(z.clone().requires_grad_(), hidden.expand(TOKENS, -1), causal=causal),
                jacobian_blocks(z, hidden, causal=causal),
            )
        ):
            assert result.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_hidden_key_is_not_read_however_far_it_is(z, causal):
    bias = hide_padding(None)
    far = z.clone()
    far[0, :, -1:], far[1, :, -2:] = 1e3, -1e3
    for function in (l2_attention, lambda *a, **k: diagonal_blocks(*a, **k)[1]):
        close(function(far, bias, causal=causal)[:, :, :3], function(z, bias, causal=causal)[:, :, :3], 1e-9)


def test_causal_rows_do_not_see_later_tokens(z):
    bias = torch.randn(TOKENS, TOKENS, dtype=torch.float64)
    for b in (None, bias):
        whole = l2_attention(z, b, causal=True)
        for length in range(1, TOKENS):
            part = None if b is None else b[:length, :length]
            close(l2_attention(z[..., :length, :], part, causal=True), whole[..., :length, :])


@pytest.mark.parametrize("kind", ["sees all", "causal", "a bias per key", "a bias per pair"])
def test_dot_product_attention_is_softmax_of_products(kind, z):
    q, k, v = z, z.flip(0), z.flip(-2)
    bias = BIASES[kind]() if kind in BIASES else None
    logits = q @ k.mT if bias is None else q @ k.mT + bias
    for causal in (False, True) if bias is not None else (kind == "causal",):
        hidden = torch.ones(TOKENS, TOKENS).triu(1).bool() & causal
        expected = logits.masked_fill(hidden, -math.inf).softmax(-1) @ v
        close(dot_product_attention(q, k, v, bias, causal=causal), expected)


# -- first derivatives


def test_jvp_is_that_of_the_naive_formula(z, bias, causal):
    dz = torch.randn_like(z)
    expected = torch.func.jvp(lambda z: naive(z, bias, causal), (z,), (dz,))[1]
    close(l2_attention_jvp(z, dz, bias, causal=causal)[1], expected)


def test_diagonal_blocks_are_those_of_the_naive_formula(z, bias, causal):
    expected = naive_jacobian(z, bias, causal).diagonal(dim1=2, dim2=3).movedim(-1, 2)
    close(diagonal_blocks(z, bias, causal=causal)[1], expected)


def test_jacobian_blocks_are_those_of_the_naive_formula(z, bias, causal):
    close(jacobian_blocks(z, bias, causal=causal)[1], naive_jacobian(z, bias, causal))


def test_gradient_of_tokens_and_bias_is_that_of_the_naive_formula(z, bias, causal):
    g = torch.randn_like(z)
    inputs = [t.requires_grad_() for t in (z, bias) if t is not None]
    expected = torch.autograd.grad((naive(z, bias, causal) * g).sum(), inputs)
    for one, other in zip(
        torch.autograd.grad((l2_attention(z, bias, causal=causal) * g).sum(), inputs), expected, strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("bias", list(BIASES.values())[1:], ids=list(BIASES)[1:], indirect=True)
def test_gradient_of_a_bias_alone_is_that_of_the_naive_formula(z, bias, causal):
    bias.requires_grad_()
    g = torch.randn_like(z)
    (expected,) = torch.autograd.grad((naive(z, bias, causal) * g).sum(), bias)
    close(torch.autograd.grad((l2_attention(z, bias, causal=causal) * g).sum(), bias)[0], expected)


def test_gradient_may_be_taken_twice_from_one_graph(z):
    z.requires_grad_()
    total = l2_attention(z).square().sum()
    (once,) = torch.autograd.grad(total, z, retain_graph=True)
    close(torch.autograd.grad(total, z)[0], once)


def test_gradient_through_a_checkpoint_is_the_same(z, bias, causal):
    z.requires_grad_()

    def total(z):
        return l2_attention(z, bias, causal=causal).square().sum()

    (expected,) = torch.autograd.grad(total(z), z)
    checkpointed = torch.utils.checkpoint.checkpoint(total, z, use_reentrant=False)
    close(torch.autograd.grad(checkpointed, z)[0], expected)


# -- the ball

RADII = {"number": 1.7, "per head": torch.tensor([0.3, 1.0, 20.0], dtype=torch.float64)[:, None, None]}
each_radius = pytest.mark.parametrize("radius", RADII.values(), ids=RADII.keys())


@each_radius
def test_ball_is_its_formula_and_holds_everything(radius, z):
    close(into_ball(z, radius), z / (1 + z.square().sum(-1, keepdim=True) / radius**2).sqrt())
    far = into_ball(z * 1e9, radius)
    assert (far.norm(dim=-1, keepdim=True) <= radius * (1 + 1e-12) * torch.ones_like(far[..., :1])).all()


@each_radius
def test_jacobian_of_the_ball_is_that_of_autograd(radius, z):
    full = torch.autograd.functional.jacobian(lambda y: into_ball(y, radius), z)
    expected = torch.einsum("bhnibhnj->bhnij", full)
    close(into_ball_jacobian(z, radius), expected)


@each_radius
def test_jvp_of_the_ball_is_that_of_autograd(radius, z):
    dy = torch.randn_like(z)
    expected = torch.func.jvp(lambda y: into_ball(y, radius), (z,), (dy,))[1]
    close(into_ball_jvp(z, dy, radius), expected)


@each_radius
def test_ball_stretches_nothing(radius, z):
    G = into_ball_jacobian(z * 10 ** torch.linspace(-3, 3, TOKENS)[:, None], radius)
    assert torch.linalg.matrix_norm(G, 2).max() <= 1 + 1e-12


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e12])
def test_derivatives_of_the_ball_are_right_far_outside_of_it(scale, z):
    """Where 1 - |z|^2 / R^2 is zero by rounding, and its root has no gradient."""
    y = (scale * z).float().requires_grad_()
    G = into_ball_jacobian(y, 1.0)
    close(G.double(), into_ball_jacobian(scale * z, 1.0), 1e-5 / scale)
    dy = into_ball_jvp(y, torch.ones_like(y), 1.0)
    for value in (G, dy):
        (gradient,) = torch.autograd.grad(value.sum(), y, retain_graph=True)
        assert gradient.isfinite().all()


def test_gradients_of_the_ball_pass_gradcheck_in_tokens_and_radius(z):
    radius = RADII["per head"].clone().requires_grad_()
    y = z.clone().requires_grad_()
    assert gradcheck(into_ball, (y, radius)) and gradgradcheck(into_ball, (y, radius))


# -- second derivatives


def few(z, bias):
    """Two tokens of two heads, for checks by finite differences."""
    inputs = [z[:1, :2, -2:, :2]]
    if bias is not None:
        bias = bias[..., -2:, -2:]
        inputs.append(bias if bias.ndim == 2 else bias[-2:])
    return [t.contiguous().requires_grad_() for t in inputs]


@pytest.mark.parametrize("make", BIASES.values(), ids=BIASES.keys())
def test_derivatives_pass_gradcheck_twice_in_tokens_and_bias(make, z, causal):
    inputs = few(z, make())
    assert gradcheck(lambda *a: l2_attention(*a, causal=causal), inputs, check_forward_ad=True)
    assert gradgradcheck(lambda *a: l2_attention(*a, causal=causal), inputs, check_fwd_over_rev=True)


def test_derivatives_pass_gradcheck_twice_with_hidden_keys(z, causal):
    (tokens,) = few(z, None)
    hidden = torch.tensor([0.0, HIDDEN], dtype=torch.float64).expand(1, 1, 1, 2)
    assert gradcheck(lambda z: l2_attention(z, hidden, causal=causal), tokens)
    assert gradgradcheck(lambda z: l2_attention(z, hidden, causal=causal), tokens)


@pytest.mark.parametrize("function", [attention_weights, diagonal_blocks, jacobian_blocks])
def test_closed_forms_can_be_differentiated_twice(function, z, causal):
    tokens, bias = few(z, torch.randn(TOKENS, TOKENS, dtype=torch.float64))
    tokens = tokens[:1, :1].detach().requires_grad_()
    assert gradcheck(lambda *a: function(*a, causal=causal), (tokens, bias))
    assert gradgradcheck(lambda *a: function(*a, causal=causal), (tokens, bias))


def test_jvp_can_be_differentiated_twice(z, causal):
    tokens, bias = few(z, torch.randn(TOKENS, TOKENS, dtype=torch.float64))
    tokens = tokens[:1, :1].detach().requires_grad_()
    inputs = (tokens, torch.randn_like(tokens).requires_grad_(), bias)
    assert gradcheck(lambda *a: l2_attention_jvp(*a, causal=causal), inputs)
    assert gradgradcheck(lambda *a: l2_attention_jvp(*a, causal=causal), inputs)


@pytest.mark.parametrize("kind", ["sees all", "causal", "a bias per key", "a bias per pair"])
def test_dot_products_pass_gradcheck_twice(kind):
    inputs = [torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    if kind.startswith("a bias"):
        rows = 1 if kind == "a bias per key" else 3
        inputs.append(torch.randn(2, rows, 3, dtype=torch.float64, requires_grad=True))
    for causal in (False, True) if len(inputs) == 4 else (kind == "causal",):
        assert gradcheck(lambda *a, c=causal: dot_product_attention(*a, causal=c), inputs, check_forward_ad=True)
        assert gradgradcheck(lambda *a, c=causal: dot_product_attention(*a, causal=c), inputs)


# -- torch.func, inference mode, compile


TRANSFORMS = {
    "jvp": lambda f: lambda z: torch.func.jvp(f, (z,), (z.flip(-2),)),
    "vjp": lambda f: lambda z: torch.func.vjp(f, z)[1](z.flip(-2)),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": lambda f: torch.func.hessian(lambda z: f(z).pow(3).sum()),
    "forward over reverse": lambda f: (
        lambda z: torch.func.jvp(torch.func.grad(lambda z: f(z).pow(3).sum()), (z,), (z.flip(-2),))
    ),
    "vmap": torch.func.vmap,
    "vmap of jacrev": lambda f: torch.func.vmap(torch.func.jacrev(f)),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda z: f(z).pow(3).sum())),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_functional_transforms_agree_with_the_naive_formula(transform, z, causal):
    for bias in (None, torch.randn(TOKENS, TOKENS, dtype=torch.float64)):
        got = transform(lambda z, b=bias: l2_attention(z, b, causal=causal))(z[0])
        expected = transform(lambda z, b=bias: naive(z, b, causal))(z[0])
        for one, other in zip(tree_leaves(got), tree_leaves(expected), strict=True):
            close(one, other)


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0), (1, 2), (2, 1)], ids=str)
def test_vmap_may_run_over_tokens_and_bias(dims, z, causal):
    bias = torch.randn(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.float64)
    z = z if dims[0] is not None else z[0]
    bias = bias if dims[1] is not None else bias[0]
    z = z if dims[0] is None else z.movedim(0, dims[0])
    bias = bias if dims[1] is None else bias.movedim(0, dims[1])
    got = torch.func.vmap(lambda z, b: l2_attention(z, b, causal=causal), dims)(z, bias)
    close(got, torch.func.vmap(lambda z, b: naive(z, b, causal), dims)(z, bias))


def test_a_gradient_taken_through_vjp_is_that_of_the_naive_formula(z, bias, causal):
    """Inside vjp the tokens still require a gradient outside: two graphs that must not be mixed up."""
    weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    v = torch.randn_like(z)
    found = []
    for f in (lambda z: l2_attention(z, bias, causal=causal), lambda z: naive(z, bias, causal)):
        pulled = torch.func.vjp(lambda z, f=f: f(z @ weight), z)[1](v)[0]
        found.append(torch.autograd.grad(pulled.square().sum(), weight)[0])
    close(*found, 1e-11)


def test_inference_mode_gives_the_same(z, bias, causal):
    dz = torch.randn_like(z)

    def everything():
        return tree_leaves(
            [
                attention_weights(z, bias, causal=causal),
                l2_attention(z, bias, causal=causal),
                l2_attention_jvp(z, dz, bias, causal=causal),
                diagonal_blocks(z, bias, causal=causal),
                jacobian_blocks(z, bias, causal=causal),
                torch.func.jvp(lambda z: l2_attention(z, bias, causal=causal), (z,), (dz,)),
                torch.func.vjp(lambda z: l2_attention(z, bias, causal=causal), z)[1](dz),
            ]
        )

    expected = everything()
    with torch.inference_mode():
        for one, other in zip(everything(), expected, strict=True):
            close(one.clone(), other)


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_compiled_attention_and_its_gradient_are_the_same(with_bias, causal, z, without_shape_checks):
    torch.compiler.reset()
    bias = torch.randn(TOKENS, TOKENS, dtype=torch.float64, requires_grad=True) if with_bias else None
    inputs = [t for t in (z.requires_grad_(), bias) if t is not None]

    def f(*a):
        return l2_attention(*a, causal=causal)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    expected, got = f(*inputs), compiled(*inputs)
    close(got, expected)
    pairs = zip(
        torch.autograd.grad(got.pow(3).sum(), inputs), torch.autograd.grad(expected.pow(3).sum(), inputs), strict=True
    )
    for one, other in pairs:
        close(one, other)


MODULES = {
    "attention": lambda: L2SelfAttention(4, 2),
    "attention with everything": lambda: L2SelfAttention(
        4, 2, causal=True, position_bias="learned", radius="learned", max_tokens=9
    ),
    "attention in norm 2": lambda: L2SelfAttention(4, 2, position_bias="alibi", norm="2"),
    "dot products": lambda: DotProductSelfAttention(4, 2),
    "feed-forward": lambda: FeedForward(4, 8, activation="clipswish"),
    "chain": lambda: Compose(TokenLinear(4, 6), L2SelfAttention(6, 2, coefficient=None), TokenLinear(6, 4)),
}
each_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


@each_module
def test_compiled_modules_and_their_gradients_are_the_same(make, without_shape_checks):
    torch.compiler.reset()
    f = make().double()
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    inputs = [x, *f.parameters()]
    expected, got = f(x, mask), torch.compile(f, backend="aot_eager", fullgraph=True)(x, mask)
    close(got, expected, 1e-11)
    pairs = zip(
        torch.autograd.grad(got.pow(3).sum(), inputs, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(expected.pow(3).sum(), inputs, allow_unused=True, materialize_grads=True),
        strict=True,
    )
    for one, other in pairs:
        close(one, other, 1e-9)


@each_module
def test_modules_run_under_inference_mode_with_their_derivatives(make):
    f = make().double()
    x, v = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])

    def everything():
        results = [f(x, mask), f.jvp(x, v, mask), f.forward_and_jacobian(x, mask)]
        value, blocks = f.forward_and_diagonal(x, mask)
        return [t.detach() for t in tree_leaves([*results, value, blocks.dense(), blocks.logabsdet()])]

    expected = everything()
    with torch.inference_mode():
        for one, other in zip(everything(), expected, strict=True):
            close(one.clone(), other)


@each_module
def test_modules_give_per_sample_gradients_under_torch_func(make):
    f = make().double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    weights = dict(f.named_parameters())

    def loss(weights, sample):
        return torch.func.functional_call(f, weights, (sample.unsqueeze(0),)).pow(3).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    total = torch.autograd.grad(f(x).pow(3).sum(), list(weights.values()), allow_unused=True, materialize_grads=True)
    for name, expected in zip(weights, total, strict=True):
        close(per_sample[name].sum(0), expected, 1e-10)


# -- precision and memory

SHIFTED = {
    "attention": ({}, None),
    "causal": ({"causal": True}, None),
    "bias": ({"position_bias": "alibi"}, None),
    "context": ({"context_features": 3}, None),
    "constrained": ({"coefficient": 0.9}, None),
    "padding at the end": ({}, "end"),
    "causal, padding at the end": ({"causal": True}, "end"),
    "padding at the start": ({}, "start"),
    "causal, padding at the start": ({"causal": True}, "start"),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_tokens_far_from_the_origin_keep_their_digits(causal, training):
    z = torch.randn(2, 3, 64, 8) + 1e4
    exact = l2_attention(z.double(), causal=causal)
    error = (l2_attention(z.requires_grad_(training), causal=causal) - exact).abs().max() / exact.abs().max()
    assert error.item() <= 1e-6
    close(attention_weights(z, causal=causal).double(), naive_weights(z.double(), None, causal), 1e-5)
    blocks = diagonal_blocks(z.double(), causal=causal)[1]
    close(diagonal_blocks(z, causal=causal)[1].double(), blocks, 1e-4)


@pytest.mark.parametrize(("options", "padding"), SHIFTED.values(), ids=SHIFTED.keys())
def test_attention_far_from_the_origin_keeps_its_digits(options, padding):
    f = L2SelfAttention(8, 2, **{"coefficient": None, **options})
    x = torch.randn(2, 64, 8) + 1e4
    context = torch.randn(2, 3) if "context_features" in options else None
    mask = None
    if padding is not None:
        mask = torch.ones(2, 64, dtype=torch.bool)
        mask[:, 32:] = False
        mask = mask if padding == "end" else mask.flip(-1)
    got = f(x, mask, context)
    exact = f.double()(x.double(), mask, None if context is None else context.double())
    error = (got - exact).abs().max() / exact.abs().max()
    assert error.item() <= 1e-5  # the bounds of W and B differ by 6e-6


class Largest(TorchDispatchMode):
    """Records the number of entries of the largest tensor that any operation makes."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.entries = max(self.entries, t.untyped_storage().nbytes() // t.element_size())
        return result


LONG = {"sees all": {}, "causal": {"causal": True}, "padding": {"mask": True}, "ball": {"radius": 1.0}}


@pytest.mark.parametrize("options", LONG.values(), ids=LONG.keys())
def test_no_tensor_of_all_pairs_is_made_without_a_bias(options):
    tokens = 16384
    mask = torch.ones(1, tokens, dtype=torch.bool) if options.pop("mask", False) else None
    f = L2SelfAttention(4, 1, head_features=4, **options)
    x = torch.randn(1, tokens, 4, requires_grad=True)
    with Largest() as largest:
        f(x, mask).sum().backward()
    assert x.grad is not None
    assert tokens * 4 <= largest.entries <= tokens * 64
    with torch.inference_mode(), Largest() as largest:
        f(x, mask)
    assert tokens * 4 <= largest.entries <= tokens * 64


def test_the_record_of_the_largest_tensor_would_see_all_pairs():
    z = torch.randn(64, 4)
    with Largest() as largest:
        attention_weights(z)
    assert largest.entries == 64 * 64


# -- tokens far apart


@pytest.mark.parametrize("way", ["autograd", "torch.func"])
@pytest.mark.parametrize("rows", [None, 1, 12])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("scale", "offset"), [(1, 1e3), (5, 0), (40, 0), (1e3, 0), (1e4, 0), (1e6, 0)])
def test_gradients_keep_their_digits_however_far_tokens_lie(scale, offset, causal, rows, way):
    z = scale * torch.randn(2, 3, 12, 8) + offset
    bias, weight = None if rows is None else torch.randn(rows, 12), torch.randn_like(z)

    def gradient(attention, z):
        if way == "torch.func":
            return torch.func.grad(lambda z: (attention(z) * weight).sum())(z)
        z = z.clone().requires_grad_()
        return torch.autograd.grad((attention(z) * weight).sum(), z)[0]

    got = gradient(lambda z: l2_attention(z, bias, causal=causal), z)
    expected = gradient(lambda z: naive(z, bias, causal), z.double())
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [1, 10, 1e2, 1e3, 1e4, 1e6, 1e15])
def test_directional_derivatives_keep_their_digits_however_far_tokens_lie(scale, causal):
    z, dz = scale * torch.randn(2, 3, 60, 8), torch.randn(2, 3, 60, 8)
    got = l2_attention_jvp(z, dz, causal=causal)[1]
    expected = l2_attention_jvp(z.double(), dz.double(), causal=causal)[1]
    assert (got - expected).norm() < 2e-4 * expected.norm()
    if scale >= 1e4:  # each sees itself alone
        close(got, dz, 1e-5)


@pytest.mark.parametrize("rows", [None, 1, 12])
@pytest.mark.parametrize("causal", [False, True])
def test_every_kind_of_derivative_may_be_taken_of_tokens_far_apart(causal, rows):
    z, dz = 1e3 * torch.randn(2, 12, 8), torch.randn(3, 2, 12, 8)
    bias = None if rows is None else torch.randn(rows, 12)
    leaf = z.clone().requires_grad_()
    batched = torch.autograd.grad(l2_attention(leaf, bias, causal=causal), leaf, dz, is_grads_batched=True)[0]
    close(batched, dz, 1e-5)  # each sees itself alone
    with torch.autograd.forward_ad.dual_level():
        dual = l2_attention(torch.autograd.forward_ad.make_dual(z, dz[0]), bias, causal=causal)
        assert torch.autograd.forward_ad.unpack_dual(dual).tangent.isfinite().all()


def test_gradients_keep_their_digits_where_tokens_see_others_alone():
    z = (1e4 * torch.randn(12, 8)).requires_grad_()
    bias = torch.zeros(12, 12).masked_fill(torch.eye(12, dtype=torch.bool), HIDDEN)
    weight = torch.randn_like(z)
    got = torch.autograd.grad((l2_attention(z, bias) * weight).sum(), z)[0]
    exact = z.detach().double().requires_grad_()
    expected = torch.autograd.grad((naive(exact, bias.double()) * weight).sum(), exact)[0]
    close(got.double(), expected, 1e-3)


def test_a_far_token_does_not_change_those_before_it():
    z = torch.randn(2, 40, 8)
    far = z.clone()
    far[:, -1] = 1e4
    for recorded in (False, True):
        one, other = (l2_attention(t.requires_grad_(recorded), causal=True)[:, :-1] for t in (z, far))
        assert torch.equal(one, other)


def test_attention_has_a_shape_where_it_has_no_values():
    z = torch.randn(2, 400, 8, device="meta").requires_grad_()
    m = l2_attention(z)
    m.sum().backward()
    assert m.shape == z.grad.shape == (2, 400, 8)
