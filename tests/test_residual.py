"""Residual blocks as transforms of nflows: what they take, what they refuse, and what they say."""

import pytest
import torch
from nflows.transforms import CompositeTransform, InverseTransform
from torch import nn

from flowattn.context import pack_context
from flowattn.contractions import Compose, Declared, DotProductSelfAttention, FeedForward, L2SelfAttention, TokenLinear
from flowattn.inverse import InverseNotConverged, Solver
from flowattn.logdet import ExactLogDet, PowerSeries, RussianRoulette
from flowattn.transforms import InvertibleAttention, InvertibleFeedForward, ResidualTransform

MASK = torch.tensor([[True] * 5, [True, True, True, False, False], [False, True, False, True, True]])

BLOCKS = {
    "dense": lambda **options: InvertibleAttention(4, 2, radius="learned", **options),
    "causal": lambda **options: InvertibleAttention(4, 2, causal=True, position_bias="alibi", **options),
    "lift": lambda **options: InvertibleAttention(4, 2, lift=8, **options),
    "feed-forward": lambda **options: InvertibleFeedForward(4, 8, **options),
}
each_block = pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS.keys())


# -- what a block is


@each_block
def test_a_block_is_the_identity_plus_its_contraction(make):
    block, x = make(), torch.randn(3, 5, 4)
    for mask in (None, MASK):
        outputs, logabsdet = block(x, mask)
        torch.testing.assert_close(outputs, x + block.contraction(x, mask))
        assert logabsdet.shape == (3,)


def test_a_lift_is_a_chain_around_free_attention():
    block = InvertibleAttention(2, 4, lift=16, coefficient=0.8, causal=True, radius=1.5)
    down, attention, up = block.contraction.parts
    assert (down.features, down.out_features, up.features, up.out_features) == (2, 16, 16, 2)
    assert attention.coefficient is None and attention.causal and attention.fixed_radius == 1.5
    assert block.contraction.coefficient == 0.8 and block.contraction.structure == "causal"


@pytest.mark.parametrize("steps", [0, 20])
def test_a_block_stays_a_contraction_while_it_is_trained_to_be_none(steps):
    block = InvertibleAttention(3, 3, coefficient=0.9)
    optimizer = torch.optim.SGD(block.parameters(), lr=10.0)
    x = torch.randn(16, 4, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        (-(block(x)[0] - x).square().sum() / 16).backward()
        optimizer.step()
    assert block.contraction.lipschitz_bound(4) <= 0.9
    with torch.no_grad():
        y, logabsdet = block(x)
        back, other = block.inverse(y)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-4)
    torch.testing.assert_close(other, -logabsdet, rtol=1e-3, atol=1e-3)
    assert logabsdet.abs().max() <= 12 * torch.tensor(10.0).log()  # |log det| <= N D |log(1 - c)|


@each_block
def test_inverses_compose(make):
    block, x = make().double(), torch.randn(3, 5, 4, dtype=torch.float64)
    there_and_back = CompositeTransform([block, InverseTransform(block)])
    outputs, logabsdet = there_and_back(x, MASK)
    torch.testing.assert_close(outputs, x, rtol=0, atol=1e-9)
    torch.testing.assert_close(logabsdet, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-8)


def test_a_causal_block_does_not_look_ahead_in_either_direction():
    block = InvertibleAttention(4, 2, causal=True, position_bias="learned", max_tokens=7, radius="learned").double()
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    for way in (block, block.inverse):
        whole, part = way(x)[0], way(x[:, :4])[0]
        torch.testing.assert_close(whole[:, :4], part, rtol=0, atol=1e-9)


# -- context


def test_a_context_that_is_not_for_a_block_is_not_read():
    block, x = InvertibleAttention(4, 2), torch.randn(3, 5, 4)
    wanted = block(x)
    for context in (torch.randn(3, 2), torch.randn(3, 5, 2)):
        for got, one in zip(block(x, context), wanted, strict=True):
            assert torch.equal(got, one)
    masked = block(x, MASK)
    for got, one in zip(block(x, pack_context(torch.randn(3, 2), MASK)), masked, strict=True):
        torch.testing.assert_close(got, one)


@pytest.mark.parametrize(
    "make", [lambda **o: InvertibleAttention(4, 2, **o), lambda **o: InvertibleFeedForward(4, 8, **o)]
)
def test_features_of_the_sequence_are_those_of_every_token(make):
    block, x, features = make(context_features=2), torch.randn(3, 5, 4), torch.randn(3, 2)
    for one, other in zip(block(x, features), block(x, features.unsqueeze(1).expand(-1, 5, -1)), strict=True):
        torch.testing.assert_close(one, other)
    assert (block(x, features)[0] - block(x, 2 * features)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("context", [None, MASK], ids=["nothing", "a mask"])
def test_a_context_that_is_missing_is_named(context):
    block = InvertibleAttention(4, 2, context_features=2)
    for way in (block, block.inverse):
        with pytest.raises(ValueError, match="context is missing: it must have context_features=2 columns"):
            way(torch.randn(3, 5, 4), context)


def test_a_context_of_another_width_is_refused():
    block = InvertibleAttention(4, 2, context_features=2)
    with pytest.raises(ValueError, match=r"context must have shape \[batch, 2\]"):
        block(torch.randn(3, 5, 4), torch.randn(3, 3))


def test_context_of_any_size_keeps_the_bound():
    block = InvertibleFeedForward(4, 8, context_features=2, activation="sin", coefficient=0.9).double()
    with torch.no_grad():
        block.contraction.U.mul_(1e3)
    x, context = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(3, 5, 2, dtype=torch.float64)
    J = torch.autograd.functional.jacobian(lambda x: block.contraction(x, None, context).sum(0), x)
    J = J.permute(2, 0, 1, 3, 4).reshape(3, 20, 20)
    assert torch.linalg.matrix_norm(J, 2).max() <= 0.9
    y, _ = block(x, context)
    torch.testing.assert_close(block.inverse(y, context)[0], x, rtol=0, atol=1e-9)


# -- refusals


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: ResidualTransform(nn.Linear(3, 3)),
            TypeError,
            "contraction must be a flowattn Contraction.*Linear.*flowattn.contractions.Declared",
        ),
        (lambda: ResidualTransform(TokenLinear(3, 4)), ValueError, "features=3, out_features=4"),
        (lambda: ResidualTransform(DotProductSelfAttention(4, 2)), ValueError, "no Lipschitz bound.*L2SelfAttention"),
        (lambda: ResidualTransform(FeedForward(3, 4), logdet="exact"), ValueError, "logdet must be 'auto' or a LogDet"),
        (lambda: InvertibleAttention(3, 2), ValueError, "num_heads must divide features"),
        (lambda: InvertibleAttention(4, 2, coefficient=1.0), ValueError, "coefficient must be None or between 0 and 1"),
        (lambda: InvertibleAttention(4, 2, position_bias="learned"), ValueError, "needs max_tokens"),
        (lambda: InvertibleAttention(4, 2, radius=-1.0), ValueError, "radius must be"),
        (lambda: InvertibleAttention(4, 2, norm="1"), ValueError, "norm must be one of"),
        (lambda: InvertibleAttention(4, 2, lift=8, norm="2"), ValueError, "norm must be 'token' with a lift.*norm='2'"),
        (lambda: InvertibleFeedForward(4, 8, activation="relu"), ValueError, "activation must be one of"),
        (lambda: Declared(nn.Identity(), 3, bound=1.0), ValueError, "bound must be between 0 and 1; got bound=1.0"),
    ],
)
def test_what_cannot_be_a_block_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "contraction",
    [lambda: L2SelfAttention(4, 2, coefficient=None), lambda: TokenLinear(4, 4)],
    ids=["attention", "linear"],
)
def test_a_map_that_is_not_scaled_to_be_a_contraction_is_refused_at_once(contraction):
    f = contraction()
    with torch.no_grad():
        for p in f.parameters():
            p.mul_(10)
    with pytest.raises(ValueError, match="coefficient"):
        ResidualTransform(f)


def test_a_map_that_is_a_contraction_of_few_tokens_only_is_refused_for_many():
    f = L2SelfAttention(2, 1, coefficient=None)
    with torch.no_grad():
        f.B.mul_(0.9 / f.lipschitz_bound(1))
    block = ResidualTransform(f)
    assert block(torch.randn(3, 1, 2))[1].shape == (3,)
    with pytest.raises(ValueError, match=r"bound below 1; got \d\.\d+ for num_tokens=20\. Give it a coefficient"):
        block(torch.randn(3, 20, 2))


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 3), (3, 5, 4, 1)])
def test_inputs_of_another_shape_are_refused(shape):
    block = InvertibleAttention(4, 2)
    for way in (block, block.inverse):
        with pytest.raises(ValueError, match=r"must have shape \[batch, tokens, (4|features)\]"):
            way(torch.randn(shape))


def test_whole_numbers_are_refused():
    with pytest.raises(ValueError, match=r"must be of a floating-point type; got torch\.int64"):
        InvertibleAttention(4, 2)(torch.ones(3, 5, 4, dtype=torch.long))


def test_nan_is_refused_in_both_directions():
    block, x = InvertibleAttention(4, 2), torch.randn(3, 5, 4)
    x[2, 1, 0] = torch.nan
    for way in (block, block.inverse):
        with pytest.raises(ValueError, match=r"must be finite; got nan at index \[2, 1, 0\]"):
            way(x)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[2, 1] = False
    assert block(x, mask)[1].isfinite().all()


def test_a_sequence_that_is_too_long_is_refused():
    block = InvertibleAttention(4, 2, position_bias="learned", max_tokens=4)
    for way in (block, block.inverse):
        with pytest.raises(ValueError, match="at most max_tokens=4 tokens; got 5"):
            way(torch.randn(3, 5, 4))


def test_a_solver_that_is_too_short_raises_from_the_transform():
    block = InvertibleAttention(4, 2, solver=Solver(max_steps=1))
    with pytest.raises(InverseNotConverged, match=r"3 of 3 samples .* Raise max_steps, now 1"):
        block.inverse(torch.randn(3, 5, 4))


@pytest.mark.parametrize("way", ["forward", "inverse"])
def test_arguments_may_be_named(way):
    block = InvertibleAttention(4, 2)
    x = torch.randn(3, 5, 4)
    outputs, _ = getattr(block, way)(inputs=x, context=None)
    assert outputs.shape == x.shape


# -- how it runs


def test_logdet_and_solver_are_visible():
    text = repr(InvertibleFeedForward(4, 8, logdet=PowerSeries(7), solver=Solver(tolerance=1e-3)))
    assert "logdet=PowerSeries(num_terms=7" in text and "tolerance=0.001" in text


@each_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_under_autocast_the_way_back_is_right_and_the_logdet_is_single(make, dtype):
    block = make()
    x = torch.randn(3, 5, 4).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, there = block(x, MASK)
        back, otherwise = block.inverse(y, MASK)
    assert y.dtype == there.dtype == back.dtype == otherwise.dtype == torch.float32
    torch.testing.assert_close(back, x.float(), rtol=0, atol=1e-4)
    for got, wanted in zip((y, there), block(x.float(), MASK), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(otherwise, -there, rtol=0, atol=1e-4)


@each_block
def test_gradients_under_autocast_are_those_without(make):
    block, x = make(), torch.randn(3, 5, 4)

    def gradients(enabled):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y, there = block(x, MASK)
            back, _ = block.inverse(x, MASK)
            loss = y.square().sum() + there.sum() + back.square().sum()
        return torch.autograd.grad(loss, list(block.parameters()), allow_unused=True)

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("logdet", [RussianRoulette, PowerSeries, ExactLogDet])
def test_under_autocast_every_logdet_is_single_and_the_same(logdet):
    block, x = InvertibleAttention(4, 2, logdet=logdet()), torch.randn(3, 5, 4)
    torch.manual_seed(1)
    wanted = block(x)[1]
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = block(x)[1]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


@each_block
def test_both_directions_work_under_inference_mode(make):
    block, x = make(), torch.randn(3, 5, 4)
    with torch.inference_mode():
        y, there = block(x, MASK)
        back, otherwise = block.inverse(y, MASK)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-4)
    torch.testing.assert_close(otherwise, -there, rtol=0, atol=1e-4)


@pytest.mark.parametrize("make", [BLOCKS["causal"], BLOCKS["feed-forward"]], ids=["causal", "feed-forward"])
def test_forward_compiles(make, without_shape_checks):
    block, x = make(), torch.randn(3, 5, 4)
    torch.compiler.reset()
    compiled = torch.compile(block, backend="eager")
    for got, wanted in zip(compiled(x), block(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


@each_block
def test_an_empty_batch_comes_back_empty(make):
    block = make()
    for way in (block, block.inverse):
        outputs, logabsdet = way(torch.randn(0, 5, 4))
        assert outputs.shape == (0, 5, 4) and logabsdet.shape == (0,)


@each_block
def test_the_state_is_nothing_but_the_parameters(make):
    block, other = make(), make()
    assert set(block.state_dict()) == {name for name, _ in block.named_parameters()}
    other.load_state_dict(block.state_dict())
    x = torch.randn(3, 5, 4)
    assert torch.equal(block(x)[0], other(x)[0])


def test_every_parameter_is_trained():
    chain = ResidualTransform(
        Compose(
            FeedForward(3, 5, out_features=4, coefficient=None, context_features=2),
            L2SelfAttention(4, 2, position_bias="learned", max_tokens=5, radius="learned", coefficient=None),
            FeedForward(4, 5, out_features=3, coefficient=None),
        )
    )
    y, logabsdet = chain(torch.randn(3, 5, 3), torch.randn(3, 2))
    (y.square().sum() + logabsdet.sum()).backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in chain.parameters())


@each_block
def test_in_half_precision_all_is_computed_in_single(make):
    block = make().to(torch.bfloat16)
    single = make()
    single.load_state_dict({name: value.float() for name, value in block.state_dict().items()})
    x = torch.randn(3, 5, 4, dtype=torch.bfloat16)
    for way, other in ((block, single), (block.inverse, single.inverse)):
        outputs, logabsdet = way(x)
        wanted, wanted_logabsdet = other(x.float())
        assert outputs.dtype == torch.bfloat16 and logabsdet.dtype == torch.float32
        torch.testing.assert_close(outputs, wanted.to(torch.bfloat16), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(logabsdet, wanted_logabsdet, rtol=0, atol=1e-3)
    (logabsdet.sum() + outputs.sum()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in block.parameters())
