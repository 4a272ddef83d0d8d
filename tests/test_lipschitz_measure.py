"""Measured Lipschitz constants: at an input against the full Jacobian, over all inputs against the proven bound."""

import math
import time

import pytest
import torch
from torch.func import jacrev, vmap

from flowattn.attention import l2_attention
from flowattn.contractions import L2SelfAttention
from flowattn.lipschitz import lambert_w0, measure
from flowattn.lipschitz.measure import local_lipschitz
from flowattn.lipschitz.search import search_lipschitz

NORMS = ["token", "inf", "2"]
every_norm = pytest.mark.parametrize("norm", NORMS)


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("tokens", [4, 300])
def test_torch_s_own_attention_is_measured_although_its_kernels_have_no_such_derivatives(tokens):
    module = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()

    def f(x):
        return module(x, x, x, need_weights=False)[0]

    x = torch.randn(1, tokens, 4)
    found = local_lipschitz(f, x, "2")
    v = torch.randn(20, 1, tokens, 4)
    step = 1e-6 * v / v.flatten(1).norm(dim=1)[:, None, None, None]
    assert all(((f(x + s) - f(x)).norm() / s.norm()).item() <= found.item() * (1 + 1e-6) for s in step)
    if tokens == 4:
        J = torch.autograd.functional.jacobian(f, x).reshape(16, 16)
        assert found.item() == pytest.approx(torch.linalg.matrix_norm(J, 2).item(), rel=1e-6)
        assert search_lipschitz(f, (3, 4), num_restarts=2, num_steps=3).constant > 0


def test_a_map_without_forward_derivatives_is_named():
    class OneWay(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

    with pytest.raises(NotImplementedError, match=r"f must be made of operations .*; got method, of which torch says"):
        search_lipschitz(OneWay.apply, (3, 2))


def attention(W, B):
    """L2 attention with one head, written naively."""

    def f(x):
        y = x @ W
        squares = (y.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)
        return (-squares / W.shape[1] ** 0.5).softmax(-1) @ y @ B

    return f


def attention_bound(W, B, num_tokens):
    stretch = 1 + 4 * lambert_w0(torch.tensor((num_tokens - 1) / math.e))
    return (stretch * torch.linalg.matrix_norm(W, 2) * torch.linalg.matrix_norm(B, 2)).item()


def random_attention(features, out_features=None):
    return attention(torch.randn(features, features), torch.randn(features, out_features or features))


def random_mixture(tokens, features, out_features):
    """A smooth map whose outputs all see all inputs, through numbers that have no pattern."""
    A = torch.randn(tokens * features, tokens * out_features) / (tokens * features) ** 0.5
    return lambda x: torch.tanh(x.flatten(1) @ A).unflatten(1, (tokens, out_features))


MAPS = {
    "linear": lambda: (torch.nn.Linear(3, 3), torch.randn(4, 5, 3)),
    "attention": lambda: (random_attention(3), torch.randn(4, 6, 3)),
    "attention to other features": lambda: (random_attention(4, 2), torch.randn(3, 8, 4)),
    "attention of scalars": lambda: (random_attention(1), torch.randn(3, 20, 1)),
    "attention of a single token": lambda: (random_attention(4), torch.randn(3, 1, 4)),
    "fast attention": lambda: (l2_attention, 2 * torch.randn(3, 8, 4)),
    "mixture": lambda: (random_mixture(6, 4, 3), torch.randn(3, 6, 4)),
    "mixture of wide tokens": lambda: (random_mixture(3, 12, 12), torch.randn(2, 3, 12)),
}
every_map = pytest.mark.parametrize("make", MAPS.values(), ids=MAPS.keys())


def full_jacobian(f, x):
    return vmap(jacrev(lambda one: f(one[None])[0]))(x)  # [B, N, D', N, D]


def brute_force(f, x, norm, num_starts=100):
    J = full_jacobian(f, x).detach()
    if norm == "inf":
        return J.abs().sum((-2, -1)).flatten(1).amax(1)
    if norm == "2":
        return torch.linalg.matrix_norm(J.flatten(3).flatten(1, 2), 2)
    u = torch.randn(*J.shape[:2], num_starts, J.shape[2])
    for _ in range(300):
        u = u / u.norm(dim=-1, keepdim=True)
        w = torch.einsum("bisk,bikjd->bisjd", u, J)
        lengths = w.norm(dim=-1, keepdim=True)
        u = torch.einsum("bisjd,bikjd->bisk", w / lengths.clamp_min(1e-100), J)
    return lengths.sum((-2, -1)).flatten(1).amax(1)


@every_norm
@every_map
def test_local_norm_is_that_of_the_full_jacobian(make, norm):
    f, x = make()
    torch.testing.assert_close(local_lipschitz(f, x, norm), brute_force(f, x, norm), rtol=1e-5, atol=0)


@every_norm
@pytest.mark.parametrize("name", ["linear", "attention", "attention of scalars", "fast attention"])
def test_local_norm_needs_no_full_jacobian(name, norm, monkeypatch):
    monkeypatch.setattr(measure, "_DENSE", 0)
    f, x = MAPS[name]()
    torch.testing.assert_close(local_lipschitz(f, x, norm), brute_force(f, x, norm), rtol=1e-4, atol=0)


@every_norm
@pytest.mark.parametrize("options", [{}, {"coefficient": None, "radius": 1.0}, {"causal": True}])
def test_local_norm_takes_the_closed_form_of_a_contraction(options, norm, monkeypatch):
    f, x = L2SelfAttention(4, 2, **options), torch.randn(3, 7, 4)
    expected = local_lipschitz(lambda x: f(x), x, norm)
    monkeypatch.setattr(measure, "vjp", None)  # autograd is not asked
    torch.testing.assert_close(local_lipschitz(f, x, norm), expected, rtol=1e-5, atol=0)


@every_norm
@every_map
def test_local_norm_is_a_lower_bound_however_little_is_spent(make, norm, monkeypatch):
    f, x = make()
    norms = brute_force(f, x, norm)
    for dense in (0, 2**20):
        monkeypatch.setattr(measure, "_DENSE", dense)
        for max_steps in (1, 2, 5):
            assert (local_lipschitz(f, x, norm, num_starts=1, max_steps=max_steps) <= norms * (1 + 1e-6)).all()


@every_norm
def test_local_norm_of_a_linear_map_is_its_norm(norm):
    A, W = torch.randn(5, 5), torch.randn(3, 4)  # over tokens, and over features
    rows = A.abs().sum(1).amax()
    expected = {
        "token": rows * torch.linalg.matrix_norm(W, 2),
        "inf": rows * W.abs().sum(0).amax(),
        "2": torch.linalg.matrix_norm(A, 2) * torch.linalg.matrix_norm(W, 2),
    }[norm]
    found = local_lipschitz(lambda x: A @ x @ W, torch.randn(2, 5, 3), norm)
    torch.testing.assert_close(found, expected.expand(2), rtol=1e-6, atol=0)


@every_norm
def test_local_norm_does_not_depend_on_the_rest_of_the_batch(norm, monkeypatch):
    f, x = random_attention(4), torch.randn(9, 8, 4)
    alone = torch.cat([local_lipschitz(f, one[None], norm) for one in x])
    torch.testing.assert_close(local_lipschitz(f, x, norm), alone, rtol=1e-5, atol=0)
    monkeypatch.setattr(measure, "_DENSE", (8 * 4) ** 2)  # a Jacobian fits, but not nine: the batch is split
    torch.testing.assert_close(local_lipschitz(f, x, norm), alone, rtol=1e-5, atol=0)


@every_norm
def test_local_norm_of_a_constant_map_is_zero(norm):
    assert (local_lipschitz(lambda x: 0 * x + 1, torch.randn(2, 3, 2), norm) == 0).all()


@every_norm
@pytest.mark.parametrize("scale", [1e-100, 1e100])
def test_local_norm_scales_with_the_map(scale, norm):
    f, x = random_attention(3), torch.randn(2, 5, 3)
    found = local_lipschitz(lambda x: scale * f(x), x, norm)
    torch.testing.assert_close(found / scale, local_lipschitz(f, x, norm), rtol=1e-6, atol=0)


def test_local_norm_leaves_no_trace():
    f, x = torch.nn.Linear(3, 3), torch.randn(2, 5, 3, requires_grad=True)
    state = torch.get_rng_state()
    first, second = local_lipschitz(f, x), local_lipschitz(f, x)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert not first.requires_grad and x.grad is None and f.weight.grad is None


def test_local_norm_runs_under_inference_mode():
    x = torch.randn(2, 5, 3)
    with torch.inference_mode():
        found = local_lipschitz(l2_attention, x)
    torch.testing.assert_close(found, local_lipschitz(l2_attention, x))


def test_local_norm_refuses_what_it_cannot_measure(without_shape_checks):
    x = torch.randn(2, 3, 2)
    with pytest.raises(ValueError, match="norm must be one of 'token', 'inf', '2'; got norm='1'"):
        local_lipschitz(torch.sin, x, "1")
    with pytest.raises(ValueError, match=r"x must have shape .*; got \[3, 2\]"):
        local_lipschitz(torch.sin, x[0])
    with pytest.raises(ValueError, match=r"x must be finite; got nan at index \[0, 0, 0\]"):
        local_lipschitz(torch.sin, x * math.nan)
    with pytest.raises(ValueError, match=r"f\(x\) must be finite; got inf"):
        local_lipschitz(lambda x: x / 0, x.abs())
    with pytest.raises(ValueError, match="the derivative of f must be finite; got inf"):
        local_lipschitz(torch.sqrt, x * 0)
    with pytest.raises(ValueError, match=r"f must map \[2, 3, 2\] to \[2, tokens, features\]; got \[2, 3\]"):
        local_lipschitz(lambda x: x.sum(-1), x)
    with pytest.raises(ValueError, match="num_starts must be a whole number of at least 1; got num_starts=0"):
        local_lipschitz(torch.sin, x, num_starts=0)
    with pytest.raises(ValueError, match="tolerance must be at least 0 and below 1; got tolerance=nan"):
        local_lipschitz(torch.sin, x, tolerance=math.nan)


@pytest.mark.slow
@every_norm
def test_local_norm_is_faster_than_the_full_jacobian(norm):
    f, x = random_attention(8), torch.randn(2, 64, 8)

    def seconds(run):
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return min(times)

    assert seconds(lambda: local_lipschitz(f, x, norm)) < seconds(lambda: full_jacobian(f, x))


def check_search_of_attention(features, scale):
    """With B = W^T the map stretches most along the direction in which it reads most: the worst case."""
    W = scale * torch.randn(features, features)
    bound = attention_bound(W, W.T, 64)
    found = search_lipschitz(attention(W, W.T), (64, features))
    assert bound / 1.17 < found.constant < bound


@pytest.mark.parametrize(("features", "scale"), [(1, 30.0), (2, 0.1), (4, 1.0), (8, 10.0)])
def test_search_comes_close_to_the_bound_of_attention(features, scale):
    check_search_of_attention(features, scale)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("features", [1, 2, 4, 8])
def test_search_comes_close_to_the_bound_of_attention_at_every_scale(features, scale):
    check_search_of_attention(features, scale)


def best_clusters(W, B, num_tokens, num_clusters=4, num_steps=500):
    """The largest norm of the row of a token at the origin, by its closed form, the others being in clusters."""
    s = W.shape[1] ** 0.5
    c, shares, u = torch.randn(48, num_clusters, len(W)) * 2, torch.randn(48, num_clusters), torch.randn(48, len(W))
    parameters = [t.requires_grad_() for t in (c, shares, u)]
    optimiser = torch.optim.Adam(parameters, lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, num_steps)
    for _ in range(num_steps):
        weights = (num_tokens - 1) * shares.softmax(-1) * torch.exp(-c.square().sum(-1) / s)
        P = (weights / (1 + weights.sum(-1, keepdim=True))).unsqueeze(-1)
        q = (u / u.norm(dim=-1, keepdim=True) @ B.T).unsqueeze(1)
        m = (P * c).sum(1, keepdim=True)
        read = ((c - m) * q).sum(-1, keepdim=True)
        others = P * (q - (2 / s) * read * c)
        own = (1 - P.sum(1, keepdim=True)) * q + (2 / s) * (
            (P * read * (c - m)).sum(1, keepdim=True) + (1 - P.sum(1, keepdim=True)) * (m * q).sum(-1, keepdim=True) * m
        )
        value = (torch.cat([others, own], 1) @ W.T).norm(dim=-1).sum(-1)
        optimiser.zero_grad()
        (-value.log().sum()).backward()
        optimiser.step()
        schedule.step()
    return value.max().item()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("features", [2, 4, 8])
def test_search_finds_the_worst_clusters_of_any_weights(features, seed):
    torch.manual_seed(seed)
    W, B = torch.randn(2, features, features) / features**0.5
    found = search_lipschitz(attention(W, B), (64, features)).constant
    assert found < attention_bound(W, B, 64)
    assert found > 0.97 * best_clusters(W, B, 64)


def test_search_finds_the_token_that_sees_the_others_under_a_causal_mask():
    def constant(causal):
        return search_lipschitz(lambda x: l2_attention(x, causal=causal), (24, 1), num_steps=60).constant

    assert constant(True) == pytest.approx(constant(False), rel=1e-2)


@every_norm
def test_search_finds_the_constant_of_a_known_map(norm):
    A = torch.randn(4, 4)
    found = search_lipschitz(lambda x: A @ torch.sin(x), (4, 2), norm, num_steps=20)
    expected = torch.linalg.matrix_norm(A, 2) if norm == "2" else A.abs().sum(1).amax()
    assert found.constant == pytest.approx(expected.item(), rel=1e-4)
    assert found.constant == pytest.approx(local_lipschitz(lambda x: A @ torch.sin(x), found.x[None], norm).item())


def test_search_climbs_and_is_deterministic():
    f = random_attention(2)

    def search(seed):
        return search_lipschitz(f, (12, 2), num_steps=30, generator=torch.Generator().manual_seed(seed))

    first, again, other = search(1), search(1), search(2)
    assert first.history == again.history and torch.equal(first.x, again.x)
    assert first.history != other.history
    assert first.history == sorted(first.history) and first.history[-1] > first.history[0]
    assert first.constant >= first.history[-1] * (1 - 1e-12) and len(first.history) == 30


def test_search_of_long_inputs_ends_with_the_local_norm():
    f = random_attention(2)
    found = search_lipschitz(f, (200, 2), num_restarts=4, num_steps=10, scales=(1.0, 3.0))
    assert found.constant == pytest.approx(local_lipschitz(f, found.x[None]).item(), rel=1e-4)


def test_search_starts_where_it_is_told():
    def needle(x):
        return torch.tanh(1e4 * (x - 7))

    at = torch.full((2, 3, 2), 7.0)
    assert search_lipschitz(needle, (3, 2), num_steps=5).constant < 1e3
    for start in (at, at[0]):
        found = search_lipschitz(needle, (3, 2), num_steps=5, start=start)
        assert found.constant == pytest.approx(1e4)
        torch.testing.assert_close(found.x, at[0])


def test_search_survives_inputs_without_a_derivative():
    def edged(x):  # not a number beyond 2, no derivative of the derivative at 0, both on the way up
        return torch.where(x.abs() < 2, 0 * x, math.nan) + x.abs() ** 1.5

    found = search_lipschitz(edged, (3, 2), start=torch.zeros(3, 2))
    assert 1.5 < found.constant <= 1.5 * 2**0.5


def test_search_reports_its_progress(capsys):
    search_lipschitz(torch.sin, (3, 2), num_steps=20, progress=True)
    assert capsys.readouterr().err.count("\n") == 10


def test_search_refuses_what_it_cannot_search(without_shape_checks):
    with pytest.raises(ValueError, match="norm must be one of 'token', 'inf', '2'; got norm='1'"):
        search_lipschitz(torch.sin, (3, 2), "1")
    with pytest.raises(ValueError, match="tokens must be a whole number of at least 1; got tokens=0"):
        search_lipschitz(torch.sin, (0, 2))
    with pytest.raises(ValueError, match=r"scales must be positive .*; got scales=\(0.0, 1.0\)"):
        search_lipschitz(torch.sin, (3, 2), scales=(0.0, 1.0))
    with pytest.raises(ValueError, match=r"start must have shape \[..., 3, 2\]; got \[2, 3\]"):
        search_lipschitz(torch.sin, (3, 2), start=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="f must have finite derivatives somewhere; got none at 200 inputs"):
        search_lipschitz(lambda x: math.nan * x, (3, 2))


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4)])
def test_a_shape_that_is_not_of_tokens_and_features_is_refused(shape, without_shape_checks):
    with pytest.raises(ValueError, match=r"shape must be \(tokens, features\); got shape="):
        search_lipschitz(torch.sin, shape)
