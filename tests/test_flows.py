"""Flows of sequences and sets through the plain API of nflows."""

import math

import pytest
import torch
from nflows.flows import Flow
from nflows.transforms import ActNorm, CompositeTransform, InverseTransform, LULinear
from torch import nn

from flowattn.context import pack_context
from flowattn.distributions import SequenceNormal
from flowattn.flows import AttentionFlow, TransformFlow
from flowattn.inverse import Solver
from flowattn.logdet import AutoLogDet, PowerSeries, RussianRoulette
from flowattn.transforms import (
    AttentionCoupling,
    AutoregressiveAttention,
    FeedForwardCoupling,
    InvertibleAttention,
    InvertibleFeedForward,
    TokenActNorm,
    Tokenwise,
)

N, D, C = 5, 4, 2
LENGTHS = torch.tensor([5, 3, 1])
MASK = torch.arange(N) < LENGTHS.unsqueeze(1)


def plain_flow(context_features):
    """Our transforms next to those of nflows, in nothing but its own containers."""
    transform = CompositeTransform(
        [
            TokenActNorm(D),
            InverseTransform(
                InvertibleAttention(
                    D, 2, radius="learned", context_features=context_features, solver=Solver(tolerance=1e-11)
                )
            ),
            Tokenwise(LULinear(D, identity_init=False), use_context=False),
            CompositeTransform([InvertibleAttention(D, 2, lift=6, causal=True, context_features=context_features)]),
            InverseTransform(FeedForwardCoupling(D, 8, context_features=context_features)),
            InvertibleFeedForward(D, 8, context_features=context_features),
        ]
    )
    return Flow(transform, SequenceNormal((N, D)))


FLOWS = {
    "plain nflows": plain_flow,
    "AttentionFlow": lambda context_features: AttentionFlow(
        (N, D), depth=2, num_heads=2, hidden=8, context_features=context_features
    ),
    "AttentionFlow, causal": lambda context_features: AttentionFlow(
        (N, D), depth=1, num_heads=2, hidden=8, causal=True, position_bias="learned", context_features=context_features
    ),
}
CONTEXTS = {
    "none": lambda: (None, None),
    "mask": lambda: (None, MASK),
    "sequence features": lambda: (torch.randn(3, C).double(), None),
    "token features": lambda: (torch.randn(3, N, C).double(), None),
    "sequence features and mask": lambda: (torch.randn(3, C).double(), MASK),
    "token features and mask": lambda: (torch.randn(3, N, C).double(), MASK),
}
each_flow = pytest.mark.parametrize("make", FLOWS.values(), ids=FLOWS.keys())
each_context = pytest.mark.parametrize("make_context", CONTEXTS.values(), ids=CONTEXTS.keys())


def prepare(make, make_context):
    """A flow that is not the identity, in double precision, and a context for it."""
    features, mask = make_context()
    flow = make(None if features is None else C).double()
    x = 1 + 2 * torch.randn(3, N, D, dtype=torch.float64)
    flow.train()
    with torch.no_grad():
        flow.log_prob(x, pack_context(features, mask))
        for p in flow.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return flow.eval(), x, features, mask


# -- the API of nflows


@each_flow
@each_context
def test_log_prob_is_that_of_the_noise_plus_the_brute_force_logdet(make, make_context):
    flow, x, features, mask = prepare(make, make_context)
    context = pack_context(features, mask)
    log_prob = flow.log_prob(x, context)
    assert log_prob.shape == (3,) and log_prob.dtype == torch.float64
    noise = flow.transform_to_noise(x, context)
    J = torch.autograd.functional.jacobian(lambda x: flow.transform_to_noise(x, context).sum(0), x)
    logabsdet = torch.linalg.slogdet(J.movedim(2, 0).reshape(3, N * D, N * D)).logabsdet
    real = torch.ones(3, N, dtype=torch.bool) if mask is None else mask
    for k in range(3):
        normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1)
        wanted = normal.log_prob(noise[k, real[k]]).sum() + logabsdet[k]
        torch.testing.assert_close(log_prob[k], wanted, rtol=0, atol=1e-8)


@each_flow
@each_context
def test_samples_and_their_log_probs_are_those_of_the_flow(make, make_context):
    flow, _, features, mask = prepare(make, make_context)
    context = pack_context(features, mask)
    with torch.no_grad():
        samples, log_prob = flow.sample_and_log_prob(4, context)
        alone = flow.sample(4, context)
    leading = (4,) if context is None else (3, 4)
    assert samples.shape == alone.shape == (*leading, N, D) and log_prob.shape == leading
    flat = samples.reshape(-1, N, D)
    repeated = None if context is None else context.repeat_interleave(4, 0)
    with torch.no_grad():
        torch.testing.assert_close(flow.log_prob(flat, repeated), log_prob.flatten(), rtol=0, atol=1e-6)
        noise = flow.transform_to_noise(flat, repeated)
    if mask is not None:
        padding = ~mask.repeat_interleave(4, 0)
        assert torch.equal(flat[padding], torch.zeros_like(flat[padding]))
        assert (noise[~padding] != 0).all()


@each_flow
def test_samples_are_the_inverse_of_noise(make):
    flow, _, _, _ = prepare(make, CONTEXTS["mask"])
    torch.manual_seed(3)
    noise = flow._distribution.sample(4, MASK)
    torch.manual_seed(3)
    with torch.no_grad():
        samples = flow.sample(4, MASK)
        back = flow.transform_to_noise(samples.flatten(0, 1), MASK.repeat_interleave(4, 0))
    torch.testing.assert_close(back.unflatten(0, (3, 4)), noise, rtol=0, atol=1e-7)


@each_flow
def test_a_padded_sequence_has_the_density_of_the_shorter_one(make):
    for name in ("mask", "sequence features and mask", "token features and mask"):
        flow, x, features, mask = prepare(make, CONTEXTS[name])
        log_prob = flow.log_prob(x.masked_fill(~mask.unsqueeze(-1), torch.nan), pack_context(features, mask))
        for k, length in enumerate(LENGTHS):
            own = None if features is None else features[k : k + 1]
            if own is not None and own.ndim == 3:
                own = own[:, :length]
            alone = flow.log_prob(x[k : k + 1, :length], own)
            torch.testing.assert_close(log_prob[k : k + 1], alone, rtol=0, atol=1e-9)


@each_flow
@pytest.mark.parametrize("value", [1e3, torch.nan])
def test_padding_reaches_no_gradient_whatever_it_holds(make, value):
    flow, x, features, mask = prepare(make, CONTEXTS["token features and mask"])
    padding, context = ~mask.unsqueeze(-1), pack_context(features, mask)

    def gradients(filler):
        inputs = x.masked_fill(padding, filler).requires_grad_()
        return torch.autograd.grad(flow.log_prob(inputs, context).sum(), [inputs, *flow.parameters()])

    for got, wanted in zip(gradients(value), gradients(0.0), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


def test_densities_integrate_to_one():
    flow = AttentionFlow((2, 1), depth=2, num_heads=2, head_features=2, hidden=8, feed_forward="contractive").double()
    with torch.no_grad():
        for p in flow.parameters():
            p.add_(0.3 * torch.randn_like(p))
        flow.eval()
        grid = torch.linspace(-12, 12, 201, dtype=torch.float64)
        points = torch.cartesian_prod(grid, grid).unsqueeze(-1)
        density = flow.log_prob(points).exp()
        one_token = flow.log_prob(torch.linspace(-12, 12, 2001, dtype=torch.float64).reshape(-1, 1, 1)).exp()
    assert abs(density.sum() * (grid[1] - grid[0]) ** 2 - 1) < 1e-3
    assert abs(one_token.sum() * 24 / 2000 - 1) < 1e-3


def test_reverse_kl_gradients_reach_every_parameter():
    flow = AttentionFlow((3, 2), depth=1, num_heads=2, hidden=4, context_features=C)
    samples, log_prob = flow.sample_and_log_prob(2, torch.randn(3, C))
    (log_prob.sum() + samples.square().sum()).backward()
    missing = [name for name, p in flow.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert missing == []


@pytest.mark.parametrize("logdet", [RussianRoulette(), PowerSeries(num_terms=5)])
def test_a_flow_with_estimates_is_exact_on_average(logdet):
    x = torch.randn(2, 3, 2, dtype=torch.float64)
    exact = AttentionFlow((3, 2), depth=1, num_heads=2, hidden=4, coefficient=0.5).double().eval()
    estimate = AttentionFlow((3, 2), depth=1, num_heads=2, hidden=4, coefficient=0.5, logdet=logdet).double().eval()
    estimate.load_state_dict(exact.state_dict())
    with torch.no_grad():
        draws = estimate.log_prob(x.repeat(1000, 1, 1)).unflatten(0, (1000, 2))
        assert ((draws.mean(0) - exact.log_prob(x)).abs() < 4 * draws.std(0) / 1000**0.5 + 0.01).all()
        assert (draws.std(0) > 0).all()


# -- AttentionFlow


def test_the_density_of_a_set_does_not_depend_on_its_order():
    for name in ("none", "sequence features", "token features and mask"):
        flow, x, features, mask = prepare(FLOWS["AttentionFlow"], CONTEXTS[name])
        order = torch.randperm(N)
        moved = features[:, order] if features is not None and features.ndim == 3 else features
        other = pack_context(moved, None if mask is None else mask[:, order])
        context = pack_context(features, mask)
        torch.testing.assert_close(flow.log_prob(x[:, order], other), flow.log_prob(x, context), rtol=0, atol=1e-9)
        noise = flow.transform_to_noise(x, context)
        torch.testing.assert_close(flow.transform_to_noise(x[:, order], other), noise[:, order], rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", [{"causal": True}, {"position_bias": "learned"}, {"position_bias": "alibi"}])
def test_the_density_of_a_sequence_does(options):
    flow = AttentionFlow((N, D), depth=1, num_heads=2, hidden=8, **options).double().eval()
    x = torch.randn(3, N, D, dtype=torch.float64)
    assert (flow.log_prob(x.roll(1, 1)) - flow.log_prob(x)).abs().min() > 1e-6


def test_tokens_are_not_independent():
    flow, x, _, _ = prepare(FLOWS["AttentionFlow"], CONTEXTS["none"])
    one, other = x[:1], x[1:2]
    mixed = torch.cat([one[:, :2], other[:, 2:]], 1), torch.cat([other[:, :2], one[:, 2:]], 1)
    total = sum(flow.log_prob(t) for t in (one, other))
    assert (sum(flow.log_prob(t) for t in mixed) - total).abs() > 1e-3


@pytest.mark.parametrize("feed_forward", ["contractive", "coupling", "both"])
def test_a_block_holds_what_it_says(feed_forward):
    flow = AttentionFlow((N, D), depth=2, num_heads=2, hidden=8, feed_forward=feed_forward, coefficient=0.6)
    kinds = [type(t).__name__ for t in flow._transform._transforms]
    parts = {
        "contractive": ["InvertibleFeedForward"],
        "coupling": ["FeedForwardCoupling"],
        "both": ["FeedForwardCoupling", "InvertibleFeedForward"],
    }[feed_forward]
    assert kinds == 2 * ["TokenActNorm", "Tokenwise", "InvertibleAttention", *parts]
    blocks = [t for t in flow._transform._transforms if hasattr(t, "contraction")]
    assert all(t.contraction.coefficient == 0.6 for t in blocks)


@pytest.mark.parametrize(("width", "num_heads"), [(1, 1), (2, 2), (3, 3), (5, 1), (6, 3), (8, 4)])
def test_tokens_of_any_width_do_without_options(width, num_heads):
    flow = AttentionFlow((3, width), depth=1)
    _, _, attention, *parts = flow._transform._transforms
    assert attention.contraction.num_heads == num_heads
    both = [FeedForwardCoupling, InvertibleFeedForward]
    assert [type(part) for part in parts] == (both if width > 1 else both[1:])
    assert flow.log_prob(flow.sample(2)).shape == (2,)


@pytest.mark.parametrize(("options", "num_heads"), [({"lift": 6}, 3), ({"head_features": 5}, 4)])
def test_the_number_of_heads_goes_by_the_width_that_they_divide(options, num_heads):
    contraction = AttentionFlow((3, 2), depth=1, **options)._transform._transforms[2].contraction
    assert (contraction.parts[1] if "lift" in options else contraction).num_heads == num_heads


def test_the_logdet_of_attention_can_be_chosen():
    flow = AttentionFlow((N, D), depth=1, num_heads=2, hidden=8, logdet=PowerSeries(3))
    assert "PowerSeries(num_terms=3" in repr(flow)
    flow = AttentionFlow((N, D), depth=1, num_heads=2, hidden=8)
    assert isinstance(flow._transform._transforms[2].logdet, AutoLogDet)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"event_shape": (5,)}, r"event_shape must be \(tokens, features\)"),
        ({"depth": 0}, "depth must be a whole number of at least 1; got depth=0"),
        ({"feed_forward": "none"}, "feed_forward must be one of 'contractive', 'coupling', 'both'"),
        ({"num_heads": 3}, "num_heads must divide features"),
        ({"coefficient": 1.5}, "coefficient must be"),
        ({"event_shape": (5, 1), "num_heads": 1, "feed_forward": "both"}, "feed_forward must be 'contractive'"),
    ],
)
def test_senseless_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionFlow(**{"event_shape": (N, D), "num_heads": 2, **options})


def test_sequences_that_do_not_fit_are_refused():
    flow = AttentionFlow((N, D), depth=1, num_heads=2, hidden=8)
    for shape in ((3, N + 1, D), (3, N, D + 1), (N, D)):
        with pytest.raises(ValueError):
            flow.log_prob(torch.randn(shape))


def test_a_flow_with_loaded_state_is_the_same_flow():
    flow, x, _, _ = prepare(FLOWS["AttentionFlow"], CONTEXTS["none"])
    other = FLOWS["AttentionFlow"](None).double()
    other.load_state_dict(flow.state_dict(), strict=True)
    other.train()  # and is not initialised again
    torch.testing.assert_close(other.log_prob(x), flow.log_prob(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["set", "sequence"])
def test_under_bf16_autocast_the_way_back_is_right_and_log_prob_is_single(causal):
    flow = AttentionFlow((N, D), depth=2, num_heads=2, hidden=8, causal=causal)
    x = torch.randn(16, N, D)
    flow.train()
    with torch.no_grad():
        flow.log_prob(x)
        for p in flow.parameters():
            p.add_(0.1 * torch.randn_like(p))
    flow.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_prob = flow.log_prob(x)
        noise, logabsdet = flow._transform(x)
        back, otherwise = flow._transform.inverse(noise)
        samples, sample_log_prob = flow.sample_and_log_prob(4)
    for tensor in (log_prob, noise, logabsdet, back, otherwise, samples, sample_log_prob):
        assert tensor.dtype == torch.float32
    torch.testing.assert_close(back, x, rtol=0, atol=1e-4)
    torch.testing.assert_close(log_prob, flow.log_prob(x), rtol=0, atol=1e-4)
    torch.testing.assert_close(otherwise, -logabsdet, rtol=0, atol=1e-3)


def test_bf16_inputs_under_autocast_have_log_probs_of_single_precision():
    flow = AttentionFlow((N, D), depth=1, num_heads=2, hidden=8)
    x = (10 * torch.randn(16, N, D)).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_prob = flow.log_prob(x)
    assert log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob, flow.log_prob(x.float()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_have_the_type_of_the_flow(dtype):
    flow = AttentionFlow((N, D), depth=1, num_heads=2, hidden=8).to(dtype).eval()
    with torch.inference_mode():
        samples, log_prob = flow.sample_and_log_prob(3, MASK)
    assert samples.dtype == log_prob.dtype == dtype


HALVES = {
    "AttentionFlow": lambda: AttentionFlow((N, D), depth=2, num_heads=2, hidden=8),
    "AttentionFlow, causal": lambda: AttentionFlow((N, D), depth=1, num_heads=2, hidden=8, causal=True),
    "TransformFlow": lambda: TransformFlow(
        (N, D),
        [
            TokenActNorm,
            LULinear,
            lambda width: AutoregressiveAttention(width, 2, hidden=8),
            lambda width: AttentionCoupling(width, 2, hidden=8, kind="rational-quadratic"),
        ],
    ),
}


@pytest.mark.parametrize("make", HALVES.values(), ids=HALVES.keys())
def test_in_half_precision_a_flow_is_sampled_and_scored(make):
    flow = make()
    flow.log_prob(1 + 2 * torch.randn(64, N, D))
    with torch.no_grad():
        for p in flow.parameters():
            p.add_(0.1 * torch.randn_like(p))
        flow.eval().bfloat16()
        samples, log_prob = flow.sample_and_log_prob(4, MASK)
        again = flow.log_prob(samples.flatten(0, 1), MASK.repeat_interleave(4, 0))
    assert samples.dtype == torch.bfloat16 and log_prob.dtype == again.dtype == torch.float32
    torch.testing.assert_close(again, log_prob.flatten(), rtol=0.05, atol=0.3)


def test_a_flow_in_half_precision_starts_from_its_first_batch():
    x = (3 + 2 * torch.randn(64, N, D)).bfloat16()
    for transform in (TokenActNorm(D).bfloat16(), Tokenwise(ActNorm(D)).bfloat16()):
        y, _ = transform(x)
        torch.testing.assert_close(y.float().mean((0, 1)), torch.zeros(D), rtol=0, atol=0.05)
        torch.testing.assert_close(transform.inverse(y)[0].float(), x.float(), rtol=0.02, atol=0.05)


def test_log_determinants_are_added_up_in_single_precision():
    flow = TransformFlow((N, D), [TokenActNorm, lambda width: FeedForwardCoupling(width, 8, kind="affine")], depth=20)
    chain, x = flow._transform, torch.randn(3, N, D, dtype=torch.bfloat16)
    with torch.no_grad():
        for p in chain.parameters():
            p.add_(0.1 * torch.randn_like(p))
    chain.eval().bfloat16()
    total = torch.zeros(3)
    y = x
    for part in chain._transforms:
        y, logabsdet = part(y)
        total = total + logabsdet
    assert chain(x)[1].dtype == chain.inverse(y)[1].dtype == torch.float32
    torch.testing.assert_close(chain(x)[1], total)


# -- context that nobody reads


UNCONDITIONED = {
    "AttentionFlow": lambda: AttentionFlow((N, D), depth=1, num_heads=2),
    "TransformFlow": lambda: TransformFlow((N, D), [TokenActNorm, lambda width: InvertibleAttention(width, 2)]),
}


@pytest.mark.parametrize("make", UNCONDITIONED.values(), ids=UNCONDITIONED.keys())
@pytest.mark.parametrize(
    "context", [MASK.float(), torch.zeros(3, N, C), MASK.long()], ids=["float", "features", "long"]
)
def test_features_that_nobody_reads_are_refused(make, context):
    flow, x = make(), torch.randn(3, N, D)
    assert flow.log_prob(x, MASK).shape == (3,)
    for call in (lambda: flow.log_prob(x, context), lambda: flow.sample(2, context)):
        with pytest.raises(ValueError, match=r"a mask, which is boolean.*got torch\.\w+ of shape \[3, 5"):
            call()


def test_features_pass_where_something_may_read_them():
    x, features = torch.randn(3, N, D), torch.randn(3, C)
    TransformFlow((N, D), [lambda width: InvertibleAttention(width, 2, context_features=C)]).log_prob(x, features)
    TransformFlow((N, D), [LULinear]).log_prob(x, features)  # of nflows, which cannot be asked


# -- training


class ExchangeableNormal:
    """Tokens with a part in common: the simplest set density in which none is independent of the others."""

    def __init__(self, num_tokens=4, correlation=0.5):
        self.num_tokens, self.correlation = num_tokens, correlation
        self.factor = torch.tensor([[1.5, 0.0], [0.8, 0.6]])
        self.mean = torch.tensor([1.0, -2.0])
        between = (1 - correlation) * torch.eye(num_tokens) + correlation
        covariance = torch.kron(between, self.factor @ self.factor.mT)
        self.normal = torch.distributions.MultivariateNormal(self.mean.repeat(num_tokens), covariance)

    def sample(self, size):
        own, common = torch.randn(size, self.num_tokens, 2), torch.randn(size, 1, 2)
        tokens = math.sqrt(1 - self.correlation) * own + math.sqrt(self.correlation) * common
        return tokens @ self.factor.mT + self.mean

    def log_prob(self, x):
        return self.normal.log_prob(x.flatten(1))

    @property
    def entropy_without_mixing(self):
        """What a flow of each token by itself cannot get below."""
        return 2 * self.num_tokens * 0.5 * math.log(2 * math.pi * math.e) + self.num_tokens * math.log(1.5 * 0.6)


def test_a_flow_learns_a_set_density_to_within_a_twentieth_of_a_nat_of_its_entropy():
    data = ExchangeableNormal()
    flow = AttentionFlow((4, 2), depth=2, num_heads=2, hidden=16, lift=8)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _ in range(200):
        optimizer.zero_grad()
        (-flow.log_prob(data.sample(128)).mean()).backward()
        optimizer.step()
        schedule.step()
    flow.eval()
    entropy = data.normal.entropy()
    assert data.entropy_without_mixing > entropy + 1
    with torch.no_grad():
        x = data.sample(4096)
        # The negative log-likelihood, but for the noise that the data's own density takes away.
        nll = entropy - (flow.log_prob(x) - data.log_prob(x)).mean()
        assert entropy - 0.02 < nll < entropy + 0.05
        samples = flow.sample(4096)
    covariance = samples.flatten(1).T.cov()
    assert (covariance - data.normal.covariance_matrix).abs().max() < 0.3
    assert (samples.mean((0, 1)) - data.mean).abs().max() < 0.15


def test_the_flow_of_each_token_by_itself_does_not():
    """So that the test above is one of attention."""
    data = ExchangeableNormal()
    flow = Flow(
        CompositeTransform([TokenActNorm(2), Tokenwise(LULinear(2)), InvertibleFeedForward(2, 16)]),
        SequenceNormal((4, 2)),
    )
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        (-flow.log_prob(data.sample(128)).mean()).backward()
        optimizer.step()
    with torch.no_grad():
        x = data.sample(4096)
        assert (data.log_prob(x) - flow.log_prob(x)).mean() > 1


def test_a_step_of_training_changes_every_parameter():
    flow = AttentionFlow((N, D), depth=2, num_heads=2, hidden=8, causal=True, position_bias="learned", lift=6)
    before = {name: p.detach().clone() for name, p in flow.named_parameters()}
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        (-flow.log_prob(torch.randn(8, N, D), torch.ones(8, N, dtype=torch.bool)).mean()).backward()
        optimizer.step()
    same = [name for name, p in flow.named_parameters() if torch.equal(p, before[name])]
    assert same == []
    assert all(isinstance(p, nn.Parameter) for p in flow.parameters())


class OwnLinear(LULinear):
    """A user's own, which is of vectors as its parent is."""


def test_lists_know_what_is_of_vectors():
    torch.manual_seed(0)
    own, plain = (TransformFlow((4, 3), [kind]) for kind in (OwnLinear, LULinear))
    own.load_state_dict(plain.state_dict())
    with torch.no_grad():
        own._transform._transforms[0].transform.unconstrained_upper_diag.add_(1)
        plain._transform._transforms[0].transform.unconstrained_upper_diag.add_(1)
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(own.log_prob(x), plain.log_prob(x))
    TransformFlow((4, 3), [lambda d: InverseTransform(AutoregressiveAttention(d, 1, hidden=4))]).log_prob(x)
    both = TransformFlow((4, 3), [lambda d: InverseTransform(CompositeTransform([LULinear(d), LULinear(d)]))])
    assert isinstance(both._transform._transforms[0], Tokenwise)
    with pytest.raises(ValueError, match="must not be in one CompositeTransform"):
        TransformFlow((4, 3), [lambda d: CompositeTransform([LULinear(d), TokenActNorm(d)])])


def test_samples_of_a_context_come_in_batches():
    flow = AttentionFlow((4, 3), depth=1, context_features=2)
    context = torch.tensor([[-5.0, 0.0], [5.0, 0.0]])
    assert flow.sample(5, context, batch_size=2).shape == (2, 5, 4, 3)
    torch.manual_seed(1)
    parts = [flow.sample(2, context) for _ in range(2)]
    torch.manual_seed(1)
    assert torch.equal(flow.sample(4, context, batch_size=2), torch.cat(parts, 1))
    assert AttentionFlow((4, 3), depth=1).sample(5, batch_size=2).shape == (5, 4, 3)
