"""The mean-free space: contractions that keep it, transforms of it, and the flow of particles."""

import math

import pytest
import torch
from nflows.transforms import CompositeTransform

from flowattn.contractions import Compose, FeedForward, L2SelfAttention, TokenLinear
from flowattn.contractions.centred import Centred, centre, moves_with_tokens
from flowattn.contractions.radial import CentralForces, PairForces, Profile
from flowattn.flows.particles import MeanFreeNormal, ParticleFlow
from flowattn.inverse import Solver
from flowattn.testing import check_transform
from flowattn.transforms import ResidualTransform
from flowattn.transforms.centred import CentredAttention, CentredFeedForward, CentredLinear, MovingResidual

FINE = Solver(tolerance=1e-12)

TRANSFORMS = {
    "attention": lambda: CentredAttention(2, 2, head_features=2, solver=FINE),
    "attention, lifted": lambda: CentredAttention(2, 2, lift=4, solver=FINE),
    "feed-forward": lambda: CentredFeedForward(2, 6, activation="sin", solver=FINE),
    "pair forces": lambda: ResidualTransform(PairForces(2, num_knots=5), solver=FINE),
    "central forces": lambda: ResidualTransform(Centred(CentralForces(2, num_knots=5)), solver=FINE),
    "attention with a ball": lambda: ResidualTransform(
        Centred(L2SelfAttention(2, 1, radius=1.5, coefficient=None)), solver=FINE
    ),
    "linear": lambda: CentredLinear(2, scale=0.5),
    "linear, isotropic": lambda: CentredLinear(2, isotropic=True, scale=2.0),
}
each = pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS.keys())
turning = pytest.mark.parametrize("make", [TRANSFORMS[name] for name in ("pair forces", "central forces")])

BASIS = torch.tensor([[1, -1, 0, 0], [1, 1, -2, 0], [1, 1, 1, -3]], dtype=torch.float64)
BASIS = BASIS / BASIS.norm(dim=1, keepdim=True)


def trained(make):
    """One whose parameters are no longer those of the start, in double precision."""
    module = make().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return module


def systems(batch=3):
    return 1.5 * centre(torch.randn(batch, 4, 2, dtype=torch.float64))


def inside(transform):
    """The transform in the orthonormal coordinates [3, 2] of the mean-free space of one system."""
    return lambda u: BASIS @ transform((BASIS.T @ u).unsqueeze(0))[0][0]


# -- every transform of the mean-free space


@each
def test_the_mean_free_space_is_mapped_to_itself_and_back(make):
    transform, x = trained(make), systems()
    y, logabsdet = transform(x)
    assert y.mean(1).abs().max() < 1e-12
    back, other = transform.inverse(y)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-9)
    torch.testing.assert_close(other, -logabsdet, rtol=0, atol=1e-8)


@each
def test_logabsdet_is_that_of_the_jacobian_on_the_mean_free_space(make):
    transform, x = trained(make), systems()
    for system, logabsdet in zip(x, transform(x)[1], strict=True):
        J = torch.autograd.functional.jacobian(inside(transform), BASIS @ system).reshape(6, 6)
        torch.testing.assert_close(logabsdet, torch.linalg.slogdet(J).logabsdet)


@each
def test_the_order_of_the_tokens_does_not_matter(make):
    transform, x, order = trained(make), systems(), torch.tensor([2, 0, 3, 1])
    y, logabsdet = transform(x)
    shuffled, same = transform(x[:, order])
    torch.testing.assert_close(shuffled, y[:, order])
    torch.testing.assert_close(same, logabsdet)


@turning
def test_forces_turn_with_the_system(make):
    transform, x = trained(make), systems()
    Q, _ = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64))
    y, logabsdet = transform(x)
    turned, same = transform(x @ Q)
    torch.testing.assert_close(turned, y @ Q)
    torch.testing.assert_close(same, logabsdet)


@pytest.mark.parametrize("name", ["attention", "feed-forward", "pair forces", "linear"])
def test_they_keep_the_contract_of_transforms_outside_of_it_too(name):
    masks = name in ("feed-forward", "pair forces", "linear")
    # An inverse by iteration refuses torch.func, in words; compiling takes long.
    skip = ["works_under_torch_compile", "works_under_torch_func"]
    check_transform(TRANSFORMS[name], (4, 2), supports_mask=masks, batch_size=4, skip=skip)


def test_linear_maps_count_the_real_tokens_and_take_their_mean():
    transform = CentredLinear(1, scale=math.e)
    x, mask = torch.tensor([[[1.0], [2.0], [3.0], [50.0]]]), torch.tensor([[True, True, True, False]])
    y, logabsdet = transform(x, mask)
    assert logabsdet.item() == pytest.approx(2.0)
    torch.testing.assert_close(y[:, :3], transform(x[:, :3])[0])
    assert y[0, 3] == 50 and transform(x, torch.zeros_like(mask))[1] == 0


# -- contractions


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, True, False, True]])], ids=["no mask", "a mask"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Centred(FeedForward(2, 6, activation="sin", coefficient=None), coefficient=0.9),
        lambda: Centred(L2SelfAttention(2, 2, head_features=2, coefficient=None), coefficient=0.9),
        lambda: Centred(L2SelfAttention(2, 2, head_features=2, coefficient=0.8), coefficient=None),
        lambda: PairForces(2, num_knots=6, coefficient=0.9),
        lambda: Centred(CentralForces(2, num_knots=6), coefficient=0.9),
    ],
    ids=["feed-forward", "attention", "attention, scaled before", "pair forces", "central forces"],
)
def test_no_pair_of_inputs_is_stretched_beyond_the_bound(make, mask):
    f = trained(lambda: make())
    with torch.no_grad():
        for parameter in f.parameters():
            parameter.mul_(5)
    x = 2 * torch.randn(1, 4, 2, dtype=torch.float64)
    J = f.forward_and_jacobian(x, mask)[1][0].flatten(2).flatten(0, 1)
    auto = torch.autograd.functional.jacobian(lambda x: f(x, mask)[0], x)[:, :, 0].flatten(2).flatten(0, 1)
    torch.testing.assert_close(J, auto)
    if f.norm == "2":
        stretch = torch.linalg.matrix_norm(J, 2)
    else:  # rows of blocks, each at most as long as the sum of its blocks' norms, and at least as any one input says
        inputs = torch.nn.functional.normalize(torch.randn(5000, 4, 2, dtype=torch.float64), dim=-1)
        stretch = (inputs.flatten(1) @ J.T).unflatten(1, (4, 2)).norm(dim=-1).amax()
    assert stretch <= f.lipschitz_bound(4, f.norm) * (1 + 1e-9)
    limit = 0.9 if f.coefficient is not None else 2.0
    assert f.lipschitz_bound(4, f.norm) <= limit


def test_the_bound_of_pair_forces_is_attained():
    f = PairForces(2, num_knots=3, coefficient=None).double()
    with torch.no_grad():
        f.profile.free_slopes.fill_(20.0)
    J = f.forward_and_jacobian(systems(1))[1][0].flatten(2).flatten(0, 1)
    assert torch.linalg.matrix_norm(J, 2).item() == pytest.approx(f.lipschitz_bound(4, "2").item(), rel=1e-6)


@pytest.mark.parametrize("num_knots", [2, 7])
def test_a_profile_is_the_integral_of_its_slope_which_stays_below_one(num_knots):
    profile = Profile(num_knots, reach=3.0).double()
    with torch.no_grad():
        profile.free_slopes.normal_(std=3.0)
    d = torch.linspace(1e-9, 5, 2001, dtype=torch.float64, requires_grad=True)
    mean_slope, slope = profile(d)
    (derivative,) = torch.autograd.grad((mean_slope * d).sum(), d)
    torch.testing.assert_close(derivative, slope)
    assert slope.abs().max() <= profile.bound() < 1
    knots = torch.linspace(0, 3, num_knots, dtype=torch.float64)
    torch.testing.assert_close(profile(knots)[1], profile.free_slopes.tanh())


def test_forces_at_a_collision_are_finite_and_so_are_their_gradients():
    x = torch.zeros(2, 4, 2, requires_grad=True)
    block = ResidualTransform(PairForces(2))
    y, logabsdet = block(x)
    (y.sum() + logabsdet.sum()).backward()
    assert torch.equal(y, torch.zeros_like(y)) and x.grad.isfinite().all()
    slope = block.contraction.profile.free_slopes[0].tanh()
    torch.testing.assert_close(logabsdet, (6 * torch.log1p(slope)).expand(2))


def test_the_mean_of_a_mask_is_that_of_real_tokens():
    x = torch.tensor([[[1.0], [math.nan], [3.0]]])
    wanted = torch.tensor([[[-1.0], [0.0], [1.0]]])
    assert torch.equal(centre(x, torch.tensor([[True, False, True]])), wanted)


# -- maps that move with their tokens


def test_what_moves_with_its_tokens_is_known():
    moving = Compose(TokenLinear(2, 4), L2SelfAttention(4, 2, coefficient=None), TokenLinear(4, 2))
    assert moves_with_tokens(moving) and moves_with_tokens(L2SelfAttention(2, 1))
    x, shift = torch.randn(1, 4, 2), torch.tensor([3.0, -1.0])
    change = moving(x + shift) - moving(x)
    torch.testing.assert_close(change, change[:, :1].expand_as(change), rtol=0, atol=1e-5)
    others = [
        L2SelfAttention(2, 1, radius=2.0),
        L2SelfAttention(2, 1, causal=True),
        L2SelfAttention(2, 1, position_bias="alibi"),
        FeedForward(2, 4),
        Compose(FeedForward(2, 4, coefficient=None), L2SelfAttention(2, 1, coefficient=None)),
    ]
    assert not any(moves_with_tokens(f) for f in others)
    with pytest.raises(ValueError, match="contraction must move with its tokens"):
        MovingResidual(others[0])


def test_attention_refuses_a_mask_in_words():
    with pytest.raises(ValueError, match="context must hold no mask"):
        CentredAttention(2, 1)(torch.randn(1, 3, 2), torch.tensor([[True, True, False]]))


# -- the base distribution and the flow


def test_the_normal_distribution_is_that_of_orthonormal_coordinates():
    base, u = MeanFreeNormal((4, 2)).double(), torch.randn(5, 3, 2, dtype=torch.float64)
    wanted = torch.distributions.Normal(0, 1).log_prob(u).sum((1, 2))
    torch.testing.assert_close(base.log_prob(BASIS.T @ u), wanted)
    samples = BASIS @ base.sample(4000)
    torch.testing.assert_close(samples.flatten(1).T.cov(), torch.eye(6, dtype=torch.float64), rtol=0, atol=0.12)


def test_systems_off_the_mean_free_space_have_no_density():
    flow = ParticleFlow((4, 2), depth=1)
    with pytest.raises(ValueError, match="tokens of each sequence must add up to zero"):
        flow.log_prob(centre(torch.randn(3, 4, 2)) + 1)
    with pytest.raises(ValueError, match=r"systems must have shape \[batch, 4, 2\]"):
        flow.log_prob(centre(torch.randn(3, 5, 2)))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        ParticleFlow((1, 2))


def test_a_system_is_off_the_mean_free_space_whatever_its_batch_mates_are():
    base, off, large = MeanFreeNormal((2, 1)), torch.tensor([[[0.4], [0.6]]]), torch.tensor([[[1e3], [-1e3]]])
    base.log_prob(large + 0.1)  # rounding takes large ones further
    for batch in (off, torch.cat([off, large])):
        with pytest.raises(ValueError, match=r"add up to zero; got a mean that is 0\.5 away from it in sequence 0"):
            base.log_prob(batch)


def test_systems_have_no_padding():
    base, flow, mask = MeanFreeNormal((4, 2)), ParticleFlow((4, 2), depth=1), torch.tensor([[True, True, True, False]])
    for call in (
        lambda: base.sample(2, mask),
        lambda: base.log_prob(systems(1), mask),
        lambda: flow.sample(2, mask),
        lambda: flow.log_prob(systems(1).float(), mask),
    ):
        with pytest.raises(ValueError, match=r"context must hold no mask, .* got one of \[1, 4\]"):
            call()
    with pytest.raises(ValueError, match=r"systems must have shape \[batch, 4, 2\]; got \[1, 3, 2\]"):
        base.sample(2, torch.zeros(1, 3, 5))


def test_a_flow_refuses_features_which_it_would_not_read():
    with pytest.raises(ValueError, match=r"a mask, which is boolean.*got torch.float32 of shape \[3, 5\]"):
        ParticleFlow((4, 2), depth=1).log_prob(systems().float(), torch.randn(3, 5))


@pytest.mark.parametrize("options", [{}, {"num_heads": 2, "hidden": 8}], ids=["forces", "everything"])
def test_a_flow_in_half_precision_is_sampled_and_scored(options):
    flow = ParticleFlow((4, 2), depth=4, scale=2.0, **options).bfloat16()
    with torch.no_grad():
        x, log_prob = flow.sample_and_log_prob(20)
        again = flow.log_prob(x)
    assert x.dtype == torch.bfloat16 and log_prob.dtype == again.dtype == torch.float32
    torch.testing.assert_close(again, log_prob, rtol=0, atol=0.3)


@pytest.mark.parametrize("options", [{}, {"num_heads": 2, "hidden": 8}], ids=["forces", "everything"])
def test_a_flow_integrates_to_one(options):
    # Two particles in one dimension: the mean-free space is a line.
    flow = ParticleFlow((2, 1), depth=2, num_knots=6, **options).double()
    line = torch.linspace(-30, 30, 6001, dtype=torch.float64)
    x = line[:, None, None] * torch.tensor([[1.0], [-1.0]], dtype=torch.float64) / math.sqrt(2)
    with torch.no_grad():
        density = flow.log_prob(x).exp()
    assert torch.trapezoid(density, line).item() == pytest.approx(1, abs=1e-4)


def test_a_flow_of_forces_does_not_feel_order_and_rotation():
    flow, x = ParticleFlow((4, 2), depth=2, scale=2.0).double(), systems()
    Q, _ = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64))
    torch.testing.assert_close(flow.log_prob(x[:, torch.tensor([3, 1, 0, 2])] @ Q), flow.log_prob(x))


def test_samples_of_a_flow_are_mean_free_and_go_back_to_where_they_came_from():
    flow = ParticleFlow((4, 2), depth=2, scale=2.0, num_heads=2, hidden=8)
    with torch.no_grad():
        x, log_prob = flow.sample_and_log_prob(20)
        assert x.mean(1).abs().max() < 1e-4
        torch.testing.assert_close(flow.log_prob(x), log_prob, rtol=1e-3, atol=1e-3)


def test_a_flow_learns_a_ring():
    # Two particles at a distance of about 4, in any direction: impossible for a linear map.
    angle, d = 2 * math.pi * torch.rand(2000), 4 + 0.2 * torch.randn(2000)
    half = 0.5 * d[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    x = torch.stack([half, -half], 1)
    flow = ParticleFlow((2, 2), depth=6, scale=2.0, num_knots=16)
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.05)
    for _ in range(60):
        loss = -flow.log_prob(x[torch.randint(2000, (128,))]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    linear = 1 + math.log(2 * math.pi * x.square().sum((1, 2)).mean().item() / 2)
    assert loss.item() < linear - 0.5


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: PairForces(2, num_knots=1), "num_knots must be at least 2; got num_knots=1"),
        (lambda: CentralForces(2, reach=-1.0), "reach must be a positive number; got reach=-1.0"),
        (lambda: CentredLinear(2, scale=0.0), "scale must be a positive number; got scale=0.0"),
        (lambda: ParticleFlow((4, 2), depth=0), "depth must be a whole number of at least 1; got depth=0"),
        (lambda: ParticleFlow((4, 2), scale=-1.0), "scale must be a positive number; got scale=-1.0"),
        (lambda: Centred(L2SelfAttention(2, 1, norm="2")), "scaled in norm='token'"),
    ],
)
def test_bad_arguments_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_only_contractions_are_centred():
    with pytest.raises(TypeError, match="contraction must be a Contraction; got Linear"):
        Centred(torch.nn.Linear(2, 2))


def test_transforms_compose_with_those_of_nflows():
    chain = CompositeTransform([make() for make in TRANSFORMS.values()]).double()
    x = systems()
    torch.testing.assert_close(chain.inverse(chain(x)[0])[0], x, rtol=0, atol=1e-8)


def test_features_of_tokens_are_no_mask_to_torch_func():
    block, features = MovingResidual(L2SelfAttention(3, 1, context_features=2)), torch.randn(2, 4, 2)
    x = torch.randn(2, 4, 3)
    gradient = torch.func.grad(lambda x: block(x, features)[1].sum())(x)
    leaf = x.clone().requires_grad_()
    block(leaf, features)[1].sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)
