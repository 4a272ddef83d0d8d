import copy
import io

import pytest
import torch
from nflows.utils import torchutils

from flowattn.context import keep_padding, pack_context, per_token, split_context, sum_over_tokens, zero_padding

inf, nan = torch.inf, torch.nan
X = torch.zeros(2, 3, 5)
MASK = torch.tensor([[True, True, False], [True, False, False]])
ALL = torch.ones_like(MASK)


def test_no_context_is_none():
    assert pack_context() is None
    assert split_context(None, X) == (None, None)


def test_a_mask_is_its_own_context():
    assert pack_context(mask=MASK) is MASK
    features, mask = split_context(MASK, X)
    assert features is None and mask is MASK


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4), (2, 3)])
def test_features_alone_are_their_own_context(shape):
    values = torch.randn(shape)
    assert pack_context(values) is values
    features, mask = split_context(values, X)
    assert features is values and mask is None


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4), (2, 3, 1)])
def test_splitting_undoes_packing(shape):
    values = torch.randn(shape)
    features, mask = split_context(pack_context(values, MASK), X)
    assert torch.equal(mask, MASK)
    assert torch.equal(features, zero_padding(per_token(values, X), MASK))


def test_a_mask_without_padding_leaves_no_trace():
    features, mask = split_context(pack_context(torch.randn(2, 3, 4), ALL), X)
    assert mask is None and features.shape == (2, 3, 4)


def test_a_sequence_may_be_nothing_but_padding():
    _, mask = split_context(pack_context(torch.randn(2, 4), ~ALL), X)
    assert not mask.any()


def test_features_of_padding_are_not_read():
    values = torch.randn(2, 3, 4)
    context = pack_context(torch.where(MASK.unsqueeze(-1), values, nan), MASK)
    assert torch.equal(context, pack_context(values, MASK))


def test_the_packed_tensor_survives_what_is_done_to_tensors():
    context = pack_context(torch.randn(2, 4), MASK)
    file = io.BytesIO()
    torch.save(context, file)
    file.seek(0)
    for again in (copy.deepcopy(context), torch.load(file), context.double().float(), torch.stack(list(context))):
        assert torch.equal(split_context(again, X)[1], MASK)
    assert torch.equal(split_context(context[1:], X[1:])[1], MASK[1:])
    repeated = torchutils.repeat_rows(context, 3)
    assert torch.equal(split_context(repeated, X.repeat(3, 1, 1))[1], MASK.repeat_interleave(3, 0))
    assert torch.equal(split_context(context.bfloat16(), X)[1], MASK)


def test_gradients_reach_the_features_of_real_tokens():
    values = torch.randn(2, 4, requires_grad=True)
    features, _ = split_context(pack_context(values, MASK), X)
    features.sum().backward()
    assert torch.equal(values.grad, torch.tensor([[2.0], [1.0]]).expand(2, 4))


def test_finite_features_whose_sum_is_not_are_taken():
    values = torch.full((2, 3, 4), 3e38)
    features, mask = split_context(values, X)
    assert features is values and mask is None


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_value_that_is_not_finite_is_refused_with_its_index(value):
    for shape, where in (((2, 4), [1, 2]), ((2, 3, 4), [1, 2, 3])):
        values = torch.zeros(shape)
        values[tuple(where)] = value
        pattern = rf"must be finite.*got {value} at index \[{', '.join(map(str, where))}\]"
        with pytest.raises(ValueError, match="context " + pattern):
            split_context(values, X)
        with pytest.raises(ValueError, match="features " + pattern):
            pack_context(values)
        with pytest.raises(ValueError, match=r"features must be finite"):
            pack_context(values, ALL)


def test_a_row_that_is_partly_minus_infinity_is_refused_beside_padding():
    context = pack_context(torch.zeros(2, 3, 4), MASK)
    context[0, 1, 2] = -inf
    with pytest.raises(ValueError, match=r"-inf throughout the row of a padded token; got -inf at index \[0, 1, 2\]"):
        split_context(context, X)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (MASK.long(), r"floating-point features or a boolean mask; got torch.int64 of shape \[2, 3\]"),
        (MASK[:, :2], r"mask must have shape \[batch, tokens\] = \[2, 3\]; got \[2, 2\]"),
        (MASK.unsqueeze(-1), r"mask must have shape \[batch, tokens\] = \[2, 3\]; got \[2, 3, 1\]"),
        (torch.zeros(3, 4), r"\[batch, tokens\] = \[2, 3\]; got \[3, 4\]"),
        (torch.zeros(2, 4, 4), r"\[batch, tokens\] = \[2, 3\]; got \[2, 4, 4\]"),
        (torch.zeros(2), r"got \[2\]"),
        (torch.zeros(2, 3, 4, 1), r"got \[2, 3, 4, 1\]"),
        (torch.zeros(2, 3, 0), r"at least one wide; got \[2, 3, 0\]"),
    ],
)
def test_what_is_no_context_is_refused_with_its_shape(context, message):
    with pytest.raises(ValueError, match=message):
        split_context(context, X)


def test_inputs_that_are_no_sequences_are_refused():
    with pytest.raises(ValueError, match=r"inputs must have shape \[batch, tokens, features\]; got \[2, 3\]"):
        split_context(None, X[..., 0])


@pytest.mark.parametrize(
    ("features", "mask", "message"),
    [
        (None, MASK.long(), r"mask must be boolean of shape \[batch, tokens\]; got torch.int64"),
        (None, MASK[0], r"mask must be boolean of shape \[batch, tokens\]; got torch.bool of shape \[3\]"),
        (torch.zeros(2, 4).long(), None, "features must be floating-point"),
        (torch.zeros(3, 4), MASK, r"\[batch, tokens\] = \[2, 3\] as in the mask; got \[3, 4\]"),
        (torch.zeros(2, 2, 4), MASK, r"\[batch, tokens\] = \[2, 3\] as in the mask; got \[2, 2, 4\]"),
    ],
)
def test_what_cannot_be_packed_is_refused(features, mask, message):
    with pytest.raises(ValueError, match=message):
        pack_context(features, mask)


def test_features_of_tokens_bring_a_mask_where_nobody_may_look():
    values = torch.randn(2, 3, 4)
    context = pack_context(values, MASK)

    def split(context, x):
        return split_context(context.unsqueeze(0), x.unsqueeze(0))

    for given, wanted in ((values, ALL), (context, MASK)):
        features, mask = torch.func.vmap(split)(given, X)
        assert torch.equal(mask.squeeze(1), wanted)
        assert torch.equal(features.squeeze(1), zero_padding(values, wanted))
        features, mask = torch.compile(split_context, backend="eager", fullgraph=True)(given, X)
        assert torch.equal(mask, wanted)
        assert torch.equal(features, zero_padding(values, wanted))


def test_sums_count_real_tokens_in_at_least_single_precision():
    values = torch.full((2, 3, 400), 1.01, dtype=torch.bfloat16)
    values[0, 2] = nan
    values[1, 1:] = inf
    total = sum_over_tokens(values, MASK)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, torch.tensor([800.0, 400.0]) * values[0, 0, 0].item())
    assert sum_over_tokens(values.double(), MASK).dtype == torch.float64
    assert torch.equal(sum_over_tokens(torch.ones(2, 3), MASK), torch.tensor([2.0, 1.0]))


def test_padding_is_kept_and_its_gradient_is_that_of_the_identity():
    x = torch.randn(2, 3, 5)
    x[0, 2] = nan
    x.requires_grad_()
    outputs = keep_padding(2 * zero_padding(x, MASK), x, MASK)
    (gradient,) = torch.autograd.grad(outputs.sum(), x)
    assert torch.equal(gradient, torch.where(MASK.unsqueeze(-1), 2.0, 1.0).expand_as(x))
    assert outputs[0, 2].isnan().all()
