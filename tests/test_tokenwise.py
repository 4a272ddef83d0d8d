import pytest
import torch
from nflows import transforms as nf
from nflows.transforms.base import Transform
from torch import nn

from flowattn.context import pack_context
from flowattn.transforms import Tokenwise

MASK = torch.tensor([[True, True, False, False], [False, True, True, True], [False] * 4])


class Spy(Transform):
    """Passes on what it is given, and remembers it."""

    def forward(self, inputs, context=None):
        self.inputs, self.context = inputs, context
        return inputs, inputs.new_ones(len(inputs))

    inverse = forward


def lu():
    transform = nf.LULinear(3, identity_init=False)
    with torch.no_grad():
        transform.bias.normal_()
    return transform


def test_lu_counts_every_token_where_nflows_counts_one():
    x, transform = torch.randn(5, 4, 3), lu()
    outputs, logabsdet = Tokenwise(transform)(x)
    bare_outputs, bare_logabsdet = transform(x)
    torch.testing.assert_close(outputs, bare_outputs)
    torch.testing.assert_close(logabsdet, 4 * bare_logabsdet)


def test_only_real_tokens_are_counted():
    transform = lu()
    _, logabsdet = Tokenwise(transform)(torch.randn(3, 4, 3), MASK)
    torch.testing.assert_close(logabsdet, transform.logabsdet() * torch.tensor([2.0, 3.0, 0.0]))


def test_only_real_tokens_reach_the_transform():
    x, spy = torch.randn(3, 4, 3), Spy()
    Tokenwise(spy)(x, MASK)
    assert torch.equal(spy.inputs, x[MASK]) and spy.context is None
    Tokenwise(spy)(x)
    assert torch.equal(spy.inputs, x.flatten(0, 1)) and spy.context is None


def test_features_reach_the_transform_one_row_per_token():
    x, spy = torch.randn(3, 4, 3), Spy()
    sequence, tokens = torch.randn(3, 2), torch.randn(3, 4, 2)
    for context, wanted in (
        (sequence, sequence.repeat_interleave(4, 0)),
        (tokens, tokens.flatten(0, 1)),
        (pack_context(tokens, MASK), tokens[MASK]),
        (pack_context(sequence, MASK), sequence.repeat_interleave(MASK.sum(1), 0)),
    ):
        Tokenwise(spy).inverse(x, context)
        assert torch.equal(spy.context, wanted)
        Tokenwise(spy, use_context=False)(x, context)
        assert spy.context is None


def test_data_dependent_starts_see_real_tokens_only():
    x = torch.randn(3, 4, 3).masked_fill(~MASK.unsqueeze(-1), 1e6)
    transform = Tokenwise(nf.ActNorm(3))
    outputs, _ = transform(x, MASK)
    torch.testing.assert_close(outputs[MASK].mean(0), torch.zeros(3), atol=1e-5, rtol=0)


def test_a_batch_of_nothing_but_padding_is_passed_through():
    x = torch.randn(3, 4, 3)
    outputs, logabsdet = Tokenwise(lu())(x, torch.zeros_like(MASK))
    assert torch.equal(outputs, x) and torch.equal(logabsdet, torch.zeros(3))


def test_feature_permutations_permute_features():
    x = torch.randn(2, 4, 3)
    outputs, logabsdet = Tokenwise(nf.ReversePermutation(3))(x)
    assert torch.equal(outputs, x.flip(-1)) and torch.equal(logabsdet, torch.zeros(2))


def test_padding_is_replaced_by_what_the_transform_can_take_while_torch_func_traces():
    x = torch.rand(3, 4, 3).masked_fill(~MASK.unsqueeze(-1), -7.0)
    transform = Tokenwise(nf.Logit())  # takes numbers in (0, 1) only
    wanted = torch.autograd.functional.jacobian(lambda x: transform(x, MASK)[0], x)
    torch.testing.assert_close(torch.func.jacrev(lambda x: transform(x, MASK)[0])(x), wanted)
    padded = torch.full_like(MASK, False)
    assert torch.func.grad(lambda x: transform(x, padded)[1].sum())(x * torch.nan).eq(0).all()


@pytest.mark.parametrize("context", [None, MASK, pack_context(torch.randn(3, 4, 2), MASK)], ids=["", "mask", "packed"])
def test_gradients_of_each_sample_by_vmap(context):
    transform = Tokenwise(lu(), use_context=False)
    parameters = {name: p.detach() for name, p in transform.named_parameters()}

    def loss(parameters, x, context):
        context = None if context is None else context.unsqueeze(0)
        outputs, logabsdet = torch.func.functional_call(transform, parameters, (x.unsqueeze(0), context))
        return outputs.square().sum() + logabsdet.sum()

    x = torch.randn(3, 4, 3)
    in_dims = (None, 0, None if context is None else 0)
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=in_dims)(parameters, x, context)
    for k in range(3):
        wanted = torch.func.grad(loss)(parameters, x[k], None if context is None else context[k])
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name][k], gradient)


def test_under_autocast_it_runs_in_single_precision():
    transform, x = Tokenwise(lu()), torch.randn(5, 4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, logabsdet = transform(x)
        back, _ = transform.inverse(outputs)
    assert outputs.dtype == logabsdet.dtype == torch.float32
    torch.testing.assert_close(back, x, atol=1e-5, rtol=1e-5)


def test_in_bfloat16_the_log_determinant_is_added_up_in_single_precision():
    inner = nf.ActNorm(3)
    inner(1.7 * torch.randn(100, 3))
    transform, x = Tokenwise(inner).bfloat16(), torch.randn(2, 1000, 3, dtype=torch.bfloat16)
    for context in (None, torch.ones(2, 1000, dtype=torch.bool)):
        outputs, logabsdet = transform(x, context)
        assert outputs.dtype == torch.bfloat16 and logabsdet.dtype == torch.float32
        torch.testing.assert_close(logabsdet, 1000 * inner(x[:, 0])[1].float())


def test_what_is_no_transform_is_refused():
    with pytest.raises(TypeError, match="transform must be an nflows Transform; got Linear"):
        Tokenwise(nn.Linear(3, 3))


def test_a_transform_of_something_else_is_refused():
    class Column(Spy):
        def forward(self, inputs, context=None):
            return inputs, inputs.new_ones(len(inputs), 1)

    with pytest.raises(ValueError, match=r"one logabsdet each; got outputs \[8, 3\] and logabsdet \[8, 1\]"):
        Tokenwise(Column())(torch.randn(2, 4, 3))


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"inputs must have shape \[batch, tokens, features\]; got \[2, 3\]"):
        Tokenwise(lu())(torch.randn(2, 3))
