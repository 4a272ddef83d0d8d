"""Fixed units."""

import pytest
import torch

from flowattn.testing import check_transform
from flowattn.transforms.standardize import Standardize


def make():
    transform = Standardize(3)
    transform.fix(torch.tensor([1.0, -20.0, 300.0]), torch.tensor([0.1, 2.0, 30.0]))
    return transform


def test_it_keeps_the_contract():
    check_transform(make, (5, 3), supports_mask=True)


def test_tokens_are_standardised_and_their_density_is_in_the_old_units():
    x = torch.randn(7, 5, 3, dtype=torch.float64) * torch.tensor([0.1, 2.0, 30.0]) + torch.tensor([1.0, -20.0, 300.0])
    transform = make().double()
    y, logabsdet = transform(x)
    normal = torch.distributions.Normal(transform.mean, transform.scale)
    new = torch.distributions.Normal(0.0, 1.0).log_prob(y).sum((1, 2)) + logabsdet
    torch.testing.assert_close(new, normal.log_prob(x).sum((1, 2)))


def test_nothing_is_trained_and_the_state_has_both():
    assert not list(make().parameters())
    other = Standardize(3)
    other.load_state_dict(make().state_dict())
    assert torch.equal(other.scale, make().scale)


@pytest.mark.parametrize(
    ("mean", "scale", "message"),
    [
        (torch.zeros(2), torch.ones(3), r"mean must have shape \[3\]; got \[2\]"),
        (torch.zeros(3), torch.tensor([1.0, 0.0, 1.0]), "scale must be positive; got 0.0 for feature 1"),
        (torch.zeros(3), torch.tensor([1.0, torch.nan, 1.0]), "scale must be finite"),
        (torch.tensor([torch.inf, 0, 0]), torch.ones(3), "mean must be finite"),
    ],
)
def test_moments_that_are_none_are_refused(mean, scale, message):
    with pytest.raises(ValueError, match=message):
        Standardize(3).fix(mean, scale)
