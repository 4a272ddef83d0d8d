"""The log-determinant of dense attention in one step: the same as step by step, in value and in every gradient."""

import copy
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flowattn.contractions import L2SelfAttention
from flowattn.contractions.dense_logdet import _AttentionLogAbsDet, _step_by_step
from flowattn.contractions.dense_logdet import attention_logabsdet as of_side_by_side
from flowattn.transforms.parts import contractive_attention


def attention_logabsdet(z, B, R, bias=None):
    if R.ndim == 5:
        return of_side_by_side(z, B, R, bias)
    return of_side_by_side(z.transpose(1, 2).flatten(2), B.flatten(0, 1), R.flatten(0, 1).mT, bias, num_heads=len(B))


step_by_step = functools.partial(_step_by_step, None)  # heads are apart already


def factors(
    batch=3, heads=2, tokens=4, width=2, features=3, bias=None, scale=0.15, offset=0.0, dtype=torch.float64, each=False
):
    """Tokens, B, R, for all tokens or for each, and a bias whose Jacobian is below 1; leaves, all of them."""
    torch.manual_seed(0)
    given = [
        torch.randn(batch, heads, tokens, width, dtype=dtype) + offset,
        scale * torch.randn(heads, width, features, dtype=dtype),
        torch.randn(*((batch, heads, tokens) if each else (heads,)), width, features, dtype=dtype),
    ]
    if bias is not None:
        given.append(torch.randn(*bias, tokens, dtype=dtype))
    return [t.requires_grad_() for t in given]


def value_and_gradients(function, given):
    value, logabsdet = function(*given)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in (value, logabsdet)]
    return [value, logabsdet, *torch.autograd.grad([value, logabsdet], given, weights)]


SHAPES = {
    "one head": {"heads": 1},
    "three heads": {"heads": 3},
    "one token": {"tokens": 1},
    "as wide as a multiple of eight": {"tokens": 8, "features": 2},
    "many, by series": {"batch": 64, "tokens": 13, "width": 3, "scale": 0.004},
    "many, by elimination": {"batch": 64, "tokens": 13, "width": 3, "scale": 0.1},
    "a bias of each head": {"bias": (2, 4)},
    "a bias of each sample, in one row": {"bias": (3, 1, 1)},
    "far from the origin": {"offset": 1e4},
}


each_kind = pytest.mark.parametrize("each", [False, True], ids=["one R", "an R of each token"])


@each_kind
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_it_is_what_it_is_step_by_step(shape, each):
    given = factors(**shape, each=each)
    found, expected = (value_and_gradients(f, given) for f in (attention_logabsdet, step_by_step))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10 * other.abs().max().item())


@pytest.mark.parametrize("common", [0.5, 4 / 3, -3.0])
def test_what_tokens_have_in_common_may_be_anything(common):
    """Of 4 / 3, in units of the identity, K would be singular."""
    z, B, R = factors(heads=1, width=2, features=2)
    with torch.no_grad():
        B.copy_(common * torch.linalg.inv(R).mT)
    assert torch.allclose(B.mT @ R, common * torch.eye(2, dtype=B.dtype))
    found, expected = (value_and_gradients(f, (z, B, R)) for f in (attention_logabsdet, step_by_step))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("R_ndim", "radius"), [(2, None), (5, 1.0)])
def test_it_is_taken_by_dense_blocks_that_train(R_ndim, radius, monkeypatch):
    calls = []
    apply = _AttentionLogAbsDet.apply
    monkeypatch.setattr(_AttentionLogAbsDet, "apply", lambda *given: calls.append(given) or apply(*given))
    f, x = L2SelfAttention(2, 2, radius=radius), torch.randn(3, 4, 2)
    f.forward_and_logabsdet(x)
    assert len(calls) == 1 and calls[0][2].ndim == R_ndim
    with torch.no_grad():
        f.forward_and_logabsdet(x)
    assert len(calls) == 1


@each_kind
@pytest.mark.parametrize("bias", [None, (4,)])
def test_derivatives_are_those_of_finite_differences(bias, each):
    given = factors(batch=2, bias=bias, each=each)
    assert torch.autograd.gradcheck(attention_logabsdet, given)
    assert torch.autograd.gradgradcheck(attention_logabsdet, given)


def test_only_what_is_asked_for_is_differentiated():
    z, B, R = factors()
    fixed = [z.detach(), B, R.detach()]
    attention_logabsdet(*fixed)[1].sum().backward()
    whole = torch.autograd.grad(attention_logabsdet(z, B, R)[1].sum(), B)[0]
    torch.testing.assert_close(B.grad, whole)


@each_kind
def test_a_second_pass_backwards_finds_what_the_first_found(each):
    given = factors(each=each)
    total = sum(t.sum() for t in attention_logabsdet(*given))
    first, second = (torch.autograd.grad(total, given, retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@each_kind
@pytest.mark.parametrize("bias", [(4,), (2, 4), (3, 2, 4)], ids=str)
def test_checkpoints_change_no_gradient(bias, each):
    given = factors(bias=bias, each=each)

    def gradients(function):
        value, logabsdet = function(*given)
        return torch.autograd.grad(logabsdet.sum() - 0.5 * value.square().sum(), given)

    found = gradients(lambda *given: checkpoint(attention_logabsdet, *given, use_reentrant=False))
    torch.testing.assert_close(found, gradients(attention_logabsdet))


@pytest.mark.filterwarnings("ignore")  # tracing warns of every size, and of itself
@pytest.mark.parametrize("coefficient", [None, 0.97])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_what_is_traced_can_be_differentiated_and_follows_the_weights(num_heads, coefficient, without_shape_checks):
    f = L2SelfAttention(4, num_heads, coefficient=coefficient).double()
    given = 0.3 * torch.randn(3, 5, 4, dtype=torch.float64)
    traced = torch.jit.trace_module(f, {"forward_and_logabsdet": given}, check_trace=False)
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        found, expected = (g.forward_and_logabsdet(x)[1].sum() for g in (traced, f))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(total, x)[0] for total in (found, expected)))
        with torch.no_grad():
            f.B *= 0.5


@each_kind
def test_many_gradients_at_a_time_are_those_one_by_one(each):
    z, B, R = factors(each=each)
    logabsdet = attention_logabsdet(z, B, R)[1]
    rows = torch.eye(len(logabsdet), dtype=z.dtype)
    (together,) = torch.autograd.grad(logabsdet, B, rows, retain_graph=True, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(logabsdet, B, row, retain_graph=True)[0] for row in rows]
    torch.testing.assert_close(together, torch.stack(one_by_one))


def test_the_gradient_of_one_sample_does_not_depend_on_its_batch_mates():
    z, B, R = (t.detach() for t in factors(batch=5))
    z.requires_grad_()
    (whole,) = torch.autograd.grad(attention_logabsdet(z, B, R)[1].sum(), z)
    (alone,) = torch.autograd.grad(attention_logabsdet(z[:1], B, R)[1].sum(), z)
    torch.testing.assert_close(whole[:1], alone[:1], rtol=0, atol=1e-14)


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


@pytest.mark.parametrize(("num_tokens", "features"), [(90, 2), (64, 2), (250, 1)])
def test_tokens_that_are_all_alike_keep_their_digits_in_single_precision(num_tokens, features):
    f, x = L2SelfAttention(features, 1, coefficient=None), 0.01 * torch.randn(8, num_tokens, features)
    with torch.no_grad():
        f.W.mul_(0.3)
        f.B.mul_(0.3)

    def found(f, x):
        logabsdet = f.forward_and_logabsdet(x)[1]
        return [logabsdet, *torch.autograd.grad(logabsdet.sum(), (f.W, f.B))]

    for one, other in zip(found(f, x), found(copy.deepcopy(f).double(), x.double()), strict=True):
        assert (one - other).norm() < 3e-5 * other.norm()


@pytest.mark.parametrize("lift", [None, 8])
@pytest.mark.parametrize("size", [3.0, 10.0, 100.0])
def test_gradients_of_steep_weights_keep_their_digits_in_single_precision(lift, size):
    f = contractive_attention(4, 2, lift=lift, coefficient=0.99)
    with torch.no_grad():
        for parameter in f.parameters():
            parameter *= 10
    x, weight = size * torch.randn(8, 6, 4), torch.linspace(-1, 2, 8)

    def gradients(f, x):
        logabsdet = f.forward_and_logabsdet(x)[1]
        wanted = [p for p in f.parameters() if p.ndim == 2]
        return torch.autograd.grad((logabsdet * weight.to(x)).sum(), wanted)

    for one, other in zip(gradients(f, x), gradients(copy.deepcopy(f).double(), x.double()), strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@each_kind
def test_an_empty_batch_has_gradients_too(each):
    given = factors(batch=0, each=each)
    value, logabsdet = attention_logabsdet(*given)
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
