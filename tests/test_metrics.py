"""Likelihoods of sequences of any length, counted once each."""

import math

import pytest
import torch

from flowattn import metrics
from flowattn.metrics import Likelihood, lengths


def test_values_are_those_of_the_definitions():
    log_prob = torch.randn(50, dtype=torch.float64) * 3 - 20
    counts = torch.randint(1, 9, (50,))
    metric = Likelihood(features=3)
    metric.update(log_prob, counts)
    values = metric.values()
    assert values["nll"] == pytest.approx(-log_prob.mean().item())
    assert values["nll_error"] == pytest.approx(log_prob.std().item() / math.sqrt(50))
    assert values["token_nll"] == pytest.approx(-log_prob.sum().item() / counts.sum().item())
    assert values["bpd"] == pytest.approx(-log_prob.sum().item() / (3 * counts.sum().item() * math.log(2)))


def test_how_sequences_are_batched_does_not_matter():
    log_prob, counts = torch.randn(30), torch.randint(1, 5, (30,))
    whole, parts = Likelihood(2), Likelihood(2)
    whole.update(log_prob, counts)
    for part in (slice(0, 1), slice(1, 17), slice(17, 30)):
        parts.update(log_prob[part], counts[part])
    assert parts.values() == pytest.approx(whole.values())


def test_many_float32_values_far_from_zero_lose_no_digits():
    metric = Likelihood(1)
    log_prob = 1e4 + torch.randn(1000)
    for _ in range(100):
        metric.update(log_prob, torch.ones(1000, dtype=torch.long))
    assert metric.values()["nll"] == pytest.approx(-log_prob.double().mean().item(), rel=1e-12)
    wanted = log_prob.double().std(correction=0).item() / math.sqrt(1e5)
    assert metric.values()["nll_error"] == pytest.approx(wanted, rel=1e-4)


def test_nothing_counted_gives_not_a_number():
    assert math.isnan(Likelihood(2).values()["nll"])


def test_one_sequence_has_no_error():
    metric = Likelihood(2)
    metric.update(torch.tensor([-1.0]), torch.tensor([2]))
    assert math.isnan(metric.values()["nll_error"]) and metric.values()["nll"] == 1
    metric.update(torch.tensor([-3.0]), torch.tensor([2]))
    assert metric.values()["nll_error"] == 1


def test_counts_are_whole_numbers_and_sums_as_precise_as_the_device_allows(monkeypatch):
    metric = Likelihood(2)
    assert metric.count.dtype == metric.tokens.dtype == torch.long
    assert metric.float().half().total.dtype == torch.float64
    assert metrics._exact(torch.device("mps")) == torch.float32
    monkeypatch.setattr(metrics, "_exact", lambda device: torch.float32 if device.type == "meta" else torch.float64)
    metric.to("meta").reset()
    for sums in (metric.total, metric.squares):
        assert sums.device.type == "meta" and sums.dtype == torch.float32
    assert metric.count.device.type == "meta" and metric.count.dtype == torch.long


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"one entry per sequence; got shapes \[3\] and \[2\]"):
        Likelihood(2).update(torch.zeros(3), torch.ones(2))
    with pytest.raises(ValueError, match="one entry per sequence"):
        Likelihood(2).update(torch.zeros(3, 1), torch.ones(3, 1))


def test_lengths_are_those_of_the_context():
    inputs, mask = torch.zeros(2, 3, 1), torch.tensor([[True, False, False], [True, True, True]])
    assert lengths(inputs).tolist() == [3, 3]
    assert lengths(inputs, mask).tolist() == [1, 3]
    packed = torch.zeros(2, 3, 4).masked_fill(~mask.unsqueeze(-1), -torch.inf)
    assert lengths(inputs, packed).tolist() == [1, 3]


def test_mean_free_sequences_have_a_token_less_in_bits_per_dimension():
    usual, mean_free = Likelihood(2), Likelihood(2, is_mean_free=True)
    for metric in (usual, mean_free):
        metric.update(torch.tensor([-3.0, -5.0]), torch.tensor([2, 4]))
    assert mean_free.values()["token_nll"] == usual.values()["token_nll"]
    assert mean_free.values()["bpd"] == pytest.approx(usual.values()["bpd"] * 6 / 4)
