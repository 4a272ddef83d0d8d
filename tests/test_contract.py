"""Every transform keeps the contract, and the contract notices who does not."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from nflows import transforms as nf
from nflows.nn.nets import ResidualNet
from nflows.transforms.base import Transform
from torch import nn

from flowattn.context import keep_padding, pack_context, split_context, sum_over_tokens, zero_padding
from flowattn.testing import CHECKS, ContractViolation, check_transform
from flowattn.transforms import AttentionCoupling, FeedForwardCoupling, TokenActNorm, Tokenwise


@dataclass
class Entry:
    """A transform to check; `options` are those of `check_transform`."""

    make: Callable[[], Transform]
    event_shape: tuple[int, ...] = (4, 3)
    context: Callable[[int], torch.Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def sequence_features(batch_size: int) -> torch.Tensor:
    return torch.randn(batch_size, 2)


def token_features(batch_size: int) -> torch.Tensor:
    return torch.randn(batch_size, 4, 2)


def some_padding(batch_size: int) -> torch.Tensor:
    return torch.arange(4) <= torch.arange(batch_size).unsqueeze(1)


def packed(batch_size: int) -> torch.Tensor:
    return pack_context(token_features(batch_size), some_padding(batch_size))


def spline_coupling() -> Transform:
    def network(inputs: int, outputs: int) -> nn.Module:
        return ResidualNet(inputs, outputs, hidden_features=8, num_blocks=1)

    return nf.PiecewiseRationalQuadraticCouplingTransform(
        [1, 0, 1], network, num_bins=4, tails="linear", tail_bound=3.0
    )


def spline_autoregressive() -> Transform:
    return nf.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
        3, 8, num_blocks=1, num_bins=4, tails="linear", tail_bound=3.0
    )


def maf(context_features: int | None = None) -> Transform:
    return nf.MaskedAffineAutoregressiveTransform(3, 8, num_blocks=1, context_features=context_features)


def layer() -> Transform:
    return nf.CompositeTransform(
        [
            TokenActNorm(3),
            Tokenwise(nf.LULinear(3)),
            FeedForwardCoupling(3, 8, kind="affine"),
            nf.InverseTransform(AttentionCoupling(3, 2, hidden=8)),
        ]
    )


TRANSFORMS = {
    "Tokenwise(LULinear)": Entry(lambda: Tokenwise(nf.LULinear(3, identity_init=False))),
    "Tokenwise(ReversePermutation)": Entry(lambda: Tokenwise(nf.ReversePermutation(3))),
    "Tokenwise(ActNorm)": Entry(lambda: Tokenwise(nf.ActNorm(3))),
    "Tokenwise(spline coupling)": Entry(lambda: Tokenwise(spline_coupling())),
    "Tokenwise(spline autoregressive)": Entry(lambda: Tokenwise(spline_autoregressive())),
    "Tokenwise(MAF), sequence features": Entry(lambda: Tokenwise(maf(2)), context=sequence_features),
    "Tokenwise(MAF), token features": Entry(lambda: Tokenwise(maf(2)), context=token_features),
    "Tokenwise(MAF), context not used": Entry(lambda: Tokenwise(maf(), use_context=False), context=packed),
    "TokenActNorm": Entry(lambda: TokenActNorm(3)),
    "TokenActNorm, some padding": Entry(lambda: TokenActNorm(3), context=some_padding),
    "FeedForwardCoupling, additive": Entry(lambda: FeedForwardCoupling(3, 8)),
    "FeedForwardCoupling, affine": Entry(lambda: FeedForwardCoupling(3, 8, kind="affine", activation=nn.Tanh)),
    "FeedForwardCoupling, packed context": Entry(
        lambda: FeedForwardCoupling(3, 8, kind="affine", num_layers=3, context_features=2), context=packed
    ),
    "AttentionCoupling, affine": Entry(lambda: AttentionCoupling(3, 2, hidden=8)),
    "AttentionCoupling, spline": Entry(
        lambda: AttentionCoupling(
            3, 2, hidden=8, kind="rational-quadratic", num_bins=4, tail_bound=2.0, mask=[True, False, True]
        )
    ),
    "AttentionCoupling, dot product": Entry(lambda: AttentionCoupling(3, 2, hidden=8, attention="dot-product")),
    "AttentionCoupling, causal, learned bias": Entry(
        lambda: AttentionCoupling(3, 2, hidden=8, causal=True, position_bias="learned", max_tokens=4)
    ),
    "AttentionCoupling, sequence features": Entry(
        lambda: AttentionCoupling(3, 2, hidden=8, context_features=2), context=sequence_features
    ),
    "AttentionCoupling, packed context": Entry(
        lambda: AttentionCoupling(3, 2, hidden=8, position_bias="alibi", context_features=2),
        context=packed,
    ),
    "a layer of all": Entry(layer),
}
#: Checks that choose their precision themselves, or take long.
ONLY_IN_DOUBLE = {
    "gradients_are_those_of_finite_differences",
    "single_and_double_precision_agree",
    "works_under_torch_compile",
}


def every_check():
    for name in TRANSFORMS:
        for check in CHECKS:
            # nflows looks at values in the midst of its splines, where the compiler has to stop and start again.
            slow = "spline" in name and check == "works_under_torch_compile"
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(name, check, torch.float64, id=f"{name}: {check}", marks=marks)
            if check not in ONLY_IN_DOUBLE:
                yield pytest.param(name, check, torch.float32, id=f"{name}, float32: {check}")


@pytest.mark.parametrize(("name", "check", "dtype"), list(every_check()))
def test_every_transform_keeps_the_contract(name, check, dtype, without_shape_checks):
    entry = TRANSFORMS[name]
    options = {"supports_mask": True, **entry.options}
    check_transform(entry.make, entry.event_shape, context=entry.context, dtype=dtype, only=[check], **options)


class Broken(Transform):
    """Scales, without a fault but for those of a subclass."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs, context=None):
        return self.outputs(inputs, context), self.logabsdet(inputs, context)

    def inverse(self, inputs, context=None):
        _, mask = split_context(context, inputs)
        return keep_padding(zero_padding(inputs, mask) / self.scale, inputs, mask), -self.logabsdet(inputs, context)

    def outputs(self, inputs, context):
        _, mask = split_context(context, inputs)
        return keep_padding(zero_padding(inputs, mask) * self.scale, inputs, mask)

    def logabsdet(self, inputs, context):
        _, mask = split_context(context, inputs)
        return sum_over_tokens(self.scale.abs().log().expand(inputs.shape), mask)


class CountsOneToken(Broken):
    def logabsdet(self, inputs, context):
        return self.scale.abs().log().sum().expand(len(inputs))


class HasTheWrongSign(Broken):
    def logabsdet(self, inputs, context):
        return -super().logabsdet(inputs, context)


class GivesAColumn(Broken):
    def logabsdet(self, inputs, context):
        return super().logabsdet(inputs, context).unsqueeze(1)


class CountsPadding(Broken):
    def logabsdet(self, inputs, context):
        return super().logabsdet(inputs, None)


class ReadsPadding(Broken):
    def outputs(self, inputs, context):
        _, mask = split_context(context, inputs)
        return keep_padding(inputs * self.scale + inputs.sum((1, 2), keepdim=True), inputs, mask)


class SpoilsGradientsByPadding(Broken):
    def outputs(self, inputs, context):
        _, mask = split_context(context, inputs)
        return keep_padding(inputs * self.scale, inputs, mask)


class MovesPadding(Broken):
    def outputs(self, inputs, context):
        return inputs * self.scale


class LooksAtBatchMates(Broken):
    def outputs(self, inputs, context):
        return super().outputs(inputs - inputs.mean(0), context)


class WritesIntoInputs(Broken):
    def outputs(self, inputs, context):
        inputs.mul_(2)
        return super().outputs(inputs / 2, context)


class WantsGradients(Broken):
    def outputs(self, inputs, context):
        if not inputs.requires_grad and inputs.is_leaf:
            inputs.requires_grad_()
        return super().outputs(inputs, context)


class CountsItsCalls(Broken):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def outputs(self, inputs, context):
        self.calls += 1
        return super().outputs(inputs, context)


class InvertsRoughly(Broken):
    def inverse(self, inputs, context=None):
        outputs, logabsdet = super().inverse(inputs, context)
        return outputs + 1e-6, logabsdet


class HasNoInverse(Broken):
    inverse = Transform.inverse


class DetachesItsLogabsdet(Broken):
    def logabsdet(self, inputs, context):
        return super().logabsdet(inputs, context).detach()


class RoundsToSingle(Broken):
    def outputs(self, inputs, context):
        return super().outputs(inputs, context).float()


class StartsAnewAfterLoading(TokenActNorm):
    def __init__(self):
        super().__init__(3)
        del self.initialized
        self.initialized = torch.tensor(False)


class RemembersItsWeights(Broken):
    def __init__(self):
        super().__init__()
        self.remembered = None

    def outputs(self, inputs, context):
        if self.training:
            self.remembered = None
            return super().outputs(inputs, context)
        if self.remembered is None:
            self.remembered = self.scale.detach().clone()
        return inputs * self.remembered


class LooksAtValues(Broken):
    def outputs(self, inputs, context):
        return inputs * self.scale * inputs.detach().numpy().astype("float64").shape[0] / len(inputs)


class NeedsAutograd(Broken):
    def outputs(self, inputs, context):
        with torch.enable_grad():
            x = inputs.detach().requires_grad_()
            return inputs * self.scale + 0 * torch.autograd.grad(x.square().sum(), x)[0]


@pytest.mark.parametrize(
    ("transform", "check", "message"),
    [
        (
            CountsOneToken,
            "logabsdet_is_that_of_the_autograd_jacobian",
            r"logabsdet is off at 4 of 4 places.*in place of",
        ),
        (HasTheWrongSign, "logabsdet_is_that_of_the_autograd_jacobian", "logabsdet is off at 4 of 4 places"),
        (GivesAColumn, "outputs_are_like_inputs_and_logabsdet_is_one_number_per_sample", r"of shape \[4, 1\]"),
        (CountsPadding, "logabsdet_is_that_of_the_autograd_jacobian", r"\(forward, with a mask, torch.float64\)"),
        (CountsPadding, "padding_at_the_end_can_be_cut_off", "logabsdet without the last token"),
        (ReadsPadding, "padding_is_not_read", "the output at real tokens, when padding is 1000.0"),
        (ReadsPadding, "padding_at_the_end_can_be_cut_off", "the output without the last token"),
        (SpoilsGradientsByPadding, "padding_is_not_read", "the gradient of scale, when padding is nan"),
        (MovesPadding, "padding_passes_through_unchanged", "the output at padding is off"),
        (LooksAtBatchMates, "samples_do_not_depend_on_their_batch_mates", "the output of sample 0, alone"),
        (WritesIntoInputs, "nothing_given_is_changed", "it writes into the inputs"),
        (WantsGradients, "nothing_given_is_changed", "it sets requires_grad on the inputs"),
        (CountsItsCalls, "nothing_given_is_changed", "it changes calls"),
        (InvertsRoughly, "inverse_undoes_it", "what comes back is off.*an error of 1.0e-06, where"),
        (HasNoInverse, "inverse_undoes_it", "InverseNotAvailable"),
        (DetachesItsLogabsdet, "gradients_are_those_of_finite_differences", "1 = scale"),
        (RoundsToSingle, "outputs_are_like_inputs_and_logabsdet_is_one_number_per_sample", "torch.float64 become"),
        (RoundsToSingle, "single_and_double_precision_agree", "float64 becomes torch.float32 in double"),
        (
            StartsAnewAfterLoading,
            "a_loaded_state_gives_the_same_function",
            "after loading and a batch in training mode",
        ),
        (RemembersItsWeights, "a_loaded_state_gives_the_same_function", "the output after loading"),
        (LooksAtValues, "works_under_torch_func", "RuntimeError"),
        (NeedsAutograd, "works_under_inference_mode", "RuntimeError"),
    ],
)
def test_a_broken_transform_is_caught(transform, check, message):
    with pytest.raises(ContractViolation, match=message):
        check_transform(transform, (4, 3), supports_mask=True, only=[check])
    with pytest.raises(ContractViolation):
        check_transform(transform, (4, 3), supports_mask=True)


def test_nothing_but_the_contract_is_asked_of_a_transform():
    check_transform(Broken, (4, 3), supports_mask=True)
    check_transform(lambda: nf.LULinear(3), (3,), skip=["works_under_torch_compile"])


def test_a_cache_that_survives_loading_is_caught():
    with pytest.raises(ContractViolation, match="after loading"):
        check_transform(
            lambda: nf.LULinear(3, using_cache=True),
            (3,),
            directions=["forward"],
            only=["a_loaded_state_gives_the_same_function"],
        )


def test_transforms_of_part_of_the_numbers_can_be_checked():
    check_transform(nf.Logit, (2,), make_inputs=torch.rand, skip=["works_under_torch_compile"])


class Noisy(Broken):
    """An estimate of logabsdet with an error of mean `bias`."""

    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def logabsdet(self, inputs, context):
        exact = super().logabsdet(inputs, context)
        return exact + 0.1 * torch.randn_like(exact) + self.bias


def test_an_estimate_of_logabsdet_is_held_to_its_mean():
    check = {"supports_mask": True, "stochastic": True, "only": ["logabsdet_is_that_of_the_autograd_jacobian"]}
    check_transform(lambda: Noisy(0.0), (4, 3), **check)
    with pytest.raises(ContractViolation, match=r"is biased\. Its mean over 512 draws"):
        check_transform(lambda: Noisy(0.05), (4, 3), **check)
    with pytest.raises(ContractViolation):
        check_transform(lambda: Noisy(0.0), (4, 3), **{**check, "stochastic": False})


def test_the_rest_of_the_contract_holds_for_an_estimate():
    check_transform(lambda: Noisy(0.0), (4, 3), supports_mask=True, stochastic=True)


def test_a_check_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="only and skip must name checks"):
        check_transform(Broken, (4, 3), skip=["everything"])


def test_random_numbers_of_the_caller_are_not_touched():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    check_transform(Broken, (4, 3), only=["inverse_undoes_it"])
    assert torch.equal(before, torch.get_rng_state())
