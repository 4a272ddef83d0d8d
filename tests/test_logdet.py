"""Log-determinants are those of the brute-force Jacobian: exactly, or on average."""

import copy
import functools

import pytest
import torch
from nflows.flows import Flow
from nflows.transforms import CompositeTransform, InverseTransform
from torch import nn

from flowattn.context import pack_context
from flowattn.contractions import Compose, Declared, FeedForward, L2SelfAttention, TokenLinear
from flowattn.distributions import SequenceNormal
from flowattn.inverse import Solver
from flowattn.logdet import AutoLogDet, ExactLogDet, PowerSeries, RussianRoulette
from flowattn.transforms import InvertibleAttention, InvertibleFeedForward, ResidualTransform

MASK = torch.tensor([[True] * 5, [True, True, True, False, False], [False, True, False, True, True], [False] * 5])
ATTENTION = functools.partial(L2SelfAttention, 4, 2, coefficient=0.95)


def lifted(**options):
    inside = L2SelfAttention(6, 3, coefficient=None, **options)
    return Compose(TokenLinear(4, 6), inside, TokenLinear(6, 4), coefficient=0.95)


class Mix(nn.Module):
    """A user's own map: it goes by the tokens before, or by all of them."""

    def __init__(self, causal):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.causal = causal

    def forward(self, x, mask=None):
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        total = x.cumsum(1) if self.causal else x.sum(1, keepdim=True)
        return 0.3 * torch.tanh(self.linear(x)) + 0.1 * torch.sin(total)


CONTRACTIONS = {
    "dense": lambda: ATTENTION(),
    "dense, alibi, radius": lambda: ATTENTION(position_bias="alibi", radius=0.9),
    "dense, learned bias, context": lambda: ATTENTION(position_bias="learned", max_tokens=6, context_features=2),
    "dense, lift, radius, context": lambda: lifted(radius="learned", context_features=2),
    "dense, many heads": lambda: ATTENTION(head_features=3),
    "dense, norm inf": lambda: ATTENTION(norm="inf"),
    "dense, norm 2": lambda: ATTENTION(norm="2"),
    "causal": lambda: ATTENTION(causal=True),
    "causal, learned bias, radius, context": lambda: ATTENTION(
        causal=True, position_bias="learned", max_tokens=6, radius="learned", context_features=2
    ),
    "causal, alibi": lambda: ATTENTION(causal=True, position_bias="alibi"),
    "causal, many heads, radius": lambda: ATTENTION(causal=True, head_features=3, radius=0.9),
    "causal, lift, bias, radius, context": lambda: lifted(
        causal=True, position_bias="alibi", radius="learned", context_features=2
    ),
    "causal, norm 2": lambda: ATTENTION(causal=True, norm="2", max_tokens=6),
    "tokenwise, lipswish, context": lambda: FeedForward(4, 8, context_features=2),
    "tokenwise, clipswish": lambda: FeedForward(4, 8, activation="clipswish"),
    "tokenwise, tanh, three layers": lambda: FeedForward(4, 8, activation="tanh", num_layers=3),
    "tokenwise, sin": lambda: FeedForward(4, 8, activation="sin"),
    "tokenwise, one matrix": lambda: FeedForward(4, 1, num_layers=1),
    "tokenwise, a user's own": lambda: Declared(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 4, 0.99, structure="tokenwise"
    ),
    "causal, a user's own": lambda: Declared(Mix(True), 4, 0.9, structure="causal", takes_mask=True),
    "dense, a user's own": lambda: Declared(Mix(False), 4, 0.9, takes_mask=True),
    "causal chain": lambda: Compose(
        FeedForward(4, 5, out_features=3, coefficient=0.9, context_features=2),
        L2SelfAttention(3, 3, causal=True, coefficient=None),
        L2SelfAttention(3, 1, causal=True, coefficient=0.9),
        TokenLinear(3, 4),
        coefficient=0.95,
    ),
    "dense chain of causal and dense": lambda: Compose(
        L2SelfAttention(4, 1, causal=True, coefficient=None, position_bias="alibi"),
        TokenLinear(4, 4),
        L2SelfAttention(4, 1, coefficient=None, position_bias="alibi"),
        coefficient=0.95,
    ),
}
each_contraction = pytest.mark.parametrize("make", CONTRACTIONS.values(), ids=CONTRACTIONS.keys())
each_mask = pytest.mark.parametrize("mask", [None, MASK], ids=["all real", "masked"])


def prepare(make):
    """A contraction with biases and all, tokens, and context if it takes any."""
    f = make().double()
    with torch.no_grad():
        for p in f.parameters():
            p.mul_(2).add_(0.2 * torch.randn_like(p))
        for module in f.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(0.9 / torch.linalg.matrix_norm(module.weight, 2))
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    context = None if f.context_features is None else torch.randn(4, 5, 2, dtype=torch.float64)
    return f, x, context


def brute_force(function, x):
    """log|det| of a function of batches, sample by sample, by autograd."""
    J = torch.autograd.functional.jacobian(lambda x: function(x).sum(0), x)
    size = x[0].numel()
    return torch.linalg.slogdet(J.movedim(2, 0).reshape(len(x), size, size)).logabsdet


# -- exact


@each_contraction
@each_mask
def test_the_exact_logdet_is_that_of_the_autograd_jacobian(make, mask):
    f, x, context = prepare(make)
    value, logabsdet = ExactLogDet()(f, x, mask, context)
    wanted = brute_force(lambda x: x + f(x, mask, context), x)
    assert wanted[:3].abs().min() > 1e-3
    torch.testing.assert_close(logabsdet, wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(value, f(x, mask, context), rtol=0, atol=1e-12)


@each_contraction
@pytest.mark.parametrize("mask", [pytest.param(None, marks=pytest.mark.slow), MASK], ids=["all real", "masked"])
def test_the_logdet_of_the_inverse_is_that_of_the_autograd_jacobian(make, mask):
    f, x, context = prepare(make)
    transform = ResidualTransform(f, ExactLogDet(), Solver(tolerance=3e-12))
    given = pack_context(context, mask)
    with torch.no_grad():
        y, there = transform(x, given)
    back, logabsdet = transform.inverse(y, given)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-10)
    torch.testing.assert_close(logabsdet, brute_force(lambda y: transform.inverse(y, given)[0], y), rtol=0, atol=1e-9)
    torch.testing.assert_close(logabsdet, -there, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("heads", "width"), [(1, 20), (2, 9), (3, 6), (5, 4), (7, 3), (33, 1), (4, 16)], ids=lambda n: str(n)
)
def test_causal_attention_of_any_number_of_heads_is_exact(heads, width):
    features = heads * width
    f = L2SelfAttention(features, heads, causal=True, coefficient=0.99).double()
    with torch.no_grad():
        f.B.copy_(-f.W.mT)  # as steep as can be, and close to where the determinant vanishes
    x = 0.3 * torch.randn(2, 3, features, dtype=torch.float64)
    wanted = brute_force(lambda x: x + f(x), x)
    assert wanted.max() < -1e-2 * features
    torch.testing.assert_close(ExactLogDet()(f, x)[1], wanted, rtol=0, atol=1e-9)


def test_large_batches_are_cut_into_parts_that_fit():
    f = L2SelfAttention(16, 4, causal=True).double()
    x = torch.randn(70, 64, 16, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(70, dtype=torch.float64)
    variables = [x, *f.parameters()]

    def value_and_gradients(parts):
        logabsdet = torch.cat([ExactLogDet()(f, part)[1] for part in x.split(parts)])
        return logabsdet, *torch.autograd.grad((weights * logabsdet).sum(), variables)

    for whole, parts in zip(value_and_gradients(70), value_and_gradients(7), strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("radius", [None, 0.9], ids=["no radius", "radius"])
@pytest.mark.parametrize(
    "place",
    [
        lambda x: x + 1e4,
        lambda x: 1e3 * x,
        lambda x: 1e-6 * x,
        lambda x: x[:, :1].expand(-1, 5, -1),
        lambda x: x[:, :1],
    ],
    ids=["far off", "far apart", "close", "all the same", "one token"],
)
def test_odd_inputs_are_exact_too(causal, radius, place):
    f = ATTENTION(causal=causal, radius=radius).double()
    x = place(torch.randn(3, 5, 4, dtype=torch.float64))
    wanted = brute_force(lambda x: x + f(x), x)
    torch.testing.assert_close(ExactLogDet()(f, x)[1], wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
def test_single_precision_is_close_to_double(causal):
    f, x = ATTENTION(causal=causal), torch.randn(3, 5, 4)
    single = ExactLogDet()(f, x)[1]
    assert single.dtype == torch.float32
    double = ExactLogDet()(f.double(), x.double())[1]
    torch.testing.assert_close(single, double.float(), rtol=1e-4, atol=1e-5)


FLOWS = {
    "dense": lambda: [InvertibleAttention(2, 1, radius="learned", context_features=1)],
    "causal": lambda: [InvertibleAttention(2, 2, causal=True, position_bias="learned", max_tokens=3)],
    "lift": lambda: [InvertibleAttention(2, 1, lift=3, head_features=2, context_features=1)],
    "causal lift": lambda: [InvertibleAttention(2, 1, lift=3, causal=True)],
    "tokenwise": lambda: [InvertibleFeedForward(2, 3, activation="clipswish", context_features=1)],
    "a user's own": lambda: [
        ResidualTransform(Declared(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), 2, 0.99, structure="tokenwise"))
    ],
    "two, one of them inverted": lambda: [
        InvertibleAttention(2, 1, context_features=1),
        InverseTransform(InvertibleFeedForward(2, 3, solver=Solver(tolerance=1e-12))),
    ],
}


@pytest.mark.parametrize("make", FLOWS.values(), ids=FLOWS.keys())
@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one direction", "all"])
def test_gradients_of_log_prob_are_those_of_finite_differences(make, masked, whole):
    flow = Flow(CompositeTransform(make()), SequenceNormal((3, 2))).double()
    named = {name: p.detach().clone() for name, p in flow.named_parameters()}
    if "0.contraction.module" in " ".join(named):
        for p in named.values():
            p.mul_(0.5)
    mask = torch.tensor([[True, True, False], [False, True, True]]) if masked else None

    class LogProb(nn.Module):
        def __init__(self):
            super().__init__()
            self.flow = flow

        def forward(self, x, features):
            return self.flow.log_prob(x, pack_context(features, mask))

    model = LogProb()

    def function(x, features, *values):
        parameters = {f"flow.{name}": value for name, value in zip(named, values, strict=True)}
        return torch.func.functional_call(model, parameters, (x, features))

    x, features = torch.randn(2, 3, 2, dtype=torch.float64), torch.randn(2, 3, 1, dtype=torch.float64)
    variables = [v.detach().requires_grad_() for v in (x, features, *named.values())]
    assert torch.autograd.gradcheck(function, variables, atol=1e-6, fast_mode=not whole)


# -- estimates


def make_steep(module):
    """Brings the slope of a map close to its bound, with eigenvalues where the logarithm is steep too."""
    if isinstance(module, L2SelfAttention):
        module.B.copy_(-10 * module.W.mT)
        if module.position_bias is not None and module.position_bias.table is not None:
            module.position_bias.table[:, module.max_tokens - 1] = 4  # each token sees itself
    if isinstance(module, FeedForward) and len(module.weights) == 2:
        module.weights[1].copy_(-10 * module.weights[0].mT)
    if isinstance(module, Compose):
        module.parts[-1].weights[0].copy_(module.parts[0].weights[0].mT)
    if isinstance(module, _Swing):
        module.weight.copy_(-torch.eye(2))


class Case:
    """Two sequences of unequal weight, with their exact log-determinant and its gradients by brute force."""

    def __init__(self, make, mask=None):
        torch.manual_seed(1)
        self.f = make().double()
        with torch.no_grad():
            for module in self.f.modules():
                make_steep(module)
            for p in self.f.parameters():
                p.add_(0.1 * torch.randn_like(p))
        self.x = (0.5 * torch.randn(2, 3, 2, dtype=torch.float64)).requires_grad_()
        self.mask = mask
        self.context = None
        if self.f.context_features is not None:
            self.context = torch.randn(2, 3, self.f.context_features, dtype=torch.float64)
        self.weights = torch.tensor([1.0, -0.3], dtype=torch.float64)
        self.variables = {"x": self.x, **dict(self.f.named_parameters())}

    def J(self, x):
        size = x[0].numel()
        J = torch.autograd.functional.jacobian(
            lambda x: self.f(x, self.mask, self.context).sum(0), x, create_graph=True
        )
        return J.movedim(2, 0).reshape(len(x), size, size)

    def exact(self):
        J = self.J(self.x)
        return torch.linalg.slogdet(torch.eye(J.shape[-1], dtype=J.dtype) + J).logabsdet

    def series(self, num_terms):
        J = self.J(self.x)
        powers = [torch.linalg.matrix_power(J, k) for k in range(1, num_terms + 1)]
        return sum((-1) ** k / (k + 1) * P.diagonal(dim1=1, dim2=2).sum(-1) for k, P in enumerate(powers))

    def values_and_gradients(self, logabsdet):
        """The two values, and the gradients of their weighted sum after x and every parameter, in one vector."""
        loss, variables = (self.weights * logabsdet).sum(), list(self.variables.values())
        gradients = torch.autograd.grad(loss, variables, allow_unused=True)
        gradients = [
            v.new_zeros(v.numel()) if g is None else g.flatten() for g, v in zip(gradients, variables, strict=True)
        ]
        return torch.cat([logabsdet.detach(), *gradients]).detach()

    def estimate(self, logdet, copies=1):
        """One call for many copies of the two sequences, each copy with its own probes: values and gradients."""

        def repeat(t):
            return None if t is None else t.repeat(copies, *[1] * (t.ndim - 1))

        _, logabsdet = logdet(self.f, repeat(self.x), repeat(self.mask), repeat(self.context))
        return self.values_and_gradients(logabsdet.unflatten(0, (copies, 2)).mean(0))

    def errors(self, logdet, truth, num_calls, copies=1):
        """How many standard errors the mean over all calls is off, entry by entry."""
        draws = torch.stack([self.estimate(logdet, copies) for _ in range(num_calls)])
        error = (draws.mean(0) - self.values_and_gradients(truth)).abs()
        # What does not vary must be right but for rounding.
        return error / (draws.std(0) / num_calls**0.5 + 1e-12)


STEEP = functools.partial(L2SelfAttention, 2, 1, coefficient=0.9)
ESTIMATED = {
    "dense, bias, radius, context": lambda: STEEP(
        position_bias="learned", max_tokens=3, radius="learned", context_features=1
    ),
    "causal": lambda: STEEP(causal=True),
    "lift": lambda: Compose(TokenLinear(2, 3), L2SelfAttention(3, 1, coefficient=None), TokenLinear(3, 2)),
    "tokenwise, context": lambda: FeedForward(2, 3, activation="tanh", coefficient=0.9, context_features=1),
    "a user's own": lambda: Declared(_Swing(), features=2, bound=0.8),
}


class _Swing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        return 0.8 * torch.sin(x.mean(1, keepdim=True) @ (self.weight / self.weight.norm())).expand_as(x)


ESTIMATORS = {
    "roulette": lambda **given: RussianRoulette(**given),
    "short roulette": lambda **given: RussianRoulette(num_exact_terms=1, survival=0.7, **given),
    "roulette, three probes": lambda **given: RussianRoulette(num_exact_terms=2, num_probes=3, **given),
}
each_estimated = pytest.mark.parametrize("make", ESTIMATED.values(), ids=ESTIMATED.keys())
SOME_PADDING = torch.tensor([[True, True, False], [False, True, True]])
#: Quickly, by calls that average over copies; and in full.
DRAWS = [pytest.param(32, 48, id="quick"), pytest.param(1024, 4, id="4096", marks=pytest.mark.slow)]


def every_roulette():
    for draws in DRAWS:
        for estimator in ESTIMATORS:
            for name in ESTIMATED:
                if draws.id == "quick" and estimator != "roulette" and "dense" not in name:
                    continue
                yield pytest.param(
                    ESTIMATED[name],
                    ESTIMATORS[estimator],
                    *draws.values,
                    id=f"{name}, {estimator}, {draws.id}",
                    marks=draws.marks,
                )


@pytest.mark.parametrize(("make", "estimator", "num_calls", "copies"), list(every_roulette()))
def test_roulette_is_unbiased_in_value_and_gradient(make, estimator, num_calls, copies):
    case = Case(make)
    logdet = estimator(generator=torch.Generator().manual_seed(0))
    errors = case.errors(logdet, case.exact(), num_calls, copies)
    assert errors.max() < 4


@pytest.mark.parametrize("make", [ESTIMATED["dense, bias, radius, context"], ESTIMATED["tokenwise, context"]])
@pytest.mark.parametrize(("num_calls", "copies"), DRAWS)
def test_roulette_is_unbiased_with_a_mask(make, num_calls, copies):
    case = Case(make, SOME_PADDING)
    logdet = RussianRoulette(generator=torch.Generator().manual_seed(0))
    assert case.errors(logdet, case.exact(), num_calls, copies).max() < 4


@each_estimated
@pytest.mark.parametrize(("num_calls", "copies"), DRAWS)
def test_the_power_series_is_unbiased_for_its_own_terms_in_value_and_gradient(make, num_calls, copies):
    case = Case(make)
    logdet = PowerSeries(num_terms=3, num_probes=2, generator=torch.Generator().manual_seed(0))
    assert case.errors(logdet, case.series(3), num_calls, copies).max() < 4


def test_a_bias_would_be_seen_in_value_and_gradient():
    case = Case(ESTIMATED["dense, bias, radius, context"])
    generator = torch.Generator().manual_seed(0)
    errors = case.errors(PowerSeries(num_terms=2, generator=generator), case.exact(), 32, 32)
    assert errors[:2].min() > 6 and errors[2:].max() > 6
    errors = case.errors(RussianRoulette(generator=generator), case.exact() * 1.1, 32, 32)
    assert errors.max() > 4


@each_estimated
@pytest.mark.parametrize("num_terms", [1, 2, 5, 10])
def test_the_truncated_series_is_within_its_remainder(make, num_terms):
    case = Case(make)
    remainder = PowerSeries(num_terms).remainder(case.f, num_tokens=3)
    error = (case.series(num_terms) - case.exact()).abs().max().item()
    assert 0 < error <= remainder


def test_the_remainder_is_attained_by_the_steepest_map_of_all():
    f = Declared(_Minus(), features=2, bound=0.9).double()
    x = torch.randn(1, 3, 2, dtype=torch.float64)
    exact = ExactLogDet()(f, x)[1].item()
    for num_terms in (5, 50):
        series = PowerSeries(num_terms)  # of a multiple of the identity, which every probe sees as it is
        error = abs(series(f, x)[1].item() - exact)
        assert 0.5 * series.remainder(f, 3) < error <= series.remainder(f, 3)


class _Minus(nn.Module):
    def forward(self, x):
        return -0.9 * x


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("make", [PowerSeries, RussianRoulette])
def test_the_same_seed_gives_the_same_value_and_gradient(make, training):
    case = Case(ESTIMATED["dense, bias, radius, context"])
    case.f.train(training)
    one, same, other = (case.estimate(make(generator=torch.Generator().manual_seed(seed))) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert (one != other).any() and one[2:].abs().min() > 0
    torch.manual_seed(3)
    globally = case.estimate(make())
    torch.manual_seed(3)
    assert torch.equal(globally, case.estimate(make()))


@pytest.mark.parametrize("make", [PowerSeries, RussianRoulette])
def test_evaluation_gives_the_value_and_the_gradient_of_training(make):
    case = Case(ESTIMATED["dense, bias, radius, context"])
    train, evaluation = (
        (case.f.train(mode), case.estimate(make(generator=torch.Generator().manual_seed(3))))[1]
        for mode in (True, False)
    )
    assert torch.equal(train, evaluation)


@pytest.mark.parametrize("make", [PowerSeries, RussianRoulette])
def test_a_generator_leaves_the_global_one_alone(make):
    case = Case(ESTIMATED["causal"])
    before = torch.get_rng_state()
    case.estimate(make(generator=torch.Generator().manual_seed(3)))
    assert torch.equal(before, torch.get_rng_state())
    case.estimate(make())
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("make", [PowerSeries, RussianRoulette])
def test_an_estimate_of_the_value_needs_no_autograd(make):
    case = Case(ESTIMATED["dense, bias, radius, context"])
    wanted = make(generator=torch.Generator().manual_seed(3))(case.f, case.x, None, case.context)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = make(generator=torch.Generator().manual_seed(3))(case.f, case.x.detach(), None, case.context)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-14)
            assert not one.requires_grad


@pytest.mark.parametrize("make", [functools.partial(PowerSeries, 3), functools.partial(RussianRoulette, survival=0.5)])
def test_more_probes_vary_less(make):
    case = Case(ESTIMATED["causal"])
    one, many = (
        torch.stack([case.estimate(make(num_probes=p, generator=g)) for _ in range(20)]).var(0)
        for p, g in ((1, torch.Generator().manual_seed(0)), (8, torch.Generator().manual_seed(0)))
    )
    assert many.sum() < one.sum() / 3


def saved_numbers(logdet, f, x):
    """How many numbers autograd keeps for the gradient of a log-determinant."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logdet(f, x)
    return sum(sizes)


@pytest.mark.parametrize("make", ESTIMATED.values(), ids=ESTIMATED.keys())
def test_the_memory_of_roulette_does_not_grow_with_the_number_of_terms(make):
    case = Case(make)
    if case.f.context_features is not None:
        case.f.context_features = None
    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    few, many = (saved_numbers(RussianRoulette(num_exact_terms=n, survival=1e-9), case.f, x) for n in (1, 40))
    assert 0 < few == many
    few, many = (saved_numbers(PowerSeries(num_terms=n), case.f, x) for n in (1, 40))
    assert many > few


@pytest.mark.parametrize(("num_exact_terms", "survival"), [(1, 0.3), (4, 0.8)])
def test_terms_are_cut_where_the_law_says(num_exact_terms, survival):
    pushes = []

    class Counting(Declared):
        def free_linearize(self, x, mask, context):
            value = self.free(x, mask, context)
            return value, lambda v: (pushes.append(1), -0.9 * v)[1]

    f = Counting(_Minus(), features=1, bound=0.9)
    logdet = RussianRoulette(num_exact_terms, survival, generator=torch.Generator().manual_seed(0))
    lengths = []
    for _ in range(250):
        pushes.clear()
        logdet(f, torch.ones(1, 1, 1))
        lengths.append(len(pushes) - 1)  # the last one is for the gradient
    extra = torch.tensor(lengths, dtype=torch.float64) - num_exact_terms
    assert extra.min() == 0
    for k in (1, 2, 5):
        share, law = (extra >= k).double().mean().item(), survival**k
        assert abs(share - law) < 4 * (law * (1 - law) / 250) ** 0.5


def test_a_map_that_is_zero_has_a_log_determinant_of_zero():
    f = L2SelfAttention(4, 2)
    nn.init.zeros_(f.B)
    assert RussianRoulette()(f, torch.randn(2, 3, 4))[1].abs().max() == 0


@pytest.mark.parametrize("make", [PowerSeries, RussianRoulette])
def test_a_series_that_need_not_converge_is_refused(make):
    f = L2SelfAttention(4, 2, coefficient=None)
    with pytest.raises(ValueError, match="bound"):
        make()(f, torch.randn(2, 3, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PowerSeries(num_terms=0), "num_terms must be a whole number of at least 1; got num_terms=0"),
        (lambda: PowerSeries(num_probes=0), "num_probes must be"),
        (lambda: RussianRoulette(num_exact_terms=0), "num_exact_terms must be"),
        (lambda: RussianRoulette(survival=1.0), "survival must be None or between 0 and 1; got survival=1.0"),
        (lambda: RussianRoulette(survival=0.0), "survival must be None or between 0 and 1; got survival=0.0"),
        (lambda: AutoLogDet(max_dense=0), "max_dense must be"),
    ],
)
def test_senseless_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -- the choice


def test_auto_is_exact_where_that_is_cheap_and_an_estimate_elsewhere():
    auto = AutoLogDet(max_dense=20, max_width=8)
    dense, causal, wide = ATTENTION(), ATTENTION(causal=True), FeedForward(9, 4)
    assert isinstance(auto.choose(dense, 5), ExactLogDet)
    assert isinstance(auto.choose(dense, 6), RussianRoulette)
    assert isinstance(auto.choose(causal, 10_000), ExactLogDet)
    assert isinstance(auto.choose(wide, 1), RussianRoulette)
    assert isinstance(AutoLogDet().choose(dense, 48), ExactLogDet)  # 192 numbers
    assert isinstance(AutoLogDet().choose(dense, 49), RussianRoulette)
    series = PowerSeries(num_terms=3)
    assert AutoLogDet(max_dense=20, otherwise=series).choose(dense, 6) is series


def test_auto_gives_what_it_chose():
    f, x, _ = prepare(CONTRACTIONS["dense"])
    exact = ExactLogDet()(f, x, MASK)[1]
    assert torch.equal(AutoLogDet()(f, x, MASK)[1], exact)
    torch.manual_seed(5)
    estimate = AutoLogDet(max_dense=1)(f, x, MASK)[1]
    torch.manual_seed(5)
    assert torch.equal(estimate, RussianRoulette()(f, x, MASK)[1])
    assert (estimate[:3] != exact[:3]).all()


def test_the_choice_is_visible():
    text = repr(InvertibleAttention(4, 2, logdet=AutoLogDet(max_dense=7, otherwise=PowerSeries(3))))
    assert "if dense up to N * D = 7, else PowerSeries(num_terms=3, num_probes=1)" in text
    assert "RussianRoulette(num_exact_terms=4, survival=L^2" in repr(InvertibleAttention(4, 2))


# -- derivatives of other orders and directions


def along(logdet, f, x, v, seed=0):
    """log|det| of the first sample as a function of how far x has gone along v."""

    def value(t):
        torch.manual_seed(seed)
        return logdet(f, x + t * v)[1][0]

    return value


@pytest.mark.parametrize("causal", [True, False])
def test_second_derivatives_of_the_exact_value_are_right_in_every_order(causal):
    f = L2SelfAttention(6, 2, causal=causal).double()
    x, v = torch.randn(2, 1, 3, 6, dtype=torch.float64)
    value = along(ExactLogDet(), f, x, v)
    t, one = torch.tensor([0.3, 1.0], dtype=torch.float64)
    grad, jvp = torch.func.grad, torch.func.jvp
    expected = grad(grad(value))(t).item()
    h = 1e-4
    assert ((value(t + h) - 2 * value(t) + value(t - h)) / h**2).item() == pytest.approx(expected, abs=1e-5)
    if causal:  # in this order torch.linalg.slogdet itself, which the dense one goes through, gives no derivative
        assert grad(lambda t: jvp(value, (t,), (one,))[1])(t).item() == pytest.approx(expected, rel=1e-9)
    assert jvp(grad(value), (t,), (one,))[1].item() == pytest.approx(expected, rel=1e-9)


def test_roulette_has_the_same_derivative_forwards_and_backwards():
    f = L2SelfAttention(6, 2).double()
    x, v = torch.randn(2, 1, 3, 6, dtype=torch.float64)
    value = along(RussianRoulette(), f, x, v)
    t, one = torch.tensor([0.3, 1.0], dtype=torch.float64)
    expected = torch.func.grad(value)(t).item()
    assert torch.func.jvp(value, (t,), (one,))[1].item() == pytest.approx(expected, rel=1e-9)


def test_a_second_derivative_of_the_roulette_is_refused():
    f = L2SelfAttention(6, 2).double()
    x = torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True)
    _, logabsdet = RussianRoulette()(f, x)
    torch.autograd.grad(logabsdet.sum(), x, retain_graph=True)
    with pytest.raises(
        NotImplementedError, match=r"can be differentiated once.*Use ExactLogDet\(\) or PowerSeries\(\)"
    ):
        torch.autograd.grad(logabsdet.sum(), x, create_graph=True)


@pytest.mark.parametrize("scale", [1e4, 1e12])
def test_tokens_far_outside_their_balls_spoil_no_gradient(scale):
    block = InvertibleAttention(4, 2, radius=1.0, causal=True)
    x = (scale * torch.randn(2, 5, 4)).requires_grad_()
    block(x)[1].sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in block.parameters() if p.grad is not None)


def test_second_derivatives_of_roulette_are_refused_in_every_mode():
    f, x, logdet = FeedForward(2, 4), torch.randn(1, 3, 2), RussianRoulette()

    def value(x):
        return logdet(f, x)[1].sum()

    assert torch.func.grad(value)(x).isfinite().all()
    assert torch.func.jvp(value, (x,), (x,))[1].isfinite()
    for second in (
        lambda: torch.func.grad(lambda x: torch.func.grad(value)(x).sum())(x),
        lambda: torch.func.jvp(torch.func.grad(value), (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match="differentiated once"):
            second()
    with torch.autograd.forward_ad.dual_level():
        dual = value(torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x)))
        tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
        with pytest.raises(NotImplementedError, match="differentiated once"):
            tangent.backward()


@pytest.mark.parametrize("head_features", [2, 5])
def test_gradients_of_each_sample_by_vmap(head_features):
    block = InvertibleAttention(4, 2, head_features=head_features, causal=True, logdet=ExactLogDet()).double()
    x, weights = torch.randn(3, 5, 4, dtype=torch.float64), dict(block.named_parameters())

    def value(weights, x):
        return torch.func.functional_call(block, weights, (x.unsqueeze(0),))[1][0]

    each = torch.func.vmap(torch.func.grad(value), (None, 0))(weights, x)["contraction.W"]
    block(x)[1].sum().backward()
    torch.testing.assert_close(each.sum(0), block.contraction.W.grad)


def test_an_empty_batch_has_no_log_determinants():
    for options in ({}, {"head_features": 5}, {"lift": 8}, {"position_bias": "alibi"}):
        block = InvertibleAttention(4, 2, causal=True, logdet=ExactLogDet(), **options)
        assert block(torch.zeros(0, 5, 4), torch.zeros(0, 5, dtype=torch.bool))[1].shape == (0,)


@pytest.mark.parametrize(("features", "heads", "size", "tolerance"), [(64, 4, 1.5, 1e-3), (4, 2, 10.0, 1e-3)])
def test_gradients_of_tokens_that_see_little_but_themselves_keep_their_digits(features, heads, size, tolerance):
    """Their own weights hardly change: the gradient is what is left of large numbers."""
    f = L2SelfAttention(features, heads, causal=True)
    x = size * torch.randn(24, 16, features)

    def gradient(f, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(ExactLogDet()(f, x)[1].sum(), x)[0]

    single, double = gradient(f, x), gradient(copy.deepcopy(f).double(), x.double())
    assert torch.linalg.vector_norm(single - double) < tolerance * torch.linalg.vector_norm(double)
