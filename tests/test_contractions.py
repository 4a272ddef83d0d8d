"""Contractions: their bounds hold, their closed forms are right, and nothing leaks through masks."""

import copy
import math
import random

import pytest
import torch
from adversary import worst_stretch
from torch import nn

import flowattn.contractions.attention as attention_module
from flowattn.contractions import (
    Compose,
    Contraction,
    Declared,
    DotProductSelfAttention,
    FeedForward,
    L2SelfAttention,
    TokenLinear,
)
from flowattn.contractions.activations import ACTIVATIONS
from flowattn.lipschitz import sequence_norm
from flowattn.lipschitz.search import search_lipschitz
from flowattn.transforms import AutoregressiveAttention

FEATURES, TOKENS, CONTEXT = 3, 5, 2


def close(one, other, tolerance=1e-12):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def chain(**options):
    """Three features lifted to six, attention there, and back."""
    return Compose(
        TokenLinear(FEATURES, 6),
        L2SelfAttention(6, 2, coefficient=None, **options),
        FeedForward(6, 7, out_features=FEATURES, coefficient=None),
    )


def lifted(**options):
    """The same with affine maps around attention."""
    return Compose(
        TokenLinear(FEATURES, 6), L2SelfAttention(6, 2, coefficient=None, **options), TokenLinear(6, FEATURES)
    )


CONTRACTIONS = {
    "attention": lambda: L2SelfAttention(FEATURES, 3),
    "attention, free": lambda: L2SelfAttention(FEATURES, 1, coefficient=None),
    "attention, narrow heads": lambda: L2SelfAttention(FEATURES, 2, head_features=1),
    "attention, many heads": lambda: L2SelfAttention(FEATURES, 4, head_features=2),
    "attention, alibi": lambda: L2SelfAttention(FEATURES, 2, head_features=2, position_bias="alibi"),
    "attention, learned bias": lambda: L2SelfAttention(FEATURES, 3, position_bias="learned", max_tokens=9),
    "attention, ball": lambda: L2SelfAttention(FEATURES, 2, head_features=2, radius=0.7),
    "attention, learned balls": lambda: L2SelfAttention(FEATURES, 2, head_features=2, radius="learned"),
    "attention, norm inf": lambda: L2SelfAttention(FEATURES, 3, norm="inf"),
    "attention, norm inf, ball": lambda: L2SelfAttention(FEATURES, 3, norm="inf", radius=1.0),
    "attention, norm 2": lambda: L2SelfAttention(FEATURES, 3, norm="2"),
    "attention, context": lambda: L2SelfAttention(FEATURES, 2, head_features=2, radius=1.0, context_features=CONTEXT),
    "causal": lambda: L2SelfAttention(FEATURES, 3, causal=True),
    "causal, many heads": lambda: L2SelfAttention(FEATURES, 2, head_features=3, causal=True),
    "causal, alibi": lambda: L2SelfAttention(FEATURES, 3, causal=True, position_bias="alibi"),
    "causal, everything": lambda: L2SelfAttention(
        FEATURES, 3, causal=True, position_bias="learned", radius="learned", max_tokens=9, context_features=CONTEXT
    ),
    "causal, norm inf": lambda: L2SelfAttention(FEATURES, 3, causal=True, norm="inf", position_bias="alibi"),
    "causal, norm 2": lambda: L2SelfAttention(FEATURES, 3, causal=True, norm="2", max_tokens=9, radius=2.0),
    "dot products": lambda: DotProductSelfAttention(FEATURES, 3),
    "dot products, causal, everything": lambda: DotProductSelfAttention(
        FEATURES, 2, head_features=2, causal=True, position_bias="learned", max_tokens=9, context_features=CONTEXT
    ),
    "feed-forward": lambda: FeedForward(FEATURES, 7),
    "feed-forward, deep, clipswish": lambda: FeedForward(FEATURES, 4, num_layers=4, activation="clipswish"),
    "feed-forward, tanh": lambda: FeedForward(FEATURES, 7, activation="tanh", num_layers=3),
    "feed-forward, sin": lambda: FeedForward(FEATURES, 7, activation="sin"),
    "feed-forward, one layer": lambda: FeedForward(FEATURES, 7, num_layers=1, context_features=CONTEXT),
    "feed-forward, context": lambda: FeedForward(FEATURES, 7, num_layers=3, context_features=CONTEXT),
    "linear": lambda: TokenLinear(FEATURES, FEATURES, coefficient=0.5),
    "chain": chain,
    "chain, causal": lambda: chain(causal=True, position_bias="alibi"),
    "chain, ball and context": lambda: chain(radius="learned", context_features=CONTEXT),
    "chain, affine": lifted,
    "chain, affine, ball and context": lambda: lifted(radius="learned", context_features=CONTEXT),
    "chain, affine, causal": lambda: lifted(causal=True, position_bias="alibi", radius=1.0, head_features=2),
    "chain, lifted twice": lambda: Compose(
        TokenLinear(FEATURES, 5, coefficient=0.8),
        FeedForward(5, 1, num_layers=1, coefficient=None, out_features=6, context_features=CONTEXT),
        L2SelfAttention(6, 2, coefficient=None, context_features=CONTEXT, position_bias="alibi"),
        TokenLinear(6, 4, coefficient=0.9),
        TokenLinear(4, FEATURES),
    ),
    "chain, causal, context after attention": lambda: Compose(
        TokenLinear(FEATURES, 4),
        L2SelfAttention(4, 2, coefficient=None, causal=True),
        FeedForward(4, 1, num_layers=1, coefficient=None, out_features=FEATURES, context_features=CONTEXT),
    ),
    "chain, networks around attention": lambda: Compose(
        FeedForward(FEATURES, 5, coefficient=None, out_features=4),
        L2SelfAttention(4, 2, coefficient=None),
        FeedForward(4, 5, coefficient=None, out_features=FEATURES),
    ),
    "chain, free": lambda: Compose(TokenLinear(FEATURES, 6), TokenLinear(6, FEATURES), coefficient=None),
    "chain of attention": lambda: Compose(
        L2SelfAttention(FEATURES, 3, causal=True, coefficient=0.9),
        Compose(TokenLinear(FEATURES, 4), L2SelfAttention(4, 1, coefficient=None), coefficient=None),
        L2SelfAttention(4, 2, causal=True, coefficient=None),
        TokenLinear(4, FEATURES),
    ),
    "chain, tokenwise": lambda: Compose(
        FeedForward(FEATURES, 5, out_features=4, context_features=CONTEXT), FeedForward(4, 6, out_features=FEATURES)
    ),
    "chain, causal twice": lambda: Compose(
        L2SelfAttention(FEATURES, 3, causal=True, coefficient=None),
        FeedForward(FEATURES, 5, coefficient=None),
        L2SelfAttention(FEATURES, 1, causal=True, coefficient=None, radius=1.0, context_features=CONTEXT),
    ),
}
each = pytest.mark.parametrize("make", CONTRACTIONS.values(), ids=CONTRACTIONS.keys())


def subset(keep):
    chosen = {name: make for name, make in CONTRACTIONS.items() if keep(make())}
    return pytest.mark.parametrize("make", chosen.values(), ids=chosen.keys())


each_constrained = subset(lambda f: f.coefficient is not None)
each_causal = subset(lambda f: f.structure == "causal")


def randomised(f, scale=1.0):
    """In float64, every parameter somewhere else: biases not zero, tables not slopes."""
    f = f.double()
    with torch.no_grad():
        for p in f.parameters():
            p.add_(0.3 * torch.randn_like(p)).mul_(scale)
    return f


def inputs(f, batch=2, tokens=TOKENS, dtype=torch.float64):
    """Tokens, and a context of one row per token where one is wanted."""
    x = torch.randn(batch, tokens, f.features, dtype=dtype)
    context = None if f.context_features is None else torch.randn(batch, tokens, f.context_features, dtype=dtype)
    return x, context


PADDED = torch.tensor([[True] * 5, [True, True, True, False, False]])


# -- the paper's formula


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_paper_weights_give_the_formula_of_the_paper(heads, width):
    features = 8
    w_q, w_v = torch.randn(2, heads, features, width, dtype=torch.float64) / 2
    w_o = torch.randn(heads, width, features, dtype=torch.float64)
    X = torch.randn(3, 6, features, dtype=torch.float64)
    expected = torch.zeros_like(X)
    for b in range(3):
        for h in range(heads):
            Q = X[b] @ w_q[h]
            P = torch.zeros(6, 6, dtype=torch.float64)
            for i in range(6):
                for j in range(6):
                    P[i, j] = -(Q[i] - Q[j]).square().sum() / math.sqrt(width)
            A = w_q[h] @ w_q[h].T / math.sqrt(width)
            expected[b] += P.softmax(-1) @ X[b] @ A @ w_v[h] @ w_o[h]
    f = L2SelfAttention.from_paper_weights(w_q, w_v, w_o)
    close(f(X), expected)
    assert f.coefficient is None and f.W.dtype == torch.float64
    constrained = L2SelfAttention.from_paper_weights(w_q, w_v, w_o, coefficient=0.5)
    close(constrained(X), expected * constrained.scale(6)[:, None])
    assert constrained.lipschitz_bound(6).item() <= 0.5


def test_paper_weights_may_have_values_of_another_width():
    w_q, w_v, w_o = torch.randn(2, 4, 3), torch.randn(2, 4, 5), torch.randn(2, 5, 4)
    assert L2SelfAttention.from_paper_weights(w_q, w_v, w_o)(torch.randn(1, 3, 4)).shape == (1, 3, 4)


# -- adversarial search against the bound


def random_contraction(draw):
    """A map, a number of tokens, a mask and a norm, of every kind there is."""
    tokens, features = draw.choice([1, 2, 3, 5, 8, 16, 33, 64]), draw.choice([1, 2, 3, 4, 7, 16])
    heads, scale = draw.choice([1, 1, 2, 3, 4]), 10 ** draw.uniform(-1, math.log10(30))
    coefficient, norm = draw.choice([None, 0.97, 0.5]), draw.choice(["token", "token", "inf", "2"])
    options = {
        "head_features": draw.choice([1, 1, 2, 3, 5]),
        "causal": draw.random() < 0.4,
        "position_bias": draw.choice([None, None, "alibi", "learned"]),
        "radius": draw.choice([None, None, 10 ** draw.uniform(-1, 1), "learned"]),
        "max_tokens": 64,
    }
    kind = draw.choice(["attention"] * 6 + ["chain"] * 2 + ["feed-forward"])
    if kind == "attention":
        f = L2SelfAttention(features, heads, coefficient=coefficient, norm=norm, **options)
    elif kind == "chain":
        wide, activation = draw.choice([2, 5, 9]), draw.choice(list(ACTIVATIONS))
        parts = [
            TokenLinear(features, wide),
            L2SelfAttention(wide, heads, coefficient=draw.choice([None, 0.9]), **options),
            FeedForward(wide, 6, out_features=features, activation=activation, coefficient=None),
        ]
        if draw.random() < 0.3:
            parts.append(L2SelfAttention(features, 1, coefficient=None, causal=draw.random() < 0.5))
        f = Compose(*parts, coefficient=coefficient)
    else:
        activation, layers = draw.choice(list(ACTIVATIONS)), draw.choice([1, 2, 3])
        f = FeedForward(features, 6, num_layers=layers, activation=activation, coefficient=coefficient)
    f = f.double()
    with torch.no_grad():
        for name, p in f.named_parameters():
            if p.ndim >= 2:
                p.mul_(scale).add_(draw.choice([0, scale]) * 0.1 * torch.randn_like(p))
            elif "log_radius" in name:
                p.add_(torch.randn_like(p))
    mask = None
    if tokens > 1 and draw.random() < 0.3:
        mask = torch.rand(tokens) < 0.7
        mask[draw.randrange(tokens)] = True
    return f, tokens, mask, norm, 1 / scale


def check_the_bound_by_search(seed, steps):
    torch.manual_seed(seed)
    f, tokens, mask, norm, size = random_contraction(random.Random(seed))
    found, row, _ = worst_stretch(f, tokens, norm, mask=mask, size=size, steps=steps)
    batch = None if mask is None else mask[None]
    rows = (f.row_bounds(tokens, batch, norm) * f.scale(tokens, batch)).expand(1, tokens)[0]
    claimed = f.whole_bound(rows if mask is None else rows[mask], norm) if norm == "2" else rows[row]
    assert (found <= claimed * (1 + 1e-9)).all(), (found, claimed)
    assert found.max() <= f.lipschitz_bound(tokens, norm) * (1 + 1e-9)
    if f.coefficient is not None and f.norm == norm:
        assert found.max() <= f.coefficient


@pytest.mark.parametrize("seed", range(16))
def test_search_never_exceeds_the_bound(seed):
    check_the_bound_by_search(seed, steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 400, 20))
def test_search_never_exceeds_the_bound_of_many(start):
    for seed in range(start, start + 20):
        check_the_bound_by_search(seed, steps=60)


TOO_SMALL = {
    "stretch of attention": ("attention_stretch", {"position_bias": "alibi"}, "token"),
    "stretch of the tokens before": ("counted_stretches", {"causal": True}, "token"),
    "stretch of counted tokens": ("counted_stretch", {}, "token"),
    "stretch in the ball": ("ball_stretch", {"radius": 1.0}, "token"),
    "bound of rows": ("token_bound", {}, "token"),
    "bound of rows in norm inf": ("infinity_bound", {"norm": "inf"}, "inf"),
}


@pytest.mark.parametrize(("name", "options", "norm"), TOO_SMALL.values(), ids=TOO_SMALL.keys())
def test_search_would_notice_a_bound_that_is_too_small(name, options, norm, monkeypatch):
    """A third less in any of the formulas, and the search is above it: it can fail."""
    right = getattr(attention_module, name)

    def less(*args, **kwargs):
        value = right(*args, **kwargs)
        return tuple(0.66 * v for v in value) if isinstance(value, tuple) else 0.66 * value

    monkeypatch.setattr(attention_module, name, less)
    f = L2SelfAttention(1, 1, coefficient=None, **options).double()
    found = worst_stretch(f, 32, norm, size=1 / abs(f.W.item()), num_starts=12)[0].max()
    assert found > f.lipschitz_bound(32, norm)


def reached(features, width, tokens, aligned, **search):
    """The token bound of one head over the best input found."""
    f = L2SelfAttention(features, 1, head_features=width, coefficient=None).double()
    if aligned:  # what W stretches most is what B stretches most, else no input can use both
        with torch.no_grad():
            f.B.copy_(f.W.mT)
    found = search_lipschitz(f, (tokens, features), dtype=torch.float64, **search).constant
    ratio = f.lipschitz_bound(tokens).item() / found
    assert ratio >= 1
    return ratio


def test_search_comes_near_the_bound_of_one_head():
    assert reached(2, 1, 64, False, num_restarts=8, num_steps=40) <= 1.35


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [64, 100, 256])
@pytest.mark.parametrize(
    ("features", "width", "aligned"), [(1, 1, False), (3, 1, False), (16, 1, False), (2, 2, True), (8, 8, True)]
)
def test_search_comes_near_the_bound_of_every_single_head(features, width, aligned, tokens):
    assert reached(features, width, tokens, aligned, num_restarts=16, num_steps=100) <= 1.35


@each_constrained
def test_two_inputs_never_come_out_further_apart(make):
    f = randomised(make(), 3.0)
    x, context = inputs(f, batch=64)
    for distance in (1e-3, 0.1, 10.0):
        y = x + distance * torch.randn_like(x)
        apart = sequence_norm(f(x, None, context) - f(y, None, context), f.norm)
        assert (apart <= f.coefficient * sequence_norm(x - y, f.norm)).all()


# -- closed forms


def autograd_jacobian(f, x, mask, context):
    """[B, N, D_out, N, D_in]; one sequence does not depend on another."""
    full = torch.autograd.functional.jacobian(lambda x: f(x, mask, context), x)
    for b in range(len(x)):
        for other in set(range(len(x))) - {b}:
            assert (full[b, :, :, other] == 0).all()
    return torch.stack([full[b, :, :, b] for b in range(len(x))])


@each
@pytest.mark.parametrize("mask", [None, PADDED], ids=["all real", "padding"])
def test_closed_forms_are_the_derivatives_by_autograd(make, mask):
    f = randomised(make())
    x, context = inputs(f)
    v = torch.randn_like(x)
    value, J = f(x, mask, context), autograd_jacobian(f, x, mask, context)
    for got in (
        f.jvp(x, v, mask, context)[0],
        f.forward_and_diagonal(x, mask, context)[0],
        f.forward_and_jacobian(x, mask, context)[0],
    ):
        close(got, value)
    close(f.jvp(x, v, mask, context)[1], torch.einsum("bnimj,bmj->bni", J, v))
    close(f.forward_and_jacobian(x, mask, context)[1], J)
    diagonal = J.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    blocks = f.forward_and_diagonal(x, mask, context)[1]
    close(blocks.dense(), diagonal)
    close(blocks.logabsdet(), torch.linalg.slogdet(torch.eye(FEATURES) + diagonal).logabsdet.sum(-1))


@each
def test_a_derivative_is_computed_once_for_many_directions(make):
    f = randomised(make())
    x, context = inputs(f)
    u, v = torch.randn(2, *x.shape, dtype=torch.float64)
    for mask in (None, PADDED):
        value, push = f.linearize(x, mask, context)
        close(value, f(x, mask, context))
        close(push(v), f.jvp(x, v, mask, context)[1])
        close(push(2 * u - 3 * v), 2 * push(u) - 3 * push(v))


@each
def test_the_structure_is_that_of_the_jacobian(make):
    f = randomised(make())
    x, context = inputs(f)
    J = autograd_jacobian(f, x, None, context).abs().sum((0, 2, 4))
    above, below = J.triu(1), J.tril(-1)
    assert (above > 0).any() == (f.structure == "dense")
    assert (below > 0).any() == (f.structure != "tokenwise")


@subset(lambda f: f.structure != "dense")
def test_blocks_of_a_triangular_map_give_the_determinant_of_all(make):
    f = randomised(make())
    x, context = inputs(f)
    J = f.forward_and_jacobian(x, None, context)[1].flatten(3).flatten(1, 2)
    whole = torch.linalg.slogdet(torch.eye(J.shape[-1]) + J).logabsdet
    close(f.forward_and_diagonal(x, None, context)[1].logabsdet(), whole)


@each
def test_closed_forms_carry_gradients_to_every_parameter(make):
    f = randomised(make())
    x, context = inputs(f)
    v = torch.randn_like(x)
    weights = list(f.parameters())

    def gradients(*results):
        total = sum(r.sin().sum() for r in results)
        return torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True)

    by_autograd = gradients(*torch.func.jvp(lambda x: f(x, None, context), (x,), (v,)))
    for got, expected in zip(gradients(*f.jvp(x, v, None, context)), by_autograd, strict=True):
        close(got, expected, 1e-10)


@subset(lambda f: f.context_features is not None)
def test_a_context_of_one_row_is_that_row_for_every_token(make):
    f = randomised(make())
    x, _ = inputs(f)
    one = torch.randn(2, CONTEXT, dtype=torch.float64)
    every = one.unsqueeze(1).expand(-1, TOKENS, -1).contiguous()
    close(f(x, None, one), f(x, None, every))
    assert (f(x, None, one) - f(x, None, one + 1)).abs().max() > 1e-3


# -- masks


@each_causal
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_causal_rows_depend_neither_on_later_tokens_nor_on_the_length(make, dtype, tolerance):
    f = randomised(make()).to(dtype)
    x, context = inputs(f, tokens=9, dtype=dtype)
    whole = f(x, None, context)
    for length in (1, 2, 5, 8):
        cut = f(x[:, :length], None, None if context is None else context[:, :length])
        close(cut, whole[:, :length], tolerance)
        later = x.clone()
        later[:, length:] = 1e3 * torch.randn_like(later[:, length:])
        close(f(later, None, context)[:, :length], whole[:, :length], tolerance)


@each
@pytest.mark.parametrize("garbage", [0.0, 1e5, math.nan, math.inf])
def test_padding_changes_no_real_token(make, garbage):
    f = randomised(make())
    x, context = inputs(f, tokens=3)
    alone = f(x, None, context)
    padded = torch.cat([x, torch.full_like(x, garbage)], 1)
    mask = (torch.arange(6) < 3).expand(2, 6)
    context = None if context is None else torch.cat([context, torch.ones_like(context)], 1)
    got = f(padded.requires_grad_(), mask, context)
    close(got[:, :3], alone)
    assert (got[:, 3:] == 0).all()
    (g,) = torch.autograd.grad(got.sum(), padded)
    assert g.isfinite().all() and (g[:, 3:] == 0).all()


@pytest.mark.parametrize("garbage", [1e5, math.nan, math.inf])
def test_the_context_of_padding_changes_no_real_token(garbage):
    f = randomised(L2SelfAttention(FEATURES, 3, context_features=CONTEXT))
    x, context = inputs(f)
    spoiled = context.masked_fill(~PADDED.unsqueeze(-1), garbage)
    close(f(x, PADDED, spoiled), f(x, PADDED, context))


@each
def test_padding_may_be_anywhere(make):
    f = randomised(make())
    x, context = inputs(f, tokens=4)
    mask = torch.tensor([[False, True, True, False], [True, False, True, True]])
    got, jacobian = f(x, mask, context), f.forward_and_jacobian(x, mask, context)[1]
    assert (got[~mask] == 0).all()
    assert (jacobian.movedim(3, 2)[~mask] == 0).all() and (jacobian.movedim(3, 1)[~mask] == 0).all()
    close(f(x + (~mask).unsqueeze(-1) * 7.0, mask, context), got)
    if not any(getattr(part, "position_bias", None) for part in f.modules()):  # positions count padding too
        for b in range(2):
            own = context if context is None else context[b : b + 1, mask[b]]
            close(got[b, mask[b]], f(x[b : b + 1, mask[b]], None, own)[0])


@each
def test_a_sequence_of_padding_is_all_zero_and_spoils_nothing(make):
    f = randomised(make())
    x, context = inputs(f)
    mask = torch.tensor([[True] * TOKENS, [False] * TOKENS])
    got = f(x.requires_grad_(), mask, context)
    assert (got[1] == 0).all()
    close(got[:1], f(x[:1], mask[:1], None if context is None else context[:1]))
    gradients = torch.autograd.grad(got.sum(), [x, *f.parameters()], allow_unused=True, materialize_grads=True)
    assert all(g.isfinite().all() for g in gradients)
    _, blocks = f.forward_and_diagonal(x, mask, context)
    assert blocks.logabsdet()[1].abs() < 1e-14


@each
def test_a_sequence_does_not_depend_on_its_batch_mates(make):
    f = randomised(make())
    x, context = inputs(f)
    other = x.clone()
    other[1] = 100 * torch.randn_like(other[1])
    for mask in (None, PADDED):
        close(f(x, mask, context)[0], f(other, mask, context)[0])
        alone = f(x[:1], None if mask is None else mask[:1], None if context is None else context[:1])
        close(f(x, mask, context)[:1], alone)


# -- always contractive


@each
def test_eval_and_train_agree(make):
    f = randomised(make())
    x, context = inputs(f)
    expected = f.train()(x, None, context)
    assert (f.eval()(x, None, context) == expected).all()


@each_constrained
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_bound_is_at_most_the_coefficient(make, dtype, scale):
    f = randomised(make(), scale).to(dtype)
    for tokens in (1, 2, 5, 9):
        bound = f.lipschitz_bound(tokens, f.norm).item()
        assert 0 < bound <= f.coefficient
        short = f.norm == "2" and f.structure == "causal" and tokens < f.max_tokens  # scaled for the longest
        if scale == 1e3 and not short and not isinstance(f, Compose):  # whose parts may be contractions themselves
            assert bound >= f.coefficient * (1 - 1e-5)


@pytest.mark.parametrize("norm", ["token", "inf", "2"])
@pytest.mark.parametrize("coefficient", [1e-3, 0.3, 0.5, 0.9, 0.97, 0.999999])
def test_bound_of_any_length_is_at_most_the_coefficient(norm, coefficient):
    for dtype in (torch.float32, torch.float64):
        f = L2SelfAttention(8, 2, coefficient=coefficient, norm=norm).to(dtype)
        for tokens in (*range(1, 40), 777, 10**4):
            assert f.lipschitz_bound(tokens, norm).item() <= coefficient


@each_constrained
def test_a_loaded_state_is_contractive_at_once(make):
    f, fresh = randomised(make(), 10.0), make().double()
    x, context = inputs(f, batch=32)
    fresh.load_state_dict(f.state_dict())
    assert (fresh(x, None, context) == f(x, None, context)).all()
    y = x + 0.1 * torch.randn_like(x)
    apart = sequence_norm(fresh(x, None, context) - fresh(y, None, context), f.norm)
    assert (apart <= f.coefficient * sequence_norm(x - y, f.norm)).all()
    assert fresh.lipschitz_bound(TOKENS, f.norm).item() <= f.coefficient


@each_constrained
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_a_thousand_times_larger_are_contractive_at_once(make, dtype):
    f = make().to(dtype)
    x, context = inputs(f, batch=16, dtype=dtype)
    f(x, None, context)
    with torch.no_grad():
        for p in f.parameters():
            p.mul_(1e3)
    y = x + 0.1 * torch.randn_like(x)
    one, other = f(x, None, context), f(y, None, context)
    assert one.isfinite().all() and other.isfinite().all()
    slack = 1e-3 if dtype == torch.float32 else 1e-9  # values of a thousand are rounded
    assert (sequence_norm(one - other, f.norm) <= f.coefficient * sequence_norm(x - y, f.norm) + slack).all()
    assert f.lipschitz_bound(TOKENS, f.norm).item() <= f.coefficient
    gradients = torch.autograd.grad(one.sum(), list(f.parameters()), allow_unused=True, materialize_grads=True)
    assert all(g.isfinite().all() for g in gradients)


def test_gradients_flow_through_the_bound():
    f = randomised(L2SelfAttention(FEATURES, 3, position_bias="learned", radius="learned", max_tokens=TOKENS), 2.0)
    x, _ = inputs(f)
    weights = {name: p.detach().clone().requires_grad_() for name, p in f.named_parameters()}

    def loss(*values):
        return torch.func.functional_call(f, dict(zip(weights, values, strict=True)), (x,)).sin().sum()

    assert torch.autograd.gradcheck(loss, tuple(weights.values()))
    # The map divides by the length of B, so moving along B itself changes nothing.
    g = torch.autograd.grad(loss(*weights.values()), weights["B"])[0]
    assert abs((g * weights["B"]).sum()) < 1e-10 * g.norm() * weights["B"].norm()
    assert g.norm() > 1e-3


@each_constrained
def test_gradients_of_the_scaled_map_pass_gradcheck(make):
    f = randomised(make(), 2.0)
    x, context = inputs(f, batch=1, tokens=2)
    weights = {name: p.detach().clone().requires_grad_() for name, p in f.named_parameters()}

    def loss(*values):
        return torch.func.functional_call(f, dict(zip(weights, values, strict=True)), (x, None, context)).sin().sum()

    assert torch.autograd.gradcheck(loss, tuple(weights.values()), fast_mode=True)


@pytest.mark.parametrize("norm", ["token", "inf", "2"])
def test_a_map_that_starts_at_zero_works_and_learns(norm):
    f = L2SelfAttention(4, 2, norm=norm, radius="learned", position_bias="learned", max_tokens=TOKENS)
    torch.nn.init.zeros_(f.B)
    x = torch.randn(2, TOKENS, 4, requires_grad=True)
    assert (f(x) == 0).all()
    assert f.lipschitz_bound(TOKENS, norm).item() == 0
    gradients = torch.autograd.grad((f(x) - 1).square().sum(), [x, *f.parameters()])
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[1 + [name for name, _ in f.named_parameters()].index("B")].norm() > 0


@each
def test_a_copy_is_the_same_map(make):
    f = randomised(make())
    x, context = inputs(f)
    assert (copy.deepcopy(f)(x, None, context) == f(x, None, context)).all()


HALF = {
    "the map": lambda f, x, c: [f(x, PADDED, c)],
    "derivatives along a direction": lambda f, x, c: f.jvp(x, torch.ones_like(x), PADDED, c),
    "diagonal blocks": lambda f, x, c: [f.forward_and_diagonal(x, PADDED, c)[1].dense()],
    "log-determinants": lambda f, x, c: [f.forward_and_diagonal(x, PADDED, c)[1].logabsdet()],
    "the Jacobian": lambda f, x, c: f.forward_and_jacobian(x, PADDED, c),
    "the scale": lambda f, x, c: [f.scale(TOKENS)],
    "the bounds": lambda f, x, c: [f.lipschitz_bound(TOKENS, norm) for norm in ("token", "inf", "2")],
}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("what", HALF.values(), ids=HALF.keys())
@pytest.mark.parametrize("name", ["attention", "causal, everything", "feed-forward", "chain, causal"])
def test_autocast_rounds_nothing_of(what, name, half):
    f = randomised(CONTRACTIONS[name]()).float()
    x, context = inputs(f, dtype=torch.float32)
    x_half, context_half = x.to(half), None if context is None else context.to(half)
    expected = [*what(f, x, context), *what(f, x_half.float(), None if context is None else context_half.float())]
    with torch.autocast("cpu", half):
        got = [*what(f, x, context), *what(f, x_half, context_half)]
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one == other).all()


# -- parts


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_of_activations_are_their_derivatives_and_at_most_one(name):
    activation = ACTIVATIONS[name]().double()
    x = torch.cat([torch.linspace(-30, 30, 60001), torch.tensor([-1e5, 1e5])]).double()
    for sharpness in (-5.0, 0.0, 0.5, 3.0, 40.0) if hasattr(activation, "sharpness") else (None,):
        if sharpness is not None:
            activation.sharpness.data.fill_(sharpness)
        slopes = activation.slopes(x.unsqueeze(-1))
        y, pull = torch.func.vjp(lambda x: activation(x.unsqueeze(-1)), x)
        assert y.shape == slopes.shape == (len(x), activation.expansion)
        for k in range(activation.expansion):
            one = torch.zeros_like(y)
            one[:, k] = 1
            close(slopes[:, k], pull(one)[0])
        length = slopes.norm(dim=-1).max().item()
        assert length <= 1
        assert length > 0.99 or (sharpness is not None and sharpness < 0)  # on a short range if it is hardly bent
        assert slopes.abs().max() <= 1


def test_a_wide_activation_puts_one_block_after_another():
    x = torch.randn(2, 3)
    activation = ACTIVATIONS["clipswish"]()
    close(activation(x)[:, 3:], activation(-x)[:, :3], 1e-6)
    slopes = activation.slopes(x)
    close(slopes[:, :3] - slopes[:, 3:], torch.full((2, 3), 1 / 1.1044), 1e-6)  # so they never vanish together


@pytest.mark.parametrize("norm", ["token", "inf", "2"])
def test_feed_forward_bound_is_the_product_of_norms(norm):
    f = FeedForward(4, 6, num_layers=3, coefficient=None).double()
    order = math.inf if norm == "inf" else 2
    exact = math.prod(torch.linalg.matrix_norm(W.mT, order).item() for W in f.weights)
    assert exact * (1 - 1e-12) <= f.lipschitz_bound(5, norm).item() <= exact * 1.04


def test_bound_of_a_chain_is_the_product():
    lift, attention, back = TokenLinear(2, 8), L2SelfAttention(8, 2, coefficient=None), TokenLinear(8, 2)
    f = Compose(lift, attention, back, coefficient=None)
    for norm in ("token", "inf", "2"):
        product = math.prod(part.lipschitz_bound(7, norm).item() for part in (lift, attention, back))
        assert f.lipschitz_bound(7, norm).item() == pytest.approx(product, rel=1e-6)


def test_attention_among_affine_maps_builds_no_jacobian_of_its_own_width(monkeypatch):
    def refuse(*_):
        raise AssertionError("the inner Jacobian was asked for")

    for name in ("forward_and_jacobian", "forward_and_diagonal"):
        monkeypatch.setattr(L2SelfAttention, name, refuse)
    x = torch.randn(2, TOKENS, FEATURES)
    lifted(radius=1.0).forward_and_logabsdet(x)
    lifted(causal=True).forward_and_diagonal(x)
    lifted().forward_and_jacobian(x)
    with pytest.raises(AssertionError, match="inner Jacobian"):
        chain().forward_and_jacobian(x)


@pytest.mark.parametrize("kind", [L2SelfAttention, TokenLinear])
def test_a_subclass_in_a_chain_is_the_map_it_says_it_is(kind):
    class Halved(kind):
        def free(self, x, mask, context):
            return super().free(x, mask, context) / 2

        free_diagonal, free_jacobian = Contraction.free_diagonal, Contraction.free_jacobian
        scaled, scaled_jacobian = Contraction.scaled, Contraction.scaled_jacobian

    lift = (Halved if kind is TokenLinear else TokenLinear)(FEATURES, 6)
    attention = (Halved if kind is L2SelfAttention else L2SelfAttention)(6, 2, coefficient=None)
    f, x = randomised(Compose(lift, attention, TokenLinear(6, FEATURES))), torch.randn(1, TOKENS, FEATURES).double()
    value, J = f.forward_and_jacobian(x)
    close(value, f(x))
    close(J.squeeze(0), torch.func.jacrev(f)(x).squeeze(3).squeeze(0))


def test_rows_of_a_chain_count_only_what_they_see():
    """A row of causal attention after causal attention sees earlier rows, whose bounds are smaller."""
    one, other = (randomised(L2SelfAttention(2, 1, causal=True, coefficient=None)) for _ in range(2))
    f = Compose(one, other, coefficient=None)
    close(f.row_bounds(6), one.row_bounds(6) * other.row_bounds(6))
    dense = randomised(L2SelfAttention(2, 1, coefficient=None))
    close(Compose(one, dense, coefficient=None).row_bounds(6), one.row_bounds(6)[-1:] * dense.row_bounds(6))
    close(Compose(dense, one, coefficient=None).row_bounds(6), dense.row_bounds(6) * one.row_bounds(6))


def test_a_chain_gives_the_context_to_those_who_want_it():
    wants, does_not = FeedForward(3, 4, context_features=2), L2SelfAttention(3, 1, coefficient=None)
    f = Compose(does_not, wants)
    x, context = torch.randn(2, 4, 3), torch.randn(2, 4, 2)
    assert f.context_features == 2
    expected = wants(does_not(x), None, context) * f.scale(4)[:, None]
    close(f(x, None, context), expected, 1e-6)


def test_dot_products_have_no_bound_and_say_why():
    f = DotProductSelfAttention(4, 2)
    for ask in (lambda: f.lipschitz_bound(3), lambda: Compose(f)(torch.randn(1, 3, 4))):
        with pytest.raises(ValueError, match="no Lipschitz bound: its Jacobian grows with the variance of the tokens"):
            ask()


def test_dot_products_are_those_of_torch():
    f = DotProductSelfAttention(8, 2).double()
    torch_attention = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True).double()
    with torch.no_grad():
        torch_attention.in_proj_weight.copy_(f.in_projection.mT)
        torch_attention.out_proj.weight.copy_(f.out_projection.mT)
    x = torch.randn(2, TOKENS, 8, dtype=torch.float64)
    expected, _ = torch_attention(x, x, x, key_padding_mask=~PADDED)
    close(f(x, PADDED), expected.masked_fill(~PADDED.unsqueeze(-1), 0))


def test_alibi_is_its_slopes_and_learned_tables_start_near_them():
    alibi = L2SelfAttention(4, 4, position_bias="alibi").position_bias(3)
    distance = torch.tensor([[0.0, 1, 2], [1, 0, 1], [2, 1, 0]])
    close(alibi, -torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * distance, 1e-6)
    learned = L2SelfAttention(4, 2, position_bias="learned", max_tokens=7).position_bias(3)
    close(learned, -torch.tensor([0.5, 0.25])[:, None, None] * distance - torch.eye(3), 1e-6)


def test_a_learned_table_is_one_number_per_head_and_relative_position():
    f = L2SelfAttention(4, 2, position_bias="learned", max_tokens=4)
    f.position_bias.table.data.copy_(torch.arange(14.0).view(2, 7))
    expected = [[3.0, 2, 1], [4, 3, 2], [5, 4, 3]]  # i - j = 0 is the middle, and earlier keys come after it
    close(f.position_bias(3)[0], torch.tensor(expected))


# -- wrong input

ATTENTION = {"features": 4, "num_heads": 2}
BUILD = {
    "no features": (L2SelfAttention, {"features": 0}, r"features must be a whole number of at least 1; got features=0"),
    "negative heads": (L2SelfAttention, {"num_heads": -2}, r"num_heads must be a whole number.*got num_heads=-2"),
    "heads are true": (L2SelfAttention, {"num_heads": True}, r"num_heads must be a whole number.*num_heads=True"),
    "heads are no whole number": (L2SelfAttention, {"num_heads": 2.0}, r"num_heads must be a whole.*num_heads=2\.0"),
    "heads do not divide": (L2SelfAttention, {"num_heads": 3}, r"num_heads must divide.*num_heads=3, features=4"),
    "no head features": (L2SelfAttention, {"head_features": 0}, r"head_features must be.*got head_features=0"),
    "no tokens": (L2SelfAttention, {"max_tokens": 0}, r"max_tokens must be.*got max_tokens=0"),
    "no context": (L2SelfAttention, {"context_features": 0}, r"context_features must be.*got context_features=0"),
    "coefficient 0": (L2SelfAttention, {"coefficient": 0}, r"coefficient must be None or between 0 and 1.*=0\."),
    "coefficient 1": (L2SelfAttention, {"coefficient": 1.0}, r"coefficient must be None or between 0 and 1.*=1\.0"),
    "coefficient negative": (L2SelfAttention, {"coefficient": -0.5}, r"coefficient must be .*got coefficient=-0\.5"),
    "coefficient nan": (L2SelfAttention, {"coefficient": math.nan}, r"coefficient must be .*got coefficient=nan"),
    "unknown bias": (L2SelfAttention, {"position_bias": "rope"}, r"position_bias must be one of None, 'alibi', 'lea.*"),
    "table without length": (L2SelfAttention, {"position_bias": "learned"}, r"position_bias='learned' needs max_tok"),
    "radius 0": (L2SelfAttention, {"radius": 0.0}, r"radius must be None, a positive number or 'learned'; .*=0\.0"),
    "radius negative": (L2SelfAttention, {"radius": -1}, r"radius must be None, a positive number.*got radius=-1"),
    "radius infinite": (L2SelfAttention, {"radius": math.inf}, r"radius must be None, a positive number.*=inf"),
    "radius nan": (L2SelfAttention, {"radius": math.nan}, r"radius must be None, a positive number.*=nan"),
    "radius unknown": (L2SelfAttention, {"radius": "big"}, r"radius must be None, a positive number.*='big'"),
    "unknown norm": (L2SelfAttention, {"norm": "fro"}, r"norm must be one of 'token', 'inf', '2'; got norm='fro'"),
    "norm 2, causal": (L2SelfAttention, {"norm": "2", "causal": True}, r"norm='2' with causal=True needs max_tokens"),
    "dots: heads": (DotProductSelfAttention, {"num_heads": 3}, r"num_heads must divide.*num_heads=3, features=4"),
    "dots: bias": (DotProductSelfAttention, {"position_bias": 7}, r"position_bias must be one of .*position_bias=7"),
}


@pytest.mark.parametrize(("kind", "options", "message"), BUILD.values(), ids=BUILD.keys())
def test_attention_refuses_to_be_built_from(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**ATTENTION | options)


FEED_FORWARD = {
    "no features": (lambda: FeedForward(0, 3), r"features must be a whole number.*got features=0"),
    "no hidden": (lambda: FeedForward(3, 0), r"hidden must be a whole number.*got hidden=0"),
    "no layers": (lambda: FeedForward(3, 4, num_layers=0), r"num_layers must be.*got num_layers=0"),
    "no outputs": (lambda: FeedForward(3, 4, out_features=-1), r"out_features must be.*got out_features=-1"),
    "no context": (lambda: FeedForward(3, 4, context_features=0), r"context_features must be.*=0"),
    "coefficient": (lambda: FeedForward(3, 4, coefficient=1), r"coefficient must be None or between 0 and 1; .*=1\."),
    "activation": (lambda: FeedForward(3, 4, activation="relu"), r"activation must be one of 'lipswish'.*='relu'"),
    "linear": (lambda: TokenLinear(3, 0), r"out_features must be.*got out_features=0"),
    "empty chain": (lambda: Compose(), r"parts must hold at least one map; got none"),
    "widths": (lambda: Compose(TokenLinear(2, 3), TokenLinear(4, 2)), r"part 0 with out_features=3 before part 1 .*=4"),
    "chain coefficient": (lambda: Compose(TokenLinear(2, 3), coefficient=2), r"coefficient must be.*coefficient=2"),
    "contexts": (
        lambda: Compose(FeedForward(2, 2, context_features=1), FeedForward(2, 2, context_features=3)),
        r"same context_features; got \[1, 3\]",
    ),
    "norms": (lambda: Compose(L2SelfAttention(2, 1, norm="inf")), r"scaled in norm='token'"),
    "w_q": (
        lambda: L2SelfAttention.from_paper_weights(torch.ones(4, 2), torch.ones(1, 4, 2), torch.ones(1, 2, 4)),
        r"w_q and w_v must have shape \[heads, features, width\]; got \[4, 2\] and \[1, 4, 2\]",
    ),
    "w_v": (
        lambda: L2SelfAttention.from_paper_weights(torch.ones(1, 4, 2), torch.ones(1, 3, 2), torch.ones(1, 2, 4)),
        r"w_q and w_v must have shape",
    ),
    "w_o": (
        lambda: L2SelfAttention.from_paper_weights(torch.ones(1, 4, 2), torch.ones(1, 4, 2), torch.ones(1, 4, 2)),
        r"w_o must have shape \[heads, width, features\] = \[1, 2, 4\]; got \[1, 4, 2\]",
    ),
}


@pytest.mark.parametrize(("build", "message"), FEED_FORWARD.values(), ids=FEED_FORWARD.keys())
def test_maps_refuse_to_be_built_from(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def spoiled(*index, value=math.nan, shape=(2, 5, 4)):
    x = torch.zeros(shape)
    x[index] = value
    return x


X = torch.zeros(2, 5, 4)
TRUE = torch.ones(2, 5, dtype=torch.bool)
CALLS = {
    "two dimensions": ((X[0],), r"x must have shape \[batch, tokens, 4\]; got \[5, 4\]"),
    "too wide": ((torch.zeros(2, 5, 3),), r"x must have shape \[batch, tokens, 4\]; got \[2, 5, 3\]"),
    "whole numbers": ((X.long(),), r"x must be of a floating-point type; got torch.int64"),
    "no tokens": ((X[:, :0],), r"at least one token; got num_tokens=0"),
    "too long": ((torch.zeros(2, 7, 4),), r"at most max_tokens=6 tokens; got 7"),
    "nan": ((spoiled(1, 2, 3),), r"x must be finite; got nan at index \[1, 2, 3\]"),
    "infinite": ((spoiled(0, 1, slice(2, 4), value=-math.inf),), r"x must be finite; got -inf at index \[0, 1, 2\]"),
    "nan at a real token": ((spoiled(1, 2, 3), TRUE), r"x must be finite; got nan at index \[1, 2, 3\]"),
    "mask of numbers": ((X, TRUE.float()), r"mask must be boolean, True at real tokens; got dtype torch.float32"),
    "mask of whole numbers": ((X, TRUE.long()), r"mask must be boolean.*got dtype torch.int64"),
    "mask too short": ((X, TRUE[:, :4]), r"mask must have shape \[batch, tokens\] = \[2, 5\]; got \[2, 4\]"),
    "mask of one sequence": ((X, TRUE[0]), r"mask must have shape \[batch, tokens\] = \[2, 5\]; got \[5\]"),
    "mask of pairs": ((X, TRUE[:, None]), r"mask must have shape \[batch, tokens\] = \[2, 5\]; got \[2, 1, 5\]"),
    "unexpected context": ((X, None, torch.zeros(2, 3)), r"context must be None, because context_features was not"),
}
BAD_CONTEXTS = {
    "missing": (None, r"context is missing: it must have context_features=3 columns"),
    "too wide": (torch.zeros(2, 4), r"context must have shape \[batch, 3\] or .*= \[2, 5\]; got \[2, 4\]"),
    "another batch": (torch.zeros(3, 3), r"context must have shape .*got \[3, 3\]"),
    "other tokens": (torch.zeros(2, 4, 3), r"context must have shape .*got \[2, 4, 3\]"),
    "one dimension": (torch.zeros(3), r"context must have shape .*got \[3\]"),
    "nan": (spoiled(1, 2, shape=(2, 3)), r"context must be finite; got nan at index \[1, 2\]"),
}
METHODS = {
    "forward": lambda f, x, *rest: f(x, *rest),
    "jvp": lambda f, x, *rest: f.jvp(x, x, *rest),
    "diagonal": lambda f, x, *rest: f.forward_and_diagonal(x, *rest),
    "jacobian": lambda f, x, *rest: f.forward_and_jacobian(x, *rest),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


@each_method
@pytest.mark.parametrize(("arguments", "message"), CALLS.values(), ids=CALLS.keys())
def test_wrong_arguments_are_refused(method, arguments, message):
    f = L2SelfAttention(4, 2, max_tokens=6)
    with pytest.raises(ValueError, match=message):
        method(f, *arguments)
    if "max_tokens" in message:
        return
    with pytest.raises(ValueError, match=message):
        method(FeedForward(4, 5), *arguments)


@each_method
@pytest.mark.parametrize(("context", "message"), BAD_CONTEXTS.values(), ids=BAD_CONTEXTS.keys())
def test_wrong_contexts_are_refused(method, context, message):
    for f in (L2SelfAttention(4, 2, context_features=3), FeedForward(4, 5, context_features=3)):
        with pytest.raises(ValueError, match=message):
            method(f, X, None, context)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda f: f.lipschitz_bound(0), r"at least one token; got num_tokens=0"),
        (lambda f: f.lipschitz_bound(7), r"at most max_tokens=6 tokens; got 7"),
        (lambda f: f.lipschitz_bound(3, "frobenius"), r"norm must be one of 'token', 'inf', '2'; got norm='frobenius'"),
    ],
)
def test_a_bound_that_makes_no_sense_is_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(L2SelfAttention(4, 2, max_tokens=6))


def test_a_chain_is_as_long_as_its_shortest_part():
    parts = [L2SelfAttention(2, 1, coefficient=None, max_tokens=n) for n in (9, 4)]
    f = Compose(*parts)
    assert f(torch.zeros(1, 4, 2)).shape == (1, 4, 2)
    with pytest.raises(ValueError, match=r"at most max_tokens=4 tokens; got 5"):
        f(torch.zeros(1, 5, 2))


def test_whole_numbers_of_numpy_are_whole_numbers():
    numpy = pytest.importorskip("numpy")
    assert L2SelfAttention(numpy.int64(4), numpy.int64(2))(X).shape == X.shape


def test_a_map_without_parameters_goes_where_it_is_sent():
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    f = Declared(Half(), features=3, bound=0.5)
    assert f.to("meta")._like().device.type == "meta"
    assert not f.state_dict()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_map_in_half_precision_is_refused_in_words(dtype):
    with pytest.raises(ValueError, match="x must be of single or double precision"):
        L2SelfAttention(3, 1).to(dtype)(torch.zeros(2, 4, 3, dtype=dtype))


@pytest.mark.parametrize("causal", [False, True])
def test_the_compiler_takes_any_length_in_one_graph(causal, without_shape_checks):
    f = L2SelfAttention(4, 2, causal=causal)
    compiled = torch.compile(f, backend="eager", dynamic=True, fullgraph=True)
    for tokens in (3, 5, 9):
        x = torch.randn(2, tokens, 4)
        close(compiled(x), f(x), 1e-6)


@pytest.mark.parametrize("own", ["token", "inf", "2"])
@pytest.mark.parametrize("norm", ["token", "inf", "2"])
def test_bounds_of_sequences_with_padding_hold_in_every_norm(own, norm):
    f = L2SelfAttention(4, 1, norm=own).double()
    with torch.no_grad():
        f.W.copy_(torch.eye(4))
        f.B.copy_(torch.eye(4))
    x, mask = torch.zeros(2, 16, 4, dtype=torch.float64), torch.zeros(2, 16, dtype=torch.bool)
    mask[0, 0], mask[1, :9] = True, True
    bounds = f.lipschitz_bound(16, norm, mask)
    J = f.forward_and_jacobian(x, mask)[1]
    for bound, whole in zip(bounds, J, strict=True):
        stretch = {
            "2": lambda J: torch.linalg.matrix_norm(J.reshape(64, 64), 2),
            "inf": lambda J: J.abs().sum((2, 3)).amax(),
            "token": lambda J: torch.linalg.matrix_norm(J.movedim(2, 1), 2).sum(1).amax(),  # all blocks are alike
        }[norm](whole)
        assert stretch <= bound * (1 + 1e-12)


def test_parameters_are_of_the_default_type():
    torch.set_default_dtype(torch.float64)
    try:
        f = L2SelfAttention(4, 2, position_bias="learned", max_tokens=5, radius="learned", context_features=2)
        layer = AutoregressiveAttention(4, 2, hidden=8, position_bias="learned", max_tokens=5)
        assert {p.dtype for module in (f, layer) for p in module.parameters()} == {torch.float64}
        assert layer(torch.randn(2, 5, 4))[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_paper_weights_that_are_not_finite_are_refused():
    w_q, w_v, w_o = torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.randn(2, 3, 4)
    w_v[1, 2, 0] = torch.nan
    with pytest.raises(ValueError, match=r"w_v must be finite; got nan at index \[1, 2, 0\]"):
        L2SelfAttention.from_paper_weights(w_q, w_v, w_o)
