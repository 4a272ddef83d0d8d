"""The log-determinant of dense attention in one step: the same as step by step, in value and in every gradient."""

import copy
import functools

import pytest
import torch

from flowattn.contractions import Compose, FeedForward, L2SelfAttention, TokenLinear, dense_logdet
from flowattn.contractions.dense_logdet import attention_logabsdet, heads_logabsdet


def of_tokens(batch=3, heads=2, tokens=4, width=2, features=3, bias=None, scale=0.15, offset=0.0):
    """Attention with linear maps around it, and leaves x, W, B, c, bias for a Jacobian below 1."""
    given = [
        torch.randn(batch, tokens, features) + offset,
        torch.randn(features, heads * width),
        scale * torch.randn(heads * width, features),
        torch.full((1,), 0.9),
    ]
    return functools.partial(attention_logabsdet, num_heads=heads), leaves(given, bias, tokens)


def of_heads(batch=3, heads=2, tokens=4, width=2, features=3, bias=None, scale=0.15, offset=0.0):
    """The same for the tokens of heads whose derivatives differ: z, B, R, bias."""
    given = [
        torch.randn(batch, heads, tokens, width) + offset,
        scale * torch.randn(heads, width, features),
        torch.randn(batch, heads, tokens, width, features),
    ]
    return heads_logabsdet, leaves(given, bias, tokens)


def leaves(given, bias, tokens):
    given = given if bias is None else [*given, torch.randn(*bias, tokens)]
    return [t.double().requires_grad_() for t in given]


each_kind = pytest.mark.parametrize("kind", [of_tokens, of_heads], ids=["of tokens", "of heads"])


def value_and_gradients(function, given):
    value, logabsdet = function(*given)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in (value, logabsdet)]
    return [value, logabsdet, *torch.autograd.grad([value, logabsdet], given, weights)]


SHAPES = {
    "one head": {"heads": 1},
    "three heads": {"heads": 3},
    "heads wider than tokens": {"width": 5},
    "one token": {"tokens": 1},
    "as wide as a multiple of eight": {"tokens": 8, "features": 2},
    "many, by series": {"batch": 64, "tokens": 13, "width": 3, "scale": 0.004},
    "many, by elimination": {"batch": 64, "tokens": 13, "width": 3, "scale": 0.1},
    "a bias of each head": {"bias": (2, 4)},
    "a bias of each sample, in one row": {"bias": (3, 1, 1)},
    "far from the origin": {"offset": 1e4},
}


@each_kind
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_it_is_what_it_is_step_by_step(kind, shape, monkeypatch):
    function, given = kind(**shape)
    found = value_and_gradients(function, given)
    monkeypatch.setattr(dense_logdet, "_one_step", lambda given: False)
    expected = value_and_gradients(function, given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10 * other.abs().max().item())


def lifted(context_features=None):
    lift = FeedForward(2, 1, num_layers=1, out_features=6, coefficient=None, context_features=context_features)
    return Compose(lift, L2SelfAttention(6, 2, coefficient=None), TokenLinear(6, 2), coefficient=0.9)


TRAINED = {
    "plain": (lambda: L2SelfAttention(2, 2), None, "_AttentionLogAbsDet"),
    "with a bias": (lambda: L2SelfAttention(2, 2, position_bias="learned", max_tokens=4), None, None),
    "with a ball": (lambda: L2SelfAttention(2, 2, radius=1.0), None, "_HeadsLogAbsDet"),
    "with a context": (lambda: L2SelfAttention(2, 2, context_features=3), 3, "_HeadsLogAbsDet"),
    "lifted": (lifted, None, "_AttentionLogAbsDet"),
    "lifted with a context": (lambda: lifted(3), 3, "_HeadsLogAbsDet"),
}


@pytest.mark.parametrize(("make", "context_features", "step"), TRAINED.values(), ids=TRAINED.keys())
def test_blocks_that_train_take_one_step_and_agree_with_their_whole_jacobian(make, context_features, step, monkeypatch):
    steps = []
    for name in ("_AttentionLogAbsDet", "_HeadsLogAbsDet"):
        apply = getattr(dense_logdet, name).apply
        record = functools.partial(lambda name, apply, *given: steps.append(name) or apply(*given), name, apply)
        monkeypatch.setattr(getattr(dense_logdet, name), "apply", record)
    f, x = make().double(), torch.randn(3, 4, 2, dtype=torch.float64)
    for parameter in f.parameters():
        if parameter.ndim == 1:  # what affine maps add
            torch.nn.init.normal_(parameter)
    context = None if context_features is None else torch.randn(3, context_features, dtype=torch.float64)
    value, logabsdet = f.forward_and_logabsdet(x, None, context)
    assert steps == ([] if step is None else [step])
    J = f.forward_and_jacobian(x, None, context)[1].reshape(3, 8, 8)
    torch.testing.assert_close(value, f(x, None, context), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logabsdet, torch.linalg.slogdet(torch.eye(8) + J).logabsdet, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        f.forward_and_logabsdet(x, None, context)
    assert len(steps) == (step is not None)


@each_kind
@pytest.mark.parametrize("bias", [None, (4,)])
def test_derivatives_are_those_of_finite_differences(kind, bias):
    function, given = kind(batch=2, bias=bias)
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


@each_kind
def test_only_what_is_asked_for_is_differentiated(kind):
    function, given = kind()
    for k, wanted in enumerate(given):
        fixed = [t if j == k else t.detach() for j, t in enumerate(given)]
        (alone,) = torch.autograd.grad(function(*fixed)[1].sum(), wanted)
        torch.testing.assert_close(alone, torch.autograd.grad(function(*given)[1].sum(), wanted)[0])


@each_kind
def test_a_second_pass_backwards_finds_what_the_first_found(kind):
    function, given = kind()
    total = sum(t.sum() for t in function(*given))
    first, second = (torch.autograd.grad(total, given, retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@each_kind
def test_many_gradients_at_a_time_are_those_one_by_one(kind):
    function, given = kind()
    logabsdet = function(*given)[1]
    rows = torch.eye(len(logabsdet), dtype=torch.float64)
    (together,) = torch.autograd.grad(logabsdet, given[1], rows, retain_graph=True, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(logabsdet, given[1], row, retain_graph=True)[0] for row in rows]
    torch.testing.assert_close(together, torch.stack(one_by_one))


@each_kind
def test_the_gradient_of_one_sample_does_not_depend_on_its_batch_mates(kind):
    function, (tokens, *others) = kind(batch=5)
    alone = [t[:1] if len(t) == 5 else t for t in others]  # what is of each sample
    (of_all,) = torch.autograd.grad(function(tokens, *others)[1].sum(), tokens)
    (of_one,) = torch.autograd.grad(function(tokens[:1], *alone)[1].sum(), tokens)
    torch.testing.assert_close(of_all[:1], of_one[:1], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("size", "offset", "radius", "tolerance"),
    [
        (1.0, 0.0, None, 1e-5),
        (30.0, 0.0, None, 2e-3),
        (30.0, 1e3, None, 3e-4),
        (1e3, 0.0, None, 1e-3),
        (1.0, 0.0, 1.0, 1e-5),
        (30.0, 0.0, 30.0, 2e-3),
    ],
)
def test_single_precision_keeps_its_digits(size, offset, radius, tolerance):
    torch.manual_seed(0)
    f = L2SelfAttention(3, 1, radius=radius)
    x = size * torch.randn(16, 13, 3) + offset

    def gradient(f, x):
        x = x.clone().requires_grad_()
        value, logabsdet = f.forward_and_logabsdet(x)
        (value.square().sum() * 1e-3 + logabsdet.sum()).backward()
        return [x.grad, logabsdet.detach()]

    single = gradient(f, x)
    double = gradient(f.double(), x.double())
    for one, other in zip(single, double, strict=True):
        assert (one - other).abs().max() < tolerance * other.abs().max()


@each_kind
def test_an_empty_batch_has_gradients_too(kind):
    function, given = kind(batch=0)
    value, logabsdet = function(*given)
    assert value.shape == (0, 4, 3) and logabsdet.shape == (0,)
    (value.sum() + logabsdet.sum()).backward()
    assert all((t.grad == 0).all() for t in given)


@pytest.mark.parametrize("scale", [1, 10, 100, 1e4])
def test_gradients_with_padding_keep_their_digits_however_far_tokens_lie(scale):
    f, x = L2SelfAttention(4, 2, coefficient=0.9), scale * torch.randn(3, 40, 4)
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[1, -3:] = False

    def gradient(f, x):
        return torch.autograd.grad(f.forward_and_logabsdet(x, mask)[1].sum(), f.W)[0]

    got, expected = gradient(f, x), gradient(copy.deepcopy(f).double(), x.double())
    assert (got - expected).norm() < 1e-3 * expected.norm()
