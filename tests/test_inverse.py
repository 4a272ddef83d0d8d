"""The inverse is as good as it says, costs no more than plain iteration, and raises where there is none."""

import copy
import math
import re

import pytest
import torch
from nflows.transforms.base import InverseNotAvailable
from torch import nn

from flowattn.contractions import Compose, Declared, DotProductSelfAttention, FeedForward, L2SelfAttention, TokenLinear
from flowattn.inverse import InverseNotConverged, Solver, invert
from flowattn.lipschitz.norms import sequence_norm, token_norm
from flowattn.transforms import ResidualTransform
from flowattn.transforms.parts import contractive_attention

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
each_precision = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
MASK = torch.tensor([[True, True, True, True], [True, True, True, False], [False, True, False, True], [False] * 4])


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def orthogonal(n):
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q


def steep(sign, features=16):
    """A feed-forward network whose slope is its bound near the origin and nothing far off."""
    f = FeedForward(features, features, activation="tanh", coefficient=0.99).double()
    Q = orthogonal(features)
    with torch.no_grad():
        f.weights[0].copy_(0.1 * Q)
        f.weights[1].copy_(sign * 1e4 * Q.mT)
    return f


def as_dense(f, num_tokens):
    """The same map, but nobody knows that it is tokenwise: no Newton steps."""
    return Declared(f, f.features, f.lipschitz_bound(num_tokens).item()).double()


def truth(f, y, mask=None, context=None):
    """The inverse by nothing but its definition, in double precision, with the scale that f has in its own."""
    scale = f.scale(y.shape[1], mask).double().unsqueeze(-1)
    f, y, x = copy.deepcopy(f).double(), y.double(), y.double()
    with torch.no_grad():
        for _ in range(5000):
            last, x = x, y - f.free(x, mask, context) * scale
            if (x - last).abs().max() <= 1e-15 * y.abs().max():
                return x
    return x


CONTRACTIONS = {
    "dense": lambda c: L2SelfAttention(4, 2, coefficient=c),
    "causal, learned bias": lambda c: L2SelfAttention(
        4, 2, coefficient=c, causal=True, position_bias="learned", max_tokens=4
    ),
    "radius, alibi": lambda c: L2SelfAttention(4, 2, coefficient=c, radius="learned", position_bias="alibi"),
    "norm inf": lambda c: L2SelfAttention(4, 2, coefficient=c, norm="inf"),
    "norm 2": lambda c: L2SelfAttention(4, 2, coefficient=c, norm="2"),
    "lift": lambda c: Compose(
        TokenLinear(4, 8), L2SelfAttention(8, 2, coefficient=None), TokenLinear(8, 4), coefficient=c
    ),
    "tokenwise": lambda c: FeedForward(4, 8, coefficient=c),
    "tokenwise, sin": lambda c: FeedForward(4, 8, coefficient=c, activation="sin"),
}
each_contraction = pytest.mark.parametrize("make", CONTRACTIONS.values(), ids=CONTRACTIONS.keys())


# -- certificates


@each_precision
@pytest.mark.parametrize("coefficient", [0.5, 0.9, 0.99])
def test_128_samples_of_64_tokens_are_inverted_to_a_certified_error(coefficient, dtype):
    f = L2SelfAttention(64, 8, coefficient=coefficient).to(dtype)
    y = torch.randn(128, 64, 64, dtype=dtype)
    x, certified, count = Solver().solve(f, y)
    assert (certified <= TOLERANCE[dtype]).all()
    some = slice(0, 8)
    plain = Solver(history=0).solve(f, y[some]).num_evaluations
    assert (count[some] <= plain + 2).all()
    error = token_norm(x[some].double() - truth(f, y[some]))
    rounding = torch.finfo(dtype).eps * token_norm(x[some]).double()
    assert (error <= certified[some] + rounding).all()


@each_precision
@each_contraction
@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, None])
def test_the_true_error_is_below_the_certificate(make, dtype, tolerance):
    f = make(0.9).to(dtype)
    y = 3 * torch.randn(16, 4, 4, dtype=dtype)
    x, certified, _ = Solver(tolerance=tolerance).solve(f, y)
    assert (certified <= (tolerance or TOLERANCE[dtype])).all()
    error = sequence_norm(x.double() - truth(f, y), f.norm)
    assert (error <= certified + torch.finfo(dtype).eps * sequence_norm(x, f.norm)).all()


def test_the_certificate_is_tight_where_the_map_is_as_steep_as_its_bound():
    f = Declared(Times(-0.99), features=3, bound=0.99).double()
    y = torch.randn(8, 2, 3, dtype=torch.float64)
    x, certified, count = Solver(tolerance=1e-2, history=0, max_steps=2000).solve(f, y)
    error = token_norm(x - y / (1 - 0.99))
    assert (error <= certified).all() and (error >= 0.999 * certified).all()
    # The first residual is 0.99 |y|, and each step takes it to 0.99 of itself, down to half of the tolerance.
    assert torch.equal(count.double(), ((0.5e-4 / token_norm(y)).log() / math.log(0.99)).ceil())


@pytest.mark.parametrize("tolerance", [1e-1, 1e-8])
def test_rounding_does_not_break_the_certificate_of_an_inverse_much_longer_than_its_input(tolerance):
    dtype = torch.float32 if tolerance == 1e-1 else torch.float64
    factor = torch.tensor(-0.99, dtype=dtype)
    f = Declared(Times(factor), features=3, bound=0.99)
    y = torch.randn(512, 2, 3, dtype=dtype)
    x, certified, _ = Solver(tolerance=tolerance).solve(f, y)
    error = token_norm(x.double() - y.double() / (1 + factor.double()))
    assert (error <= certified + torch.finfo(dtype).eps * token_norm(x)).all()


@each_contraction
def test_the_certificate_of_a_masked_sequence_holds(make):
    f = make(0.95).double()
    y = 3 * torch.randn(4, 4, 4, dtype=torch.float64).masked_fill(~MASK.unsqueeze(-1), torch.nan)
    x, certified, count = Solver(tolerance=1e-3).solve(f, y, MASK)
    assert torch.equal(x[~MASK], torch.zeros_like(x[~MASK]))
    assert certified[3] == 0 and count[3] == 1
    error = sequence_norm(x - truth(f, y.masked_fill(~MASK.unsqueeze(-1), 0), MASK), f.norm)
    assert (error <= certified).all()


def test_the_certificate_uses_a_bound_of_the_masked_map_which_in_the_2_norm_may_be_above_that_of_the_whole():
    for seed in (837, 1257):
        torch.manual_seed(seed)
        f = L2SelfAttention(4, 1, coefficient=0.95, norm="2", position_bias="learned", max_tokens=4).double()
        with torch.no_grad():
            f.position_bias.table.copy_(torch.randn_like(f.position_bias.table) * 4)
            f.W.mul_(10 ** (torch.rand(()) * 2 - 1.5))
            mask = torch.tensor([[True, False, seed == 1257, True]])
            rows = f.row_bounds(4, mask, "2") * f.scale(4, mask)
            y = torch.randn(1, 4, 4, dtype=torch.float64)
            x, certified, _ = Solver(tolerance=1e-2, history=0).solve(f, y, mask)
            residual = sequence_norm((y - x - f(x, mask)) * mask.unsqueeze(-1), "2")
        assert certified >= residual / (1 - rows.norm())


def test_offsets_and_large_tokens_cost_no_digits():
    f = L2SelfAttention(4, 2).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    for moved in (x + 100, 100 * x):
        y = moved + f(moved)
        torch.testing.assert_close(Solver().solve(f, y).x, moved, rtol=0, atol=1e-10)


def test_what_is_given_is_not_written_to():
    f, y = L2SelfAttention(4, 2), torch.randn(3, 5, 4)
    before = y.clone()
    Solver().solve(f, y)
    assert torch.equal(y, before)


@pytest.mark.parametrize("size", [1e4, 1e5, 1e6])
def test_tokens_of_any_size_are_inverted_in_double_precision_by_default(size):
    f = L2SelfAttention(4, 2).double()
    x = size * torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(Solver().solve(f, x + f(x)).x, x, rtol=1e-12, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("steep", [1e2, 1e3, 1e4])
def test_digits_that_logits_lose_are_in_the_certificate(steep, causal):
    """Projections as long as these leave the bound as it is, but square the rounding of tokens far from the first."""
    f = L2SelfAttention(2, 1, causal=causal, coefficient=0.5)
    with torch.no_grad():
        f.W.copy_(steep * torch.eye(2))
        f.B.copy_(torch.eye(2) / steep)
    far = nn.functional.normalize(torch.randn(256, 1, 2), dim=-1)
    x = torch.cat([-far, far + 1.2 / steep * torch.randn(256, 3, 2)], 1)
    y = (x + f(x)).detach()
    x, certified, _ = Solver().solve(f, y)
    error = token_norm(x.double() - truth(f, y))
    assert (error <= certified + torch.finfo(torch.float32).eps * token_norm(x)).all() and (certified <= 1e-5).all()


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lift", [None, 6])
def test_rounding_of_attention_is_no_more_than_it_says(heads, causal, lift):
    eps, worst = torch.finfo(torch.float32).eps, 0.0
    for steep in (1.0, 30.0, 1e3):
        f = contractive_attention(3, heads, head_features=2, lift=lift, causal=causal, coefficient=0.9)
        attention = f if lift is None else f.parts[1]
        with torch.no_grad():
            attention.W *= steep
            attention.B /= steep
            far = nn.functional.normalize(torch.randn(64, 1, 3), dim=-1)
            x = torch.cat([-far, far + 1.2 / steep * torch.randn(64, 5, 3)], 1)
            scale = f.scale(6)
            exact = copy.deepcopy(f).double().scaled(x.double(), None, None, scale.double())
            error = token_norm(f.scaled(x, None, None, scale) - exact)
            for sharp in (False, True):
                allowed = 4 * f.rounding(x, None, None, scale, sharp=sharp) + 8 * token_norm(x)
                worst = max(worst, (error / eps / allowed).max().item())
    assert worst < 0.5


def test_single_precision_is_finished_in_double_where_it_does_not_see_its_own_error():
    f = L2SelfAttention(8, 2, coefficient=0.999)
    y = torch.randn(4, 6, 8)
    x, certified, _ = Solver().solve(f, y)
    assert x.dtype == certified.dtype == torch.float32 and (certified <= 1e-5).all()
    assert all(p.dtype == torch.float32 for p in f.parameters())
    torch.testing.assert_close(x, truth(f, y).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("structure", ["dense", "tokenwise"])
def test_half_precision_is_inverted_in_single(structure):
    f = L2SelfAttention(4, 2) if structure == "dense" else FeedForward(4, 8)
    f, y = f.to(torch.bfloat16), torch.randn(3, 5, 4, dtype=torch.bfloat16)
    x, certified, _ = Solver().solve(f, y)
    assert x.dtype == torch.bfloat16 and certified.dtype == torch.float32 and (certified <= 1e-5).all()
    assert torch.equal(x, truth(f, y).to(torch.bfloat16))
    assert all(p.dtype == torch.bfloat16 for p in f.parameters())


def test_modules_whose_weights_are_computed_are_finished_in_double():
    linear = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4, bias=False))
    f = Declared(nn.Sequential(linear, Times(0.99)), features=4, bound=0.991)
    y = torch.randn(3, 5, 4)
    x, certified, _ = Solver().solve(f, y)
    assert (certified <= 1e-5).all() and linear.weight.dtype == torch.float32
    J = 0.99 * linear.weight.detach().double()
    wanted = torch.linalg.solve(torch.eye(4, dtype=torch.float64) + J, y.double().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(x.double(), wanted, rtol=0, atol=2e-5)


class Listening(nn.Module):
    def __init__(self):
        super().__init__()
        self.autocast = []

    def forward(self, x):
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        return 0.5 * torch.sin(x)


@pytest.mark.parametrize(
    "solve",
    [
        lambda f, y: Solver(history=0).solve(f, y),
        lambda f, y: invert(f, y, solver=Solver(history=0)),
        lambda f, y: ResidualTransform(f, solver=Solver(history=0)).inverse(y),
    ],
    ids=["Solver", "invert", "ResidualTransform"],
)
def test_a_certificate_is_not_rounded_by_autocast(solve):
    module = Listening()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solve(Declared(module, features=3, bound=0.5), torch.randn(2, 4, 3))
    assert not any(module.autocast)


# -- evaluations


@pytest.mark.parametrize("sign", [1, -1])
def test_steep_maps_take_at_most_half_the_evaluations_of_plain_iteration(sign):
    f, y = steep(sign), torch.randn(3, 6, 16, dtype=torch.float64)
    dense = as_dense(f, 6)
    plain = Solver(history=0, max_steps=5000, tolerance=1e-3).solve(dense, y).num_evaluations
    assert (plain > 100).all()
    anderson, newton = (Solver(tolerance=1e-3).solve(g, y) for g in (dense, f))
    assert (anderson.num_evaluations <= plain / 2).all()
    assert (newton.num_evaluations <= plain / 10).all()
    torch.testing.assert_close(anderson.x, newton.x, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "spectrum",
    [
        lambda Q: -Q @ torch.linspace(0, 1, len(Q)).double().diag() @ Q.mT,
        lambda Q: Q @ torch.linspace(-1, 1, len(Q)).double().diag() @ Q.mT,
        lambda Q: -torch.eye(len(Q), dtype=torch.float64),
    ],
    ids=["negative", "both signs", "minus one"],
)
def test_linear_maps_with_real_eigenvalues_take_at_most_half_the_evaluations_of_plain_iteration(spectrum):
    linear = nn.Linear(8, 8, bias=False).double()
    linear.weight.data = 0.99 * spectrum(orthogonal(8))
    f = Declared(linear, features=8, bound=0.9901)
    y = torch.randn(8, 3, 8, dtype=torch.float64)
    fast, plain = (Solver(tolerance=1e-4, history=h, max_steps=5000).solve(f, y) for h in (20, 0))
    assert (fast.num_evaluations <= plain.num_evaluations / 2).all()


def test_attention_to_oneself_takes_at_most_half_the_evaluations_of_plain_iteration():
    """Eigenvalues on a circle: no few steps tell them apart, but as many as there are eigenvalues do."""
    f = L2SelfAttention(16, 1, coefficient=0.99, position_bias="learned", max_tokens=8).double()
    with torch.no_grad():
        f.position_bias.table.zero_()
        f.position_bias.table[:, 7] = 30
        f.W.copy_(orthogonal(16))
        f.B.copy_(orthogonal(16))
    y = torch.randn(2, 8, 16, dtype=torch.float64)
    fast, plain = (Solver(tolerance=1e-2, history=h, max_steps=5000).solve(f, y) for h in (20, 0))
    assert (fast.num_evaluations <= plain.num_evaluations / 2).all()


@pytest.mark.slow
@each_precision
@pytest.mark.parametrize(
    "turn", [orthogonal, lambda n: -torch.eye(n, dtype=torch.float64)], ids=["circle", "minus one"]
)
def test_eight_heads_that_attain_their_bound_take_at_most_half_the_evaluations_of_plain_iteration(turn, dtype):
    """All heads alike, every token looks at itself, and the slope is 0.99 everywhere in eight directions."""
    f = L2SelfAttention(64, 8, coefficient=0.99, position_bias="learned", max_tokens=64)
    directions = orthogonal(64)[:, :8]
    with torch.no_grad():
        f.position_bias.table.zero_()
        f.position_bias.table[:, 63] = 30
        f.W.copy_(directions.repeat(1, 8))
        f.B.copy_((turn(8) @ directions.mT).repeat(8, 1))
    f, y = f.to(dtype), torch.randn(128, 64, 64, dtype=dtype)
    fast = Solver().solve(f, y)
    assert (fast.certified_error <= TOLERANCE[dtype]).all()
    plain = Solver(history=0, max_steps=5000).solve(f, y[:2]).num_evaluations
    assert (plain > 500).all() and fast.num_evaluations.max() <= plain.min() / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_causal_attention_takes_at_most_two_thirds_of_the_evaluations_of_plain_iteration(dtype):
    f = L2SelfAttention(16, 4, causal=True, coefficient=0.9).to(dtype)
    x = torch.randn(8, 40, 16, dtype=dtype)
    y = (x + f(x)).detach()
    fast, plain = (Solver(history=history).solve(f, y) for history in (20, 0))
    assert (fast.num_evaluations <= plain.num_evaluations * 2 / 3).all()
    assert (fast.x - truth(f, y)).abs().max() <= (2e-5 if dtype == torch.float32 else 2e-10)
    alone = Solver().solve(f, y[:1])
    assert alone.num_evaluations[0] == fast.num_evaluations[0]


def test_the_input_is_left_alone_even_where_it_is_the_solution():
    f = L2SelfAttention(4, 2, coefficient=0.9)
    with torch.no_grad():
        f.B.zero_()
    y = torch.randn(6, 5, 4) * torch.logspace(-6, 3, 6)[:, None, None]
    kept = y.clone()
    x = Solver().solve(f, y).x
    assert torch.equal(y, kept)
    x.zero_()
    assert torch.equal(y, kept)


def random_contraction(seed):
    """Weights and tokens of all sizes."""
    torch.manual_seed(seed)
    if seed % 2:
        activation = ("tanh", "sin", "lipswish", "clipswish")[seed // 2 % 4]
        f = FeedForward(6, 12, activation=activation, coefficient=0.99).double()
    else:
        radius = (None, "learned", 0.3)[seed // 2 % 3]
        heads, causal = 1 + seed // 2 % 3, seed % 8 == 6
        f = L2SelfAttention(6, heads, head_features=3, causal=causal, coefficient=0.99, radius=radius).double()
    with torch.no_grad():
        for p in f.parameters():
            p.mul_(10 ** (3 * torch.rand(()) - 1))
    y = torch.randn(16, 3, 6, dtype=torch.float64) * 10 ** (3 * torch.rand(16, 1, 1) - 2)
    return (as_dense(f, 3) if seed % 2 else f), y


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 400), marks=pytest.mark.slow)], ids=["20", "400"])
def test_no_sample_takes_more_than_two_evaluations_more_than_plain_iteration(seeds):
    for seed in seeds:
        f, y = random_contraction(seed)
        fast, plain = (Solver(history=h, max_steps=30000).solve(f, y) for h in (20, 0))
        assert (fast.num_evaluations <= plain.num_evaluations + 2).all(), seed


def test_history_zero_is_the_plain_iteration_for_tokenwise_maps_too():
    f, y = steep(1), torch.randn(2, 6, 16, dtype=torch.float64)
    plain = Solver(history=0, max_steps=5000, tolerance=1.0)
    count = plain.solve(f, y).num_evaluations
    assert torch.equal(count, plain.solve(as_dense(f, 6), y).num_evaluations)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.samples = 0

    def forward(self, x):
        self.samples += len(x)
        return 0.9 * torch.sin(x)


def test_samples_that_are_done_cost_nothing():
    module = Counting()
    f = Declared(module, features=3, bound=0.9).double()
    y = torch.randn(16, 2, 3, dtype=torch.float64) * torch.logspace(-6, 2, 16, dtype=torch.float64)[:, None, None]
    count = Solver().solve(f, y).num_evaluations
    assert count.unique().numel() > 2
    assert module.samples == count.sum()


@each_contraction
def test_results_do_not_depend_on_batch_mates(make):
    f = make(0.9).double()
    y = torch.randn(12, 4, 4, dtype=torch.float64) * torch.logspace(-3, 2, 12, dtype=torch.float64)[:, None, None]
    solver = Solver(tolerance=1e-3)  # so that one step more or less would be seen
    together = solver.solve(f, y)
    for k in range(len(y)):
        alone = solver.solve(f, y[k : k + 1])
        torch.testing.assert_close(alone.x[0], together.x[k], rtol=1e-11, atol=1e-11)
        assert alone.num_evaluations[0] == together.num_evaluations[k]


@each_contraction
def test_a_masked_sequence_is_inverted_like_the_shorter_one(make):
    f = make(0.9).double()
    y = torch.randn(2, 4, 4, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]] * 2)
    x = invert(f, y, mask)
    torch.testing.assert_close(x[:, :3], invert(f, y[:, :3]), rtol=0, atol=1e-9)
    assert torch.equal(x[:, 3], y[:, 3])


# -- failures


class Steep(nn.Module):
    """So steep at the origin that other points are mapped where one is."""

    def forward(self, x):
        return -3 * torch.tanh(x)


@pytest.mark.parametrize("structure", ["dense", "causal", "tokenwise"])
def test_a_map_that_is_seen_to_be_steeper_than_declared_raises(structure):
    f, x = Declared(Steep(), features=2, bound=0.9, structure=structure), 0.3 * torch.randn(8, 3, 2)
    with pytest.raises(InverseNotConverged, match=r"of 8 samples are not inverted.*bound is 0.9.* apart become"):
        Solver().solve(f, x + f(x))


def test_weights_that_are_not_finite_are_named_as_a_cause():
    f = L2SelfAttention(2, 1)
    f.W.data[0, 0] = torch.nan
    with pytest.raises(InverseNotConverged, match=r"2 of 2 samples .* its weights are not finite"):
        Solver().solve(f, torch.randn(2, 3, 2))


@pytest.mark.parametrize("factor", [-2.0, 2.0, -1.0, -1.5])
@each_precision
def test_a_map_that_is_not_a_contraction_raises(factor, dtype):
    f = Declared(Times(factor), features=3, bound=0.5).to(dtype)
    y = torch.randn(5, 2, 3, dtype=dtype)
    y[2] = 0  # whose inverse is found at once
    with pytest.raises(InverseNotConverged, match=r"4 of 5 samples .* not the contraction .* apart become"):
        ResidualTransform(f).inverse(y)
    assert issubclass(InverseNotConverged, InverseNotAvailable)


def test_a_tokenwise_map_without_an_inverse_raises_in_the_same_words():
    f = Declared(Times(-1.0), features=3, bound=0.5, structure="tokenwise")
    with pytest.raises(InverseNotConverged):
        Solver().solve(f, torch.randn(5, 2, 3))


class Poisonous(nn.Module):
    """NaN for some samples, a contraction for others."""

    def forward(self, x):
        return torch.where(x.amax((1, 2), keepdim=True) > 5, torch.nan, 0.5 * torch.sin(x))


@pytest.mark.parametrize("structure", ["dense", "tokenwise"])
def test_a_map_that_gives_nan_raises_for_those_samples(structure):
    f = Declared(Poisonous(), features=3, bound=0.5, structure=structure)
    y = torch.rand(4, 2, 3)
    y[1] += 100
    with pytest.raises(InverseNotConverged, match=r"1 of 4 samples .* error inf"):
        Solver().solve(f, y)


def test_too_few_steps_raise_and_name_the_knobs():
    f = L2SelfAttention(4, 2, coefficient=0.97).double()
    y = torch.randn(3, 5, 4, dtype=torch.float64)
    with pytest.raises(InverseNotConverged, match=r"Raise max_steps, now 2, or lower the coefficient, now 0\.97"):
        Solver(max_steps=2).solve(f, y)
    with pytest.raises(InverseNotConverged, match=r"Raise max_steps, now 2\.$"):
        Solver(max_steps=2).solve(Declared(f, features=4, bound=0.97), y)


def test_a_sample_that_fails_is_counted_and_its_error_is_the_one_named():
    f = Declared(Times(-0.9), features=3, bound=0.9).double()
    y = torch.randn(6, 2, 3, dtype=torch.float64) * torch.logspace(-9, 0, 6, dtype=torch.float64)[:, None, None]
    with pytest.raises(InverseNotConverged) as raised:
        Solver(max_steps=10, history=0, tolerance=1e-4).solve(f, y)
    # After k evaluations plain iteration has a residual of 0.9^k |y|.
    errors = 0.9**10 * token_norm(y) / 0.1
    bad, worst = int((errors > 1e-4).sum()), errors.max()
    assert 1 < bad < 6
    assert f"{bad} of 6 samples are not inverted: worst certified error {worst:.1e} > tolerance 1e-04" in str(
        raised.value
    )


def test_a_tolerance_below_rounding_raises_and_says_so():
    f = L2SelfAttention(4, 2).double()
    with pytest.raises(InverseNotConverged, match="or the tolerance is below rounding error"):
        Solver(tolerance=1e-17).solve(f, torch.randn(3, 5, 4, dtype=torch.float64))


def test_a_map_with_a_bound_of_one_or_more_is_refused():
    f = L2SelfAttention(4, 2, coefficient=None)
    with pytest.raises(InverseNotConverged, match=r"the Lipschitz bound of f is \S+, not below 1"):
        Solver().solve(f, torch.randn(3, 5, 4))


def test_dot_products_are_refused():
    with pytest.raises(ValueError, match="no Lipschitz bound"):
        Solver().solve(DotProductSelfAttention(4, 2), torch.randn(3, 5, 4))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_are_refused(value):
    y = torch.randn(3, 5, 4)
    y[1, 2, 3] = value
    with pytest.raises(ValueError, match=re.escape(f"must be finite; got {value} at index [1, 2, 3]")):
        Solver().solve(L2SelfAttention(4, 2), y)


@pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"tolerance": math.inf}, {"max_steps": 0}, {"history": -1}])
def test_senseless_options_are_refused(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name} must be .*{name}={value}"):
        Solver(**options)


# -- gradients


class Inverse(nn.Module):
    """The inverse as a module, to be called with other parameters."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, y, mask=None, context=None):
        return invert(self.f, y, mask, context, Solver(tolerance=1e-12) if y.dtype == torch.float64 else None)


def gradcheck_inverse(f, y, mask, context, **options):
    named = {f"f.{name}": p for name, p in f.named_parameters()}
    given = [y] if context is None else [y, context]

    def function(y, *rest):
        features, rest = (None, rest) if context is None else (rest[0], rest[1:])
        parameters = dict(zip(named, rest, strict=True))
        return torch.func.functional_call(Inverse(f), parameters, (y, mask, features))

    variables = [v.detach().clone().requires_grad_() for v in [*given, *named.values()]]
    assert torch.autograd.gradcheck(function, variables, atol=1e-6, **options)


GRADIENTS = {
    "dense, context": lambda: L2SelfAttention(2, 1, radius="learned", context_features=1),
    "causal, learned bias": lambda: L2SelfAttention(2, 1, causal=True, position_bias="learned", max_tokens=3),
    "norm inf": lambda: L2SelfAttention(2, 1, norm="inf"),
    "norm 2": lambda: L2SelfAttention(2, 1, norm="2"),
    "tokenwise, context": lambda: FeedForward(2, 3, context_features=1),
    "lift": lambda: Compose(TokenLinear(2, 3), L2SelfAttention(3, 1, coefficient=None), TokenLinear(3, 2)),
    "a user's own": lambda: Declared(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), features=2, bound=0.99),
}


@pytest.mark.parametrize("make", GRADIENTS.values(), ids=GRADIENTS.keys())
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one direction", "all"])
def test_gradients_of_the_inverse_are_those_of_finite_differences(make, masked, whole):
    f = make().double()
    if isinstance(f, Declared):
        if masked:
            pytest.skip("it takes no mask")
        with torch.no_grad():
            f.module[0].weight.mul_(0.9 / torch.linalg.matrix_norm(f.module[0].weight, 2))
    y = torch.randn(2, 3, 2, dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [False, True, True]]) if masked else None
    context = None if f.context_features is None else torch.randn(2, 3, 1, dtype=torch.float64)
    gradcheck_inverse(f, y, mask, context, fast_mode=not whole)


@pytest.mark.parametrize("structure", ["dense", "tokenwise"])
@each_precision
def test_gradients_of_steep_maps_are_those_of_the_inverse_jacobian(structure, dtype):
    f = Declared(Times(-0.99), features=3, bound=0.99, structure=structure)
    y = torch.randn(2, 4, 3, dtype=dtype, requires_grad=True)
    weight = torch.randn(2, 4, 3, dtype=dtype)
    (gradient,) = torch.autograd.grad((invert(f, y) * weight).sum(), y)
    torch.testing.assert_close(gradient, weight / 0.01, rtol=1e-3 if dtype == torch.float32 else 1e-9, atol=0)


def test_gradients_of_a_masked_sequence_do_not_reach_padding():
    f = L2SelfAttention(4, 2, context_features=2).double()
    y = torch.randn(4, 4, 4, dtype=torch.float64).masked_fill(~MASK.unsqueeze(-1), torch.nan).requires_grad_()
    context = torch.randn(4, 4, 2, dtype=torch.float64).masked_fill(~MASK.unsqueeze(-1), torch.nan).requires_grad_()
    x = invert(f, y, MASK, context)
    torch.where(MASK.unsqueeze(-1), x, 0).square().sum().backward()
    for gradient in (y.grad, context.grad):
        assert gradient.isfinite().all() and (gradient[~MASK] == 0).all()
        assert (gradient[MASK] != 0).any()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in f.parameters())


def saved(f, y, **options):
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        invert(f, y, solver=Solver(**options))
    return sizes


def test_the_iteration_leaves_no_trace_in_memory():
    f, y = L2SelfAttention(4, 2).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    assert saved(f, y, tolerance=1e-1) == saved(f, y, tolerance=1e-10, history=0)


def test_torch_func_is_refused_in_words():
    f, y = L2SelfAttention(4, 2), torch.randn(3, 5, 4)
    with pytest.raises(NotImplementedError, match=r"which neither torch\.func nor forward mode can trace"):
        torch.func.jacrev(lambda y: invert(f, y))(y)


def test_the_gradient_can_be_taken_twice_from_one_graph():
    f = L2SelfAttention(4, 2).double()
    y = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    loss = invert(f, y).square().sum()
    first, second = (torch.autograd.grad(loss, y, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_second_derivative_is_refused():
    f = L2SelfAttention(4, 2).double()
    y = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(NotImplementedError, match="can be differentiated once; a second derivative"):
        torch.autograd.grad(invert(f, y).square().sum(), y, create_graph=True)


def test_a_gradient_that_is_not_found_raises():
    f = L2SelfAttention(4, 2, coefficient=0.99).double()
    x = torch.zeros(1, 3, 4, dtype=torch.float64)  # the start is the inverse already, but the slope is not zero there
    x[0, 1] = 0.1
    y = (x + f(x)).detach().requires_grad_()
    solution = invert(f, y, solver=Solver(max_steps=3, tolerance=10.0))
    with pytest.raises(InverseNotConverged, match="the gradient of the inverse was not found in max_steps=3"):
        torch.autograd.grad(solution.sum(), y)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_inverse_carries_no_graph(mode):
    f = L2SelfAttention(4, 2)
    y = torch.randn(3, 5, 4, requires_grad=True)
    with mode():
        assert not invert(f, y).requires_grad


def test_where_nothing_wants_a_gradient_the_inverse_carries_no_graph():
    f = L2SelfAttention(4, 2).requires_grad_(False)
    assert not invert(f, torch.randn(3, 5, 4)).requires_grad


@each_precision
def test_parameters_that_are_computed_are_no_obstacle(dtype):
    f = L2SelfAttention(4, 2, coefficient=0.9).to(dtype)
    scale = torch.ones((), dtype=dtype, requires_grad=True)
    named = {f"f.{name}": p.detach() * scale for name, p in f.named_parameters()}
    y = torch.randn(3, 5, 4, dtype=dtype)
    x = torch.func.functional_call(Inverse(f), named, (y,))
    torch.testing.assert_close(x, invert(f, y), rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(x.sum(), scale)
    assert gradient != 0


def test_the_inverse_of_no_samples_is_none():
    evaluations = 0
    f = L2SelfAttention(4, 2)
    free = f.free

    def counted(*args):
        nonlocal evaluations
        evaluations += 1
        return free(*args)

    f.free = counted
    assert Solver().solve(f, torch.randn(0, 3, 4)).x.shape == (0, 3, 4)
    assert evaluations <= 1


def test_forward_mode_through_the_inverse_is_refused():
    f, y = FeedForward(3, 8), torch.randn(2, 4, 3)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="nor forward mode"):
        invert(f, torch.autograd.forward_ad.make_dual(y, torch.ones_like(y)))


def test_a_gradient_that_is_not_a_number_stays_one():
    y = torch.randn(2, 4, 3, requires_grad=True)
    x = invert(FeedForward(3, 8), y)
    x.backward(torch.full_like(x, torch.nan))
    assert y.grad.isnan().all()
