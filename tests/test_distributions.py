import numpy as np
import pytest
import torch
from nflows import transforms as nf
from nflows.distributions import StandardNormal
from nflows.flows import Flow
from torch import nn

from flowattn.context import pack_context
from flowattn.distributions import SequenceNormal
from flowattn.transforms import AttentionCoupling, FeedForwardCoupling, TokenActNorm, Tokenwise

TOKENS, FEATURES, WIDTH = 4, 3, 2
MASK = torch.tensor([[True, True, False, False], [False, True, True, True], [True] * 4])
CONTEXTS = {
    "None": lambda: None,
    "mask": lambda: MASK,
    "shorter mask": lambda: MASK[:, :2],
    "sequence features": lambda: torch.randn(3, WIDTH),
    "token features": lambda: torch.randn(3, TOKENS, WIDTH),
    "both": lambda: pack_context(torch.randn(3, WIDTH), MASK),
    "both, shorter": lambda: pack_context(torch.randn(3, 2, WIDTH), MASK[:, :2]),
}
each_context = pytest.mark.parametrize("make_context", CONTEXTS.values(), ids=CONTEXTS)


def mask_of(context):
    if context is None or (context.ndim == 2 and context.dtype != torch.bool):
        return torch.ones(3, TOKENS, dtype=torch.bool)
    return context if context.dtype == torch.bool else context.isfinite().all(-1)


def make_flow(context):
    width = WIDTH if context is not None and context.is_floating_point() else None
    flow = Flow(
        nf.CompositeTransform(
            [
                TokenActNorm(FEATURES),
                Tokenwise(nf.LULinear(FEATURES)),
                Tokenwise(nf.MaskedAffineAutoregressiveTransform(FEATURES, 8, context_features=width)),
                FeedForwardCoupling(FEATURES, 8, kind="affine", context_features=width),
                AttentionCoupling(FEATURES, 2, hidden=8, kind="rational-quadratic", context_features=width),
                nf.InverseTransform(AttentionCoupling(FEATURES, 2, hidden=8, context_features=width)),
            ]
        ),
        SequenceNormal((TOKENS, FEATURES)),
    )
    flow.log_prob(torch.randn(3, TOKENS, FEATURES)[:, : mask_of(context).shape[1]], context)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return flow.double().eval()


def in_double(context):
    return context.double() if context is not None and context.is_floating_point() else context


@each_context
def test_a_flow_gives_log_probabilities_of_real_tokens(make_context):
    context = make_context()
    flow, mask, context = make_flow(context), mask_of(context), in_double(context)
    x = torch.randn(*mask.shape, FEATURES, dtype=torch.float64)
    log_prob = flow.log_prob(x, context)
    assert log_prob.shape == (3,) and log_prob.dtype == torch.float64
    junk = torch.where(mask.unsqueeze(-1), x, torch.nan)
    torch.testing.assert_close(flow.log_prob(junk, context), log_prob)
    noise = flow.transform_to_noise(x, context)
    assert noise.shape == x.shape and torch.equal(noise[~mask], x[~mask])
    back, _ = flow._transform.inverse(noise, context)
    torch.testing.assert_close(back, x)


@each_context
def test_a_flow_gives_samples_with_their_log_probabilities(make_context):
    context = make_context()
    flow, mask, context = make_flow(context), mask_of(context), in_double(context)
    samples, log_prob = flow.sample_and_log_prob(5, context)
    if context is None:
        assert samples.shape == (5, TOKENS, FEATURES) and log_prob.shape == (5,)
        torch.testing.assert_close(flow.log_prob(samples), log_prob)
        assert flow.sample(5).shape == samples.shape
        return
    assert samples.shape == (3, 5, *mask.shape[1:], FEATURES) and log_prob.shape == (3, 5)
    assert samples.dtype == torch.float64
    assert samples.masked_select(~mask[:, None, :, None]).eq(0).all()
    repeated = context.repeat_interleave(5, 0)
    torch.testing.assert_close(flow.log_prob(samples.flatten(0, 1), repeated), log_prob.flatten())
    assert flow.sample(5, context).shape == samples.shape


def test_an_embedding_net_makes_features():
    context = torch.randn(3, 7)
    transform = AttentionCoupling(FEATURES, 2, hidden=8, context_features=WIDTH)
    flow = Flow(transform, SequenceNormal((TOKENS, FEATURES)), embedding_net=nn.Linear(7, WIDTH))
    assert flow.log_prob(torch.randn(3, TOKENS, FEATURES), context).shape == (3,)
    assert flow.sample(5, context).shape == (3, 5, TOKENS, FEATURES)


def test_an_embedding_net_that_spoils_packed_features_is_refused():
    flow = Flow(nf.IdentityTransform(), SequenceNormal((TOKENS, FEATURES)), embedding_net=nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ValueError, match="context must be finite, or -inf throughout"):
        flow.log_prob(torch.randn(3, TOKENS, FEATURES), pack_context(torch.randn(3, WIDTH), MASK))


def test_log_probabilities_are_those_of_nflows_without_padding():
    x = torch.randn(6, TOKENS, FEATURES, dtype=torch.float64)
    wanted = StandardNormal([TOKENS, FEATURES]).log_prob(x)
    torch.testing.assert_close(SequenceNormal((TOKENS, FEATURES)).log_prob(x), wanted)


def test_shorter_sequences_have_the_log_probability_of_their_tokens():
    base, x = SequenceNormal((TOKENS, FEATURES)), torch.randn(3, TOKENS, FEATURES)
    mask = torch.tensor([True, True, False, False]).expand(3, -1)
    torch.testing.assert_close(base.log_prob(x, mask), base.log_prob(x[:, :2]))
    assert torch.equal(base.log_prob(x, torch.zeros_like(mask)), torch.zeros(3))


def test_in_bfloat16_log_probabilities_are_added_up_in_single_precision():
    base = SequenceNormal((500, 8)).bfloat16()
    x = base.sample(3)
    log_prob = base.log_prob(x)
    assert x.dtype == torch.bfloat16 and log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob, SequenceNormal((500, 8)).log_prob(x.double()).float())


def test_nothing_of_it_is_in_double_precision_or_in_the_state():
    base = SequenceNormal((TOKENS, FEATURES))
    assert all(buffer.dtype == torch.float32 for buffer in base.buffers()) and not base.state_dict()
    assert base.to("meta").sample(2).device.type == "meta"


def test_samples_are_standard_normal_at_real_tokens():
    samples = SequenceNormal((TOKENS, FEATURES)).sample(4000, MASK)
    real = samples.transpose(1, 2)[MASK]
    assert real.mean().abs() < 4 / real.numel() ** 0.5
    assert (real.var() - 1).abs() < 4 * (2 / real.numel()) ** 0.5


def test_samples_come_in_batches_of_any_size():
    base = SequenceNormal((TOKENS, FEATURES))
    assert base.sample(7, batch_size=3).shape == (7, TOKENS, FEATURES)
    samples = base.sample(7, MASK, batch_size=3)
    assert samples.shape == (3, 7, TOKENS, FEATURES)
    assert samples.masked_select(~MASK[:, None, :, None]).eq(0).all()


@each_context
def test_the_mean_is_zero(make_context):
    context = make_context()
    mean = SequenceNormal((TOKENS, FEATURES)).mean(context)
    shape = (TOKENS, FEATURES) if context is None else (*mask_of(context).shape, FEATURES)
    assert torch.equal(mean, torch.zeros(shape))


def test_numbers_and_masks_of_numpy_are_taken():
    base = SequenceNormal(np.array([4, 3]))
    assert base.sample(np.int64(2)).shape == (2, 4, 3)
    assert base.sample(2, MASK.numpy()).shape == (3, 2, 4, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda base: base.log_prob(torch.zeros(2, 5, 3)), r"with 1 to 4 tokens; got \[2, 5, 3\]"),
        (lambda base: base.log_prob(torch.zeros(2, 4, 2)), r"shape \[batch, tokens, 3\].*got \[2, 4, 2\]"),
        (lambda base: base.log_prob(torch.zeros(2, 3)), r"got \[2, 3\]"),
        (lambda base: base.log_prob(torch.zeros(3, 4, 3), MASK.long()), "boolean mask; got torch.int64"),
        (lambda base: base.sample(2, torch.ones(2, 5, dtype=torch.bool)), r"1 to 4 tokens; got \[2, 5, 3\]"),
        (lambda base: base.sample(2, MASK.long()), "boolean mask; got torch.int64"),
        (lambda base: base.sample(0), "num_samples must be a whole number of at least 1"),
        (lambda base: SequenceNormal((3,)), r"event_shape must be \(tokens, features\); got \(3,\)"),
        (lambda base: SequenceNormal((0, 3)), r"event_shape\[0\] must be a whole number of at least 1; got .*=0"),
        (lambda base: SequenceNormal((5.0, 2)), r"event_shape\[0\] must be a whole number.*=5\.0"),
        (lambda base: SequenceNormal((5, "2")), r"event_shape\[1\] must be a whole number.*='2'"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(SequenceNormal((TOKENS, FEATURES)))
