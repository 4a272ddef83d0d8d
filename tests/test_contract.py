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
from flowattn.contractions import Compose, Declared, FeedForward, L2SelfAttention
from flowattn.flows import AttentionFlow
from flowattn.inverse import Solver
from flowattn.logdet import PowerSeries, RussianRoulette
from flowattn.models.trunk import SlowLULinear
from flowattn.testing import CHECKS, ContractViolation, check_transform
from flowattn.transforms import (
    AttentionCoupling,
    FeedForwardCoupling,
    InvertibleAttention,
    InvertibleFeedForward,
    ResidualTransform,
    TokenActNorm,
    Tokenwise,
)


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


class Sway(nn.Module):
    """A user's own map of each token: 0.5-Lipschitz, because a matrix over its norm is not longer than 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return 0.5 * torch.sin(x @ self.weight / self.weight.norm())


class Mix(Sway):
    """One that mixes tokens: each goes by the mean of the real ones, or of those up to itself."""

    def __init__(self, causal=False):
        super().__init__()
        self.causal = causal

    def forward(self, x, mask):
        real = torch.ones_like(x[..., :1]) if mask is None else mask.unsqueeze(-1).to(x.dtype)
        if self.causal:
            mean = (x * real).cumsum(1) / real.cumsum(1).clamp_min(1)
        else:
            mean = (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp_min(1)
        return super().forward(mean.expand_as(x))


def attention(num_heads: int = 2, head_features: int = 2, **options: Any) -> Callable[[], Transform]:
    # Finite differences want an inverse that is better than usual.
    solver = Solver(tolerance=1e-12) if torch.get_default_dtype() == torch.float64 else None
    return lambda: InvertibleAttention(3, num_heads, head_features=head_features, solver=solver, **options)


def declared(module: nn.Module, structure: str) -> Transform:
    return ResidualTransform(
        Declared(module, features=3, bound=0.5, structure=structure, takes_mask=isinstance(module, Mix))
    )


def chain(causal: bool) -> Transform:
    """Parts that are scaled and parts that are not, wide ones and narrow ones."""
    return ResidualTransform(
        Compose(
            FeedForward(3, 5, activation="tanh", out_features=4, coefficient=None),
            L2SelfAttention(4, 2, causal=causal, position_bias="alibi", coefficient=0.8),
            L2SelfAttention(4, 2, causal=causal, coefficient=None),
            FeedForward(4, 5, activation="clipswish", out_features=3, context_features=2, coefficient=None),
            coefficient=0.9,
        )
    )


def whole_flow(**options: Any) -> Transform:
    return AttentionFlow((4, 3), depth=1, num_heads=2, head_features=2, hidden=6, **options)._transform


ESTIMATED = {"stochastic": True, "num_draws": 128}

TRANSFORMS = {
    "Tokenwise(LULinear)": Entry(lambda: Tokenwise(nf.LULinear(3, identity_init=False))),
    "Tokenwise(SlowLULinear)": Entry(lambda: Tokenwise(SlowLULinear(3, identity_init=False))),
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
    "InvertibleAttention": Entry(attention()),
    "InvertibleAttention, causal": Entry(attention(3, 1, causal=True)),
    "InvertibleAttention, learned bias": Entry(attention(position_bias="learned", max_tokens=4)),
    "InvertibleAttention, alibi, radius": Entry(attention(position_bias="alibi", radius=0.7)),
    "InvertibleAttention, causal, learned bias, learned radius": Entry(
        attention(1, 2, causal=True, position_bias="learned", max_tokens=4, radius="learned")
    ),
    "InvertibleAttention, many heads": Entry(attention(5, radius="learned")),
    "InvertibleAttention, causal, many heads": Entry(attention(5, causal=True)),
    "InvertibleAttention, lift": Entry(attention(lift=6, radius="learned")),
    "InvertibleAttention, causal, lift, alibi": Entry(attention(lift=6, causal=True, position_bias="alibi")),
    "InvertibleAttention, sequence features": Entry(attention(context_features=2), context=sequence_features),
    "InvertibleAttention, causal, token features": Entry(
        attention(causal=True, context_features=2), context=token_features
    ),
    "InvertibleAttention, packed context": Entry(
        attention(context_features=2, position_bias="learned", max_tokens=4, radius="learned"), context=packed
    ),
    "InvertibleAttention, lift, packed context": Entry(attention(lift=4, context_features=2), context=packed),
    "InvertibleAttention, norm inf": Entry(attention(norm="inf", coefficient=0.9)),
    "InvertibleAttention, norm 2": Entry(attention(norm="2", radius="learned")),
    "InvertibleAttention, causal, norm 2": Entry(attention(1, 2, causal=True, norm="2", max_tokens=4)),
    "InvertibleAttention, roulette": Entry(attention(logdet=RussianRoulette(), coefficient=0.7), options=ESTIMATED),
    "InvertibleAttention, causal, roulette, packed context": Entry(
        attention(causal=True, context_features=2, logdet=RussianRoulette(2, survival=0.3, num_probes=2)),
        context=packed,
        options=ESTIMATED,
    ),
    "InvertibleAttention, lift, power series": Entry(
        attention(lift=4, logdet=PowerSeries(num_terms=16), coefficient=0.3), options=ESTIMATED
    ),
    "InvertibleFeedForward, lipswish": Entry(lambda: InvertibleFeedForward(3, 8)),
    "InvertibleFeedForward, clipswish": Entry(lambda: InvertibleFeedForward(3, 8, activation="clipswish")),
    "InvertibleFeedForward, tanh, three layers": Entry(
        lambda: InvertibleFeedForward(3, 8, activation="tanh", num_layers=3)
    ),
    "InvertibleFeedForward, sin, packed context": Entry(
        lambda: InvertibleFeedForward(3, 8, activation="sin", context_features=2), context=packed
    ),
    "InvertibleFeedForward, roulette": Entry(
        lambda: InvertibleFeedForward(3, 8, logdet=RussianRoulette(), coefficient=0.7), options=ESTIMATED
    ),
    "ResidualTransform(Declared), tokenwise": Entry(lambda: declared(Sway(), "tokenwise")),
    "ResidualTransform(Declared), causal": Entry(lambda: declared(Mix(causal=True), "causal")),
    "ResidualTransform(Declared), dense": Entry(lambda: declared(Mix(), "dense")),
    "ResidualTransform(Declared), roulette": Entry(
        lambda: ResidualTransform(Declared(Mix(), features=3, bound=0.5, takes_mask=True), logdet=RussianRoulette()),
        options=ESTIMATED,
    ),
    "ResidualTransform(Compose), dense": Entry(lambda: chain(causal=False), context=sequence_features),
    "ResidualTransform(Compose), causal": Entry(lambda: chain(causal=True), context=packed),
    "AttentionFlow": Entry(whole_flow),
    "AttentionFlow, causal, packed context": Entry(
        lambda: whole_flow(causal=True, position_bias="learned", context_features=2), context=packed
    ),
    "InverseTransform(InvertibleAttention)": Entry(lambda: nf.InverseTransform(attention()())),
}
#: Checks that choose their precision themselves, or take long.
ONLY_IN_DOUBLE = {
    "gradients_are_those_of_finite_differences",
    "single_and_double_precision_agree",
    "works_under_torch_compile",
}


#: Of those that iterate, the ones that are checked in every way each time. Of the others only the essentials are.
IN_FULL = {
    "InvertibleAttention",
    "InvertibleAttention, causal, learned bias, learned radius",
    "InvertibleAttention, lift, packed context",
    "InvertibleFeedForward, lipswish",
    "ResidualTransform(Declared), dense",
}
ESSENTIALS = {
    "inverse_undoes_it",
    "logabsdet_is_that_of_the_autograd_jacobian",
    "padding_at_the_end_can_be_cut_off",
}


def iterates(name):
    return name.startswith(("Invertible", "Residual", "AttentionFlow", "InverseTransform"))


def is_slow(name, check, dtype):
    if check == "works_under_torch_compile":
        # nflows looks at values in the midst of its splines, where the compiler has to stop and start again.
        return "spline" in name or iterates(name)
    if not iterates(name):
        return False
    if TRANSFORMS[name].options.get("stochastic"):  # means are computed in test_logdet.py too
        return (
            check not in ESSENTIALS or check == "logabsdet_is_that_of_the_autograd_jacobian" or dtype != torch.float64
        )
    return name not in IN_FULL and (check not in ESSENTIALS or dtype != torch.float64)


def every_check():
    for name in TRANSFORMS:
        for check in CHECKS:
            if check == "works_under_torch_func" and name.startswith("InverseTransform"):
                continue  # an inverse by iteration cannot be traced, and says so
            for dtype in (torch.float64, torch.float32):
                if dtype == torch.float32 and check in ONLY_IN_DOUBLE:
                    continue
                words = name if dtype == torch.float64 else f"{name}, float32"
                marks = [pytest.mark.slow] if is_slow(name, check, dtype) else []
                yield pytest.param(name, check, dtype, id=f"{words}: {check}", marks=marks)


@pytest.mark.parametrize(("name", "check", "dtype"), list(every_check()))
def test_every_transform_keeps_the_contract(name, check, dtype, without_shape_checks):
    entry = TRANSFORMS[name]
    options = {"supports_mask": True, **entry.options}
    check_transform(entry.make, entry.event_shape, context=entry.context, dtype=dtype, only=[check], **options)


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if not name.startswith("InverseTransform")])
def test_inputs_may_lie_in_memory_in_any_order(name):
    entry = TRANSFORMS[name]
    torch.manual_seed(0)
    transform = entry.make()
    x = torch.randn(4, *entry.event_shape).sigmoid()
    context = None if entry.context is None else entry.context(4)
    transform(x, context)  # for what learns from its first batch
    found = []
    for inputs in (x, x.mT.contiguous().mT):
        torch.manual_seed(1)
        found.append(transform(inputs, context))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


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


class ClampsItsContext(Broken):
    def outputs(self, inputs, context):
        if context is not None:
            context.clamp_(-0.1, 0.1)
        return inputs * self.scale


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


def test_a_context_that_is_written_into_is_named_even_if_once_is_enough():
    with pytest.raises(ContractViolation, match="it writes into the context"):
        check_transform(
            ClampsItsContext,
            (4, 3),
            context=lambda batch_size: torch.randn(batch_size, 4, 2),
            only=["nothing_given_is_changed"],
        )
