"""The nonlinear autoregression: its density is exact, and no Gaussian has it."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from flowattn.data import Batch, Sequences
from flowattn.data.autoregression import NonlinearAutoregression
from flowattn.data.batch import generator
from flowattn.data.gaussian import Gaussian

SMALL = {"num_train": 4000, "num_val": 10, "num_test": 4000}


def brute_force(sequence):
    """The log-density of one sequence, token by token and feature by feature."""
    features = sequence.shape[1]
    total = 0.0
    for t, token in enumerate(sequence.tolist()):
        for i, value in enumerate(token):
            mean, deviation = 0.0, 1.0
            if t:
                x = sequence[t - 1].tolist()
                ahead = x[i + 1] if i + 1 < features else -x[0]
                behind = x[i - 1] if i else -x[-1]
                mean = 0.2 * x[i] + 0.9 * math.tanh(1.5 * ahead)
                deviation = 0.5 * math.exp(0.4 * math.tanh(behind))
            total -= 0.5 * ((value - mean) / deviation) ** 2 + math.log(deviation) + 0.5 * math.log(2 * math.pi)
    return total


@pytest.mark.parametrize("features", [2, 3, 6])
def test_log_density_is_that_of_its_transitions_one_by_one(features):
    data = NonlinearAutoregression(length=5, features=features, **SMALL)
    batch = data.split("test").batch(torch.arange(20))
    expected = torch.tensor([brute_force(sequence.double()) for sequence in batch.inputs], dtype=torch.float64)
    torch.testing.assert_close(data.log_density(batch), expected, rtol=0, atol=1e-12)


def test_the_density_of_the_next_token_integrates_to_one():
    data = NonlinearAutoregression(length=2, **SMALL)
    grid = torch.linspace(-6, 6, 241, dtype=torch.float64)
    second = torch.cartesian_prod(grid, grid)
    first = torch.tensor([0.7, -1.3], dtype=torch.float64).expand_as(second)
    joint = data.log_density(Batch(torch.stack([first, second], 1), None, torch.arange(len(second))))
    marginal = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double()).log_prob(first[0])
    assert (joint - marginal).exp().sum() * (grid[1] - grid[0]) ** 2 == pytest.approx(1, abs=1e-9)


def test_samples_have_the_moments_that_the_density_says():
    # E exp(log q - log p) = 1 for any density q wherever p is not zero: here for the fitted Gaussian.
    data = NonlinearAutoregression(length=3, **SMALL)
    batch = data.split("test").all()
    ratio = (data.references()["Gaussian, full covariance"](batch) - data.log_density(batch)).exp()
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / len(ratio) ** 0.5


def test_entropy_is_the_mean_of_minus_the_log_density():
    data = NonlinearAutoregression(**SMALL)
    value, error = data.entropy(20_000)
    nll = -data.log_density(data.split("test").all())
    assert error < 0.01
    assert abs(nll.mean() - value) < 4 * math.hypot(nll.std() / len(nll) ** 0.5, error)


def test_no_gaussian_is_near():
    data = NonlinearAutoregression(num_train=20_000, num_val=10, num_test=4000)
    batch = data.split("test").all()
    truth = data.log_density(batch)
    gaps = {name: (truth - density(batch)).mean().item() / 16 for name, density in data.references().items()}
    assert 0.1 < gaps["Gaussian, full covariance"] < gaps["Gaussian, diagonal"]


def test_sequences_stay_where_they_are():
    data = NonlinearAutoregression(length=300, num_train=2000, num_val=1, num_test=1)
    inputs = data.split("train").inputs
    assert inputs.abs().max() < 8
    torch.testing.assert_close(inputs[:, 20:160].std((0, 1)), inputs[:, 160:].std((0, 1)), rtol=0.03, atol=0)


def test_the_seed_decides_and_splits_differ():
    first, again, other = (NonlinearAutoregression(seed=seed, **SMALL) for seed in (1, 1, 2))
    assert torch.equal(first.split("train").inputs, again.split("train").inputs)
    assert not torch.equal(first.split("train").inputs, other.split("train").inputs)
    assert not torch.equal(first.split("train").inputs, first.split("test").inputs)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"features": 7}, "features must be 2 to 6; got features=7"),
        ({"length": 0}, "length must be a whole number of at least 1; got length=0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1; got batch_size=2.5"),
        ({"seed": -1}, "seed must be a whole number of at least 0; got seed=-1"),
        (
            {"predict_split": "some"},
            "predict_split must be one of 'train', 'val', 'test', 'all'; got predict_split='some'",
        ),
    ],
)
def test_bad_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        NonlinearAutoregression(**wrong)


def test_gaussians_are_those_of_torch_and_of_largest_likelihood():
    inputs = torch.randn(500, 3, 2, generator=generator(1)) @ torch.tensor([[1.0, 0.5], [0.0, 2.0]]) + 3
    train = Sequences(inputs)
    flat = inputs.flatten(1).double()
    torch_one = MultivariateNormal(flat.mean(0), torch.cov(flat.T, correction=0))
    full = Gaussian.fit(train)(train.all())
    torch.testing.assert_close(full, torch_one.log_prob(flat))
    for change in (0.97, 1.03):
        other = MultivariateNormal(flat.mean(0), torch.cov(flat.T) * change)
        assert other.log_prob(flat).mean() < full.mean()


def test_gaussians_of_masked_sequences_see_real_tokens_only():
    mask = torch.arange(4) < torch.tensor([1, 2, 3, 4] * 30).unsqueeze(1)
    inputs = torch.randn(120, 4, 2).masked_fill(~mask.unsqueeze(-1), 1e6)
    train = Sequences(inputs, mask)
    density = Gaussian.fit(train)
    normal = MultivariateNormal(inputs[mask].double().mean(0), torch.cov(inputs[mask].double().T, correction=0))
    expected = (normal.log_prob(inputs.double()) * mask).sum(1)
    torch.testing.assert_close(density(train.all()), expected)


def test_a_singular_covariance_is_refused():
    inputs = torch.randn(200, 2, 2)
    inputs[:, 1] = -inputs[:, 0]
    with pytest.raises(ValueError, match="4 wide, is singular or estimated from too few samples: 200"):
        Gaussian.fit(Sequences(inputs))
    assert not Gaussian.has_full_covariance(Sequences(torch.randn(7, 2, 2)))


def test_the_picture_has_a_row_for_each_feature():
    data = NonlinearAutoregression(**SMALL)
    figure = data.draw(data.split("test").batch(torch.arange(8)), torch.randn(8, 16, 2))
    assert len(figure.axes) == 4
    assert [len(axes.lines) for axes in figure.axes] == [5] * 4
