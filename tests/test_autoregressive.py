import pytest
import torch
from nflows.flows import Flow

from flowattn.context import pack_context
from flowattn.distributions import SequenceNormal
from flowattn.testing import check_transform
from flowattn.transforms.autoregressive import AutoregressiveAttention

TRANSFORMS = {
    "triangular": lambda: AutoregressiveAttention(3, 2, hidden=8, window=2),
    "affine": lambda: AutoregressiveAttention(3, 2, hidden=8, kind="affine", attention="dot-product"),
    "one feature": lambda: AutoregressiveAttention(1, 1, hidden=8, window=7),
    "learned bias": lambda: AutoregressiveAttention(2, 2, hidden=8, position_bias="learned", max_tokens=4),
}
each = pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS.keys())


def trained(transform, amount=0.2):
    """With parameters as they might be after training."""
    with torch.no_grad():
        for parameter in transform.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=amount)
    return transform


@each
def test_it_keeps_the_contract(make):
    check_transform(make, (3, make().features), supports_mask=True, skip=["works_under_torch_compile"])
    check_transform(make, (3, make().features), dtype=torch.float32, supports_mask=True, only=["inverse_undoes_it"])


@pytest.mark.slow
def test_it_keeps_the_contract_with_a_context():
    check_transform(
        lambda: AutoregressiveAttention(2, 2, hidden=8, context_features=3),
        (3, 2),
        context=lambda size: torch.randn(size, 3),
        supports_mask=True,
        skip=["works_under_torch_compile"],
    )


@pytest.mark.slow
def test_it_can_be_compiled(without_shape_checks):
    check_transform(TRANSFORMS["triangular"], (3, 3), supports_mask=True, only=["works_under_torch_compile"])


@each
def test_it_starts_as_the_identity(make):
    transform = make()
    x = 3 * torch.randn(2, 4, transform.features)
    for outputs, logabsdet in (transform(x), transform.inverse(x)):
        assert torch.equal(outputs, x) and torch.equal(logabsdet, torch.zeros(2))


@each
def test_the_second_step_of_training_reaches_every_parameter(make):
    transform = make()
    optimiser = torch.optim.SGD(transform.parameters(), lr=0.1)
    x = torch.randn(8, 4, transform.features)
    for _ in range(2):
        optimiser.zero_grad()
        outputs, logabsdet = transform(x)
        (outputs.square().sum() - logabsdet.sum()).div(8).backward()
        optimiser.step()
    assert all(p.grad.abs().max() > 0 for name, p in transform.named_parameters())


@each
def test_no_token_depends_on_a_later_one_and_each_on_all_before(make):
    transform = trained(make()).double()
    x = torch.randn(1, 4, transform.features, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: transform(x)[0][0], x)[:, :, 0]
    reach = jacobian.abs().amax((1, 3))
    assert torch.equal(reach > 0, torch.ones(4, 4).tril().bool())


def test_tokens_before_are_the_real_ones_wherever_padding_is():
    transform = trained(AutoregressiveAttention(2, 2, hidden=8, context_features=1)).double()
    x, features = torch.randn(1, 3, 2, dtype=torch.float64), torch.randn(1, 3, 1, dtype=torch.float64)
    outputs, logabsdet = transform(x, features)
    mask = torch.tensor([[False, True, False, True, True, False]])
    scattered = torch.full((1, 6, 2), torch.nan, dtype=torch.float64).index_put((mask,), x[0])
    wide = torch.zeros(1, 6, 1, dtype=torch.float64).index_put((mask,), features[0])
    got, same = transform(scattered, pack_context(wide, mask))
    torch.testing.assert_close(got[mask], outputs[0])
    torch.testing.assert_close(same, logabsdet)


def test_a_normal_autoregression_is_fitted_to_its_entropy():
    torch.manual_seed(0)
    decay, noise = 0.9, 0.1
    x = torch.randn(2048, 8, 1)
    for t in range(1, 8):
        x[:, t] = decay * x[:, t - 1] + noise * x[:, t]
    transform = AutoregressiveAttention(1, 1, hidden=8, window=1, attention="dot-product")
    flow = Flow(transform, SequenceNormal((8, 1)))
    optimiser = torch.optim.Adam(flow.parameters(), lr=0.02)
    for step in range(300):
        optimiser.param_groups[0]["lr"] = 0.02 * (1 - step / 300)
        optimiser.zero_grad()
        (-flow.log_prob(x[torch.randint(2048, (256,))]).mean()).backward()
        optimiser.step()
    entropy = 8 * 0.5 * torch.tensor(2 * torch.pi * torch.e).log() + 7 * torch.tensor(noise).log()
    nll = -flow.log_prob(x).mean().detach()
    assert (nll - entropy).abs() < 0.15, f"{nll} nats and not {entropy}"


def test_the_inverse_keeps_four_digits_in_single_precision_after_rough_training():
    torch.manual_seed(0)
    transform = trained(AutoregressiveAttention(6, 4, hidden=32), 0.1)
    x = torch.randn(8, 32, 6)
    back, _ = transform.inverse(transform(x)[0])
    torch.testing.assert_close(back, x, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 0}, "features must be"),
        ({"window": 0}, "window must be"),
        ({"hidden": 9}, "num_heads must divide hidden; got num_heads=2, hidden=9"),
        ({"kind": "spline"}, "kind must be one of 'affine', 'triangular'"),
        ({"attention": "linear"}, "attention must be one of"),
        ({"max_log_scale": 0}, "max_log_scale must be a positive number"),
        ({"position_bias": "learned"}, "needs max_tokens"),
        ({"context_features": 0}, "context_features must be"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AutoregressiveAttention(**{"features": 3, "num_heads": 2, "hidden": 8} | options)


def test_bad_inputs_are_named():
    transform = AutoregressiveAttention(3, 2, hidden=8)
    x = torch.zeros(1, 4, 3)
    x[0, 2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"inputs must be finite; got nan at index \[0, 2, 1\]"):
        transform(x)
    with pytest.raises(ValueError, match="inputs must have shape"):
        transform(torch.zeros(1, 4, 2))
    with pytest.raises(ValueError, match="context is missing"):
        AutoregressiveAttention(3, 2, hidden=8, context_features=2)(torch.zeros(1, 4, 3))
