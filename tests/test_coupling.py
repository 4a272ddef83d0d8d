import itertools

import pytest
import torch
from torch import nn

from flowattn.context import pack_context
from flowattn.transforms import AttentionCoupling, FeedForwardCoupling
from flowattn.transforms.monotone import affine, spline
from flowattn.transforms.networks import FeedForwardNetwork

COUPLINGS = {
    "feed-forward, additive": lambda: FeedForwardCoupling(5, 16),
    "feed-forward, affine": lambda: FeedForwardCoupling(5, 16, kind="affine"),
    "feed-forward, one matrix": lambda: FeedForwardCoupling(2, 16, num_layers=1),
    "attention, affine": lambda: AttentionCoupling(5, 4, hidden=16),
    "attention, spline": lambda: AttentionCoupling(5, 4, hidden=16, kind="rational-quadratic"),
    "attention, dot product": lambda: AttentionCoupling(5, 4, hidden=16, attention="dot-product"),
    "attention, causal": lambda: AttentionCoupling(5, 4, hidden=16, causal=True, position_bias="alibi"),
}
each = pytest.mark.parametrize("make", COUPLINGS.values(), ids=COUPLINGS.keys())


def trained(transform):
    """With parameters as they might be after training."""
    with torch.no_grad():
        for parameter in transform.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return transform


@each
def test_it_starts_as_the_identity(make):
    transform = make()
    x = 3 * torch.randn(2, 7, transform.features)
    for outputs, logabsdet in (transform(x), transform.inverse(x)):
        torch.testing.assert_close(outputs, x, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(logabsdet, torch.zeros(2), atol=2e-5, rtol=0)


@each
def test_the_second_step_of_training_reaches_every_parameter(make):
    transform = make()
    optimiser = torch.optim.SGD(transform.parameters(), lr=0.1)
    x = torch.randn(2, 7, transform.features)
    for _ in range(2):
        optimiser.zero_grad()
        outputs, logabsdet = transform(x)
        (outputs.pow(3).sum() - logabsdet.sum()).backward()
        optimiser.step()
    assert all(p.grad.abs().max() > 0 for p in transform.parameters())


@each
def test_under_autocast_it_runs_in_single_precision(make):
    transform = trained(make())
    x = torch.randn(8, 7, transform.features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, logabsdet = transform(x)
        back, _ = transform.inverse(outputs)
    assert outputs.dtype == logabsdet.dtype == torch.float32
    torch.testing.assert_close(back, x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("features", [2, 3, 8])
def test_the_additive_kind_has_a_log_determinant_of_exactly_zero(features):
    transform = trained(FeedForwardCoupling(features, 16))
    x = torch.randn(4, 7, features)
    for direction in (transform, transform.inverse):
        for context in (None, torch.rand(4, 7) > 0.5):
            outputs, logabsdet = direction(x, context)
            assert torch.equal(logabsdet, torch.zeros(4)) and logabsdet.dtype == torch.float32
            assert not torch.equal(outputs, x)


def test_both_halves_are_changed_by_the_other_and_no_token_by_another():
    transform = trained(FeedForwardCoupling(5, 16)).double()
    x = torch.randn(1, 3, 5, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: transform(x)[0], x)[0, :, :, 0]
    for i in range(3):
        for j in range(3):
            assert jacobian[i, :, j].ne(0).any() == (i == j)
    assert jacobian[0, :3, 0, 3:].abs().min() > 0 and jacobian[0, 3:, 0, :3].abs().min() > 0


def test_attention_moves_the_features_of_its_mask_by_the_others_of_all_tokens():
    mask = torch.tensor([True, False, False, True, True])
    transform = trained(AttentionCoupling(5, 4, hidden=16, mask=mask)).double()
    x = torch.randn(1, 3, 5, dtype=torch.float64)
    outputs, _ = transform(x)
    assert torch.equal(outputs[..., ~mask], x[..., ~mask])
    jacobian = torch.autograd.functional.jacobian(lambda x: transform(x)[0], x)[0, :, :, 0]
    assert jacobian[:, mask][:, :, :, ~mask].abs().min() > 0
    assert jacobian[0, mask, 1][:, mask].eq(0).all()


def test_a_causal_conditioner_does_not_look_ahead():
    transform = trained(AttentionCoupling(4, 2, hidden=8, causal=True))
    x = torch.randn(2, 6, 4)
    y, _ = transform(x)
    torch.testing.assert_close(transform(x[:, :4])[0], y[:, :4])


def test_without_bias_and_mask_the_order_of_tokens_does_not_matter():
    transform = trained(AttentionCoupling(4, 2, hidden=8, kind="rational-quadratic"))
    x, order = torch.randn(2, 6, 4), torch.randperm(6)
    torch.testing.assert_close(transform(x[:, order])[0], transform(x)[0][:, order])


@pytest.mark.parametrize(
    "make",
    [
        lambda: FeedForwardCoupling(4, 8, kind="affine", context_features=2),
        lambda: AttentionCoupling(4, 2, hidden=8, context_features=2),
    ],
    ids=["feed-forward", "attention"],
)
def test_features_of_the_context_matter(make):
    transform, x = trained(make()), torch.randn(3, 6, 4)
    context, mask = torch.randn(3, 2), torch.rand(3, 6) > 0.3
    outputs, _ = transform(x, context)
    assert not torch.allclose(outputs, transform(x, context + 1)[0])
    torch.testing.assert_close(outputs, transform(x, context.unsqueeze(1).expand(3, 6, 2))[0])
    packed, _ = transform(x, pack_context(context, mask))
    assert torch.equal(packed[~mask], x[~mask])
    with pytest.raises(ValueError, match="context is missing: it must have context_features=2 columns"):
        transform(x, mask)
    with pytest.raises(ValueError, match=r"context must have shape \[batch, 2\]"):
        transform(x, torch.randn(3, 5))


@each
def test_features_that_are_meant_for_others_are_left_to_them(make):
    transform = trained(make())
    x, context = torch.randn(3, 6, transform.features), torch.randn(3, 2)
    assert torch.equal(transform(x, context)[0], transform(x)[0])


def test_a_random_mask_comes_back_with_the_weights():
    masks = [True, False, True, False], [False, True, True, False]
    one, other = (trained(AttentionCoupling(4, 2, hidden=8, mask=mask)) for mask in masks)
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, 6, 4)
    assert torch.equal(one(x)[0], other(x)[0])


def test_nan_is_refused_where_attention_would_spread_it():
    transform, x = AttentionCoupling(4, 2, hidden=8), torch.randn(2, 6, 4)
    x[1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"inputs must be finite; got nan at index \[1, 2, 3\]"):
        transform(x)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 2] = False
    assert transform(x, mask)[0][mask].isfinite().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: FeedForwardCoupling(4, 8, kind="affine"),
        lambda: AttentionCoupling(4, 2, hidden=8),
        lambda: AttentionCoupling(4, 2, hidden=8, attention="dot-product"),
    ],
    ids=["feed-forward", "attention", "dot product"],
)
def test_gradients_of_each_sample_by_vmap(make, without_shape_checks):
    transform = trained(make())
    parameters = {name: p.detach() for name, p in transform.named_parameters()}
    x, mask = torch.randn(3, 6, 4), torch.rand(3, 6) > 0.3

    def loss(parameters, x, mask):
        outputs, logabsdet = torch.func.functional_call(transform, parameters, (x[None], mask[None]))
        return outputs.square().sum() + logabsdet.sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, mask)
    for k in range(3):
        for name, gradient in torch.func.grad(loss)(parameters, x[k], mask[k]).items():
            torch.testing.assert_close(gradients[name][k], gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("num_bins", [1, 8, 32])
def test_no_parameters_of_a_spline_take_its_inverse_from_single_precision(num_bins, size):
    parameters = size * torch.randn(20_000, 3 * num_bins - 1)
    x = 3 * torch.randn(20_000)
    y, log_slope = spline(x, parameters, tail_bound=5.0)
    back, log_slope_back = spline(y, parameters, tail_bound=5.0, inverse=True)
    torch.testing.assert_close(back, x, atol=1e-3, rtol=0)
    torch.testing.assert_close(log_slope_back, -log_slope, atol=1e-3, rtol=0)
    assert torch.equal(y[x.abs() >= 5], x[x.abs() >= 5])


@pytest.mark.parametrize("tail_bound", [0.1, 3.0, 1000.0])
def test_a_spline_takes_its_own_ends(tail_bound):
    ends = torch.tensor([-tail_bound, tail_bound])
    near = torch.nextafter(ends, torch.zeros(2))
    for inverse in (False, True):
        for x in (ends, near):
            y, _ = spline(x, torch.randn(2, 23), tail_bound=tail_bound, inverse=inverse)
            torch.testing.assert_close(y, x, atol=1e-6, rtol=1e-5)


def test_the_affine_scale_is_bounded():
    _, log_scale = affine(torch.ones(3), torch.tensor([[-1e9, 0], [0, 0], [1e9, 0]]), max_log_scale=1.5)
    torch.testing.assert_close(log_scale, torch.tensor([-1.5, 0.0, 1.5]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeedForwardCoupling(1, 8), "features must be at least 2, one to transform and one to go by; got 1"),
        (lambda: FeedForwardCoupling(4, 0), "hidden must be a whole number of at least 1; got hidden=0"),
        (lambda: FeedForwardCoupling(4, 8, kind="cubic"), "kind must be one of 'additive', 'affine'; got kind='cubic'"),
        (lambda: FeedForwardCoupling(4, 8, max_log_scale=0.0), "max_log_scale must be a positive number"),
        (lambda: AttentionCoupling(1, 1, hidden=8), "features must be at least 2"),
        (lambda: AttentionCoupling(4, 3, hidden=8), "num_heads must divide hidden; got num_heads=3, hidden=8"),
        (lambda: AttentionCoupling(4, 2, hidden=8, attention="l3"), "attention must be one of 'l2', 'dot-product'"),
        (lambda: AttentionCoupling(4, 2, hidden=8, tail_bound=-1.0), "tail_bound must be a positive number"),
        (
            lambda: AttentionCoupling(4, 2, hidden=8, mask=[True, False]),
            "mask must hold one bool for each of features=4",
        ),
        (lambda: AttentionCoupling(4, 2, hidden=8, mask=[1, 0, 1, 0]), "mask must hold one bool for each"),
        (lambda: AttentionCoupling(4, 2, hidden=8, mask=[True] * 4), "mask must be True at some features"),
        (lambda: AttentionCoupling(4, 2, hidden=8, position_bias="learned"), "needs max_tokens"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_widths_are_refused():
    for transform in (FeedForwardCoupling(4, 8), AttentionCoupling(4, 2, hidden=8)):
        with pytest.raises(ValueError, match=r"inputs must have shape \[batch, tokens, 4\]; got \[2, 6, 5\]"):
            transform(torch.randn(2, 6, 5))


def test_any_activation_will_do():
    transform = FeedForwardCoupling(4, 8, activation=lambda: nn.LeakyReLU(0.3), num_layers=4)
    assert sum(isinstance(m, nn.LeakyReLU) for m in transform.modules()) == 6


@pytest.mark.parametrize("widths", [(3, 99, 2), (3, 99, 70, 5), (3, 96, 2), (3, 7, 2)])
def test_padded_widths_change_nothing_but_the_time(widths):
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.Sigmoid())]
    plain = nn.Sequential(*layers[:-1]).double()
    padded = FeedForwardNetwork(*plain)
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    torch.testing.assert_close(padded(x), plain(x))
    assert list(padded.state_dict()) == list(plain.state_dict())
    wanted = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    torch.testing.assert_close(torch.autograd.grad(padded(x).square().sum(), list(plain.parameters())), wanted)
