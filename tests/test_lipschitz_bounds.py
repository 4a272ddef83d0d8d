"""The proven bounds: their formulas, the constants in them, and that no input exceeds them."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from adversary import worst_stretch

from flowattn.attention import into_ball, into_ball_jacobian, jacobian_blocks
from flowattn.contractions import L2SelfAttention
from flowattn.lipschitz import (
    attention_stretch,
    ball_stretch,
    infinity_bound,
    lambert_w0,
    published_infinity_bound,
    published_two_norm_bound,
    token_bound,
    visible_weight,
)
from flowattn.lipschitz.bounds import counted_stretch


def close(one, other, tolerance=1e-12):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# -- how much the visible tokens weigh


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_visible_weight_is_its_sum(causal, masked):
    batch, heads, tokens = 2, 3, 5
    bias = torch.randn(heads, tokens, tokens, dtype=torch.float64)
    mask = torch.rand(batch, tokens) < 0.6 if masked else None
    expected = torch.zeros(batch, heads, tokens, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(tokens):
                for j in range(tokens):
                    seen = j != i and not (causal and j > i) and (mask is None or bool(mask[b, j]))
                    expected[b, h, i] += seen * math.exp(bias[h, i, j] - bias[h, i, i])
    close(visible_weight(bias, causal=causal, mask=mask).exp(), expected if masked else expected[0])


def test_stretch_of_unbiased_tokens_counts_them():
    for others in (0, 1, 7, 63, 10**6):
        exact = 1 + 4 * lambert_w0(torch.tensor(others / math.e, dtype=torch.float64)).item()
        assert counted_stretch(others) == pytest.approx(exact, rel=1e-14)
        close(attention_stretch(torch.tensor(float(others), dtype=torch.float64).log()).item(), exact)


@pytest.mark.parametrize("num_keys", [1, 2, 5])
def test_lambert_function_is_the_largest_second_moment(num_keys):
    """The mean of d_j under P_j ~ w_j exp(-d_j), over all distances d: ascent reaches W_0(S/e) and never exceeds it."""
    log_w = 2 * torch.randn(64, num_keys, dtype=torch.float64)
    most = lambert_w0(log_w.exp().sum(-1) / math.e)
    d = (4 * torch.rand_like(log_w)).requires_grad_()
    optimizer = torch.optim.Adam([d], lr=0.05)
    for _ in range(600):
        weight = torch.exp(log_w - d)
        moment = (weight * d).sum(-1) / (1 + weight.sum(-1))
        assert (moment <= most * (1 + 1e-12)).all()
        optimizer.zero_grad()
        (-moment.sum()).backward()
        optimizer.step()
    close(moment, most, 1e-4)
    close(d.detach(), (1 + most).unsqueeze(-1).expand_as(d), 0.1)


# -- how far attention stretches: the query, and weighted heaps of keys, in one head


def row_stretch(y, log_weight, e, radius=None):
    """The sum over tokens j of |e^T dm_0/dy_j|: what row 0 moves along the unit vector e, all tokens moving by 1."""
    z = y if radius is None else into_ball(y, radius)
    J = jacobian_blocks(z, log_weight.unsqueeze(-2))[1][..., 0, :, :, :]
    if radius is not None:
        J = J @ into_ball_jacobian(y, radius)
    e = e / e.norm(dim=-1, keepdim=True)
    return (e[..., None, None, :] @ J).squeeze(-2).norm(dim=-1).sum(-1)


def ascend(y, log_weight, e, radius=None, *, steps, weights_move):
    """The largest stretch that gradient ascent finds from each start."""
    moving = [t.requires_grad_() for t in ([y, log_weight, e] if weights_move else [y, e])]
    optimizer = torch.optim.Adam(moving, lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    best = torch.zeros(y.shape[:-2], dtype=y.dtype)
    for _ in range(steps):
        value = row_stretch(y, log_weight, e, radius)
        best = torch.maximum(best, value.detach())
        optimizer.zero_grad()
        (-value.log().sum()).backward()
        optimizer.step()
        schedule.step()
    return best


@pytest.mark.parametrize("width", [1, 2, 3])
def test_weighted_heaps_never_exceed_the_stretch_and_come_near(width):
    """Every heap stands for a number of tokens or for a bias; two on either side of the query are the worst."""
    total = torch.tensor([0.3, 1.0, 7.0, 63.0, 1e3, 1e6], dtype=torch.float64)
    keys, num_starts = 4, 12
    share = torch.rand(num_starts, len(total), keys, dtype=torch.float64).log().log_softmax(-1)
    share[0] = -math.log(keys)
    log_weight = torch.cat([torch.zeros_like(share[..., :1]), share + total.log().unsqueeze(-1)], -1)
    y = torch.randn(num_starts, len(total), keys + 1, width, dtype=torch.float64)
    y = 2 * y / y.norm(dim=-1, keepdim=True)
    y[..., 0, :] = 0
    if width == 1:
        y[0, :, 1:, 0] = torch.tensor([2.0, -2.0, 2.0, -2.0], dtype=torch.float64)
    e = torch.randn(num_starts, len(total), width, dtype=torch.float64)
    best = ascend(y, log_weight, e, steps=150, weights_move=False).amax(0)
    most = attention_stretch(total.log())
    assert (best <= most * (1 + 1e-12)).all()
    assert (best >= most / 1.3).all()


@pytest.mark.parametrize("width", [1, 2, 3])
def test_weighted_heaps_in_a_ball_never_exceed_its_stretch_and_come_near(width):
    """Here the weights are free as well: the bound holds whatever the number of tokens and the bias are."""
    ratio = torch.tensor([1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0], dtype=torch.float64)
    radius = (ratio * math.sqrt(width)).sqrt()[:, None, None]
    keys, num_starts = 4, 12
    y = torch.randn(num_starts, len(ratio), keys + 1, width, dtype=torch.float64) * radius
    log_weight = torch.randn(num_starts, len(ratio), keys + 1, dtype=torch.float64)
    # Equal weights in spite of the distances: for large balls they would start at zero otherwise.
    z = into_ball(y, radius)
    log_weight = log_weight + (z - z[..., :1, :]).square().sum(-1) / math.sqrt(width)
    e = torch.randn(num_starts, len(ratio), width, dtype=torch.float64)
    best = ascend(y, log_weight, e, radius, steps=200, weights_move=True).amax(0)
    most = ball_stretch(ratio)
    assert (best <= most * (1 + 1e-12)).all()
    assert (best >= most / 1.8).all()


# -- the constant of the ball


def ball_formula(ratio):
    return ball_stretch(torch.from_numpy(ratio)).numpy()


def ball_lines(num_t=3000, num_a=800):
    r"""Numbers A and B with kappa(rho) <= max(A + 2 rho B), from the supremum in the docstring of `ball_stretch`.

    The supremum over a and u is taken over cells, and in each cell every part of it at the end where it is largest:
    g^2 grows with a, sqrt(1 - a^2) falls; sqrt(1 - u) falls with u. So nothing between the points is missed.
    """
    t = np.concatenate([[0], np.geomspace(1e-4, 0.05, 400), np.linspace(0.05, 1, num_t)[1:]])
    u, a = t**2, np.sin(np.linspace(0, np.pi / 2, num_a + 1))
    k = (1 - u[:-1]) ** 2
    B = np.zeros(len(k))
    for low, high in itertools.pairwise(a):
        # (1-t^2)^2 (p-t)^2 + a^2 - p^2 is largest at a negative p, here -p: where its derivative is zero, or at a.
        p = np.minimum(np.divide(k * t[1:], 1 - k, out=np.full_like(k, np.inf), where=k < 1), high)
        g2 = (1 - u[:-1]) * (k * (t[1:] + p) ** 2 + high**2 - p**2)
        hull = concave_envelope(u, np.maximum(np.append(g2, 0), np.append(0, g2)))
        B = np.maximum(B, np.sqrt(u[1:] * np.maximum(hull[:-1], hull[1:])) + u[1:] * np.sqrt(1 - low**2))
    return np.sqrt(1 - u[:-1]), B


def concave_envelope(x, y):
    """The values at x of the smallest concave function that is nowhere below y."""
    corners = []
    for point in zip(x, y, strict=True):
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (point[0] - x0) > (point[1] - y0) * (x1 - x0):
                break
            corners.pop()
        corners.append(point)
    return np.interp(x, *zip(*corners, strict=True))


def test_concave_envelope_is_concave_and_touches():
    x = np.linspace(0, 1, 50)
    y = np.sin(9 * x)
    hull = concave_envelope(x, y)
    assert (hull >= y - 1e-15).all() and np.isclose(hull, y).sum() >= 5
    assert (np.diff(hull, 2) <= 1e-12).all()


def test_ball_stretch_is_above_the_supremum_for_every_radius():
    A, B = ball_lines()
    ratio = np.geomspace(1e-3, 1e3, 14001)
    most = np.array([(A + 2 * r * B).max() for r in ratio])
    # Both sides increase, so this covers what lies between the points of the grid.
    assert (most[1:] <= ball_formula(ratio[:-1])).all()
    # Not more than needed: the formula is within 6 percent.
    assert (ball_formula(ratio) <= 1.06 * most).all()
    # Beyond the grid: kappa grows no faster than 2 max B, the formula at least at the slope that it has here.
    slope = np.diff(ball_formula(np.array([1e3, 1e3 + 1])))[0]
    assert 2 * B.max() < slope
    # Before it: g^2 <= (1 + t)^2 is concave in t^2, so with w = sqrt(u) kappa <= sqrt(1 - w^2) + 2 rho (w + 2 w^2)
    # <= 1 + 2 rho w - (1/2 - 4 rho) w^2 <= 1 + 2 rho^2 / (1 - 8 rho). Over rho^2, the excess over 1 of this falls as
    # rho does, that of sqrt(1 + (2.4 rho)^2) grows, and already at rho = 1e-3:
    assert (math.sqrt(1 + 2.4e-3**2) - 1) / 1e-3**2 > 2 / (1 - 8e-3)


def test_ball_stretch_of_a_small_ball_is_one_and_it_increases():
    ratio = torch.logspace(-6, 6, 1000, dtype=torch.float64)
    stretch = ball_stretch(ratio)
    assert stretch[0].item() == pytest.approx(1, abs=1e-10)
    assert (stretch.diff() >= 0).all()


# -- the bounds of whole maps


def factors(heads=3, features=4, width=2):
    W = torch.randn(heads, features, width, dtype=torch.float64)
    return W, torch.randn(heads, width, features, dtype=torch.float64)


@pytest.mark.parametrize("features_out", [4, 5])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("has_ball", [False, True])
def test_token_bound_is_its_formula(heads, features_out, has_ball):
    W = torch.randn(heads, 4, 2, dtype=torch.float64)
    B = torch.randn(heads, 2, features_out, dtype=torch.float64)
    stretch = 1 + 5 * torch.rand(7, heads, 6, dtype=torch.float64)
    ball = 1 + 5 * torch.rand(heads, 1, dtype=torch.float64) if has_ball else None
    norm_W, norm_B = torch.linalg.matrix_norm(W, 2), torch.linalg.matrix_norm(B, 2)
    alpha = (W.norm(dim=(1, 2)) / B.norm(dim=(1, 2)))[:, None, None]
    mixed = torch.linalg.matrix_norm(alpha * B @ B.mT + W.mT @ W / alpha, 2) / 2
    product = (norm_W * norm_B)[:, None]
    least = torch.minimum(stretch, ball) if has_ball else stretch
    single = product + (stretch - 1) * torch.minimum(product, mixed[:, None])
    by_head = (single if heads == 1 and not has_ball else least * product).sum(1)
    jointly = torch.linalg.matrix_norm(B.flatten(0, 1), 2) * (least * norm_W[:, None]).norm(dim=1)
    exact = by_head if heads == 1 else torch.minimum(by_head, jointly)
    ratio = token_bound(W, B, stretch, ball=ball) / exact
    assert (ratio >= 1).all() and (ratio <= 1.06).all()


CASES = [(1, False), (1, True), (3, False), (3, True)]


@pytest.mark.parametrize("width", [2, 200])  # with plain and with shifted iterations
@pytest.mark.parametrize(("heads", "has_ball"), CASES)
def test_recorded_bounds_and_their_gradients_are_those_of_single_operations(heads, has_ball, width):
    W, B = (t.requires_grad_() for t in factors(heads, 4, width))
    stretch = (1 + 5 * torch.rand(2, heads, 3, dtype=torch.float64)).requires_grad_()
    ball = 1 + 5 * torch.rand(heads, 1, dtype=torch.float64) if has_ball else None
    given = (W, B, stretch)
    recorded = token_bound(*given, ball=ball)
    with torch.no_grad():
        torch.testing.assert_close(token_bound(*given, ball=ball), recorded, rtol=0, atol=0)
    weights = torch.randn_like(recorded)
    got = torch.autograd.grad((recorded * weights).sum(), given, retain_graph=True)
    want = torch.func.grad(lambda *given: (token_bound(*given, ball=ball) * weights).sum(), (0, 1, 2))(*given)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    twice = torch.autograd.grad((recorded * weights).sum(), given, create_graph=True)
    torch.testing.assert_close(twice, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("heads", "has_ball"), CASES)
def test_token_bound_passes_gradcheck_twice(heads, has_ball):
    given = [t.requires_grad_() for t in factors(heads)]
    stretch = 1 + torch.rand(heads, 3, dtype=torch.float64)
    ball = 1 + torch.rand(heads, 1, dtype=torch.float64) if has_ball else None
    bound = functools.partial(token_bound, stretch=stretch, ball=ball)
    assert torch.autograd.gradcheck(bound, given, check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(bound, given)
    for k in range(2):  # one of them does not learn
        frozen = [t.detach() if i == k else t for i, t in enumerate(given)]
        assert torch.autograd.gradgradcheck(bound, frozen)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_recorded_bounds_are_not_rounded_by_autocast(heads, dtype):
    given = [t.float().requires_grad_() for t in factors(heads)]
    expected = token_bound(*given, torch.full((1, 1), 3.0))
    with torch.autocast("cpu", dtype):
        assert torch.equal(token_bound(*given, torch.full((1, 1), 3.0)), expected)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("which", [0, 1])
def test_weights_of_zero_have_a_bound_and_gradient_of_zero(heads, which):
    given = [t.requires_grad_() for t in factors(heads)]
    given[which].data.zero_()
    bound = token_bound(*given, torch.full((1, 1), 3.0, dtype=torch.float64))
    assert bound.item() == 0
    gradients = torch.autograd.grad(bound.sum(), given)
    assert all(g.isfinite().all() for g in gradients) and (gradients[1 - which] == 0).all()


def test_token_bound_takes_the_better_of_its_two_forms():
    stretch = torch.ones(2, 1, dtype=torch.float64)
    W = torch.eye(2, dtype=torch.float64).expand(2, 2, 2)
    same, apart = torch.zeros(2, 2, 2, 2, dtype=torch.float64)
    same[:, 0, 0] = 1  # both heads write to one feature: the sum of heads is exact, and so is the other
    apart[0, 0, 0] = apart[1, 1, 1] = 1  # each head writes to its own: jointly only sqrt(2)
    assert token_bound(W, same, stretch).item() == pytest.approx(2, rel=0.06)
    assert token_bound(W, apart, stretch).item() == pytest.approx(math.sqrt(2), rel=0.06)
    unequal = apart * torch.tensor([1.0, 1e-3], dtype=torch.float64)[:, None, None]
    assert token_bound(W, unequal, stretch).item() == pytest.approx(1.001, rel=0.06)


def test_infinity_bound_is_its_formula():
    W, B = factors()
    s = math.sqrt(2)
    stretch = 1 + 5 * torch.rand(3, 6, dtype=torch.float64)
    norm_W = torch.linalg.matrix_norm(W.mT, math.inf)
    for ball in (None, 1 + torch.rand(3, 1, dtype=torch.float64)):
        kappa = 1 + s * (stretch - 1) if ball is None else s * torch.minimum(stretch, ball)
        rows = [[(B[:, :, o].abs().sum(-1) * kappa[:, n] * norm_W).sum() for o in range(4)] for n in range(6)]
        close(infinity_bound(W, B, stretch, ball=ball), torch.tensor(rows).max(-1).values)


def paper_weights(heads=2, features=4, width=3, scale=1.0):
    w_q, w_v = scale * torch.randn(2, heads, features, width, dtype=torch.float64)
    return w_q, w_v, scale * torch.randn(heads, width, features, dtype=torch.float64)


def test_published_bounds_are_their_formulas():
    w_q, w_v, w_o = paper_weights()
    s, tokens = math.sqrt(3), 10
    w0 = lambert_w0(torch.tensor((tokens - 1) / math.e, dtype=torch.float64))

    def inf(W):
        return torch.linalg.matrix_norm(W, math.inf)

    out = torch.cat(list(w_o))
    expected = (4 * w0 + 1 / s) * inf(out.mT) * (inf(w_q) * inf(w_q.mT)).max() * inf(w_v.mT).max()
    close(published_infinity_bound(w_q, w_v, w_o, tokens), expected)

    def two(W):
        return torch.linalg.matrix_norm(W, 2)

    expected = math.sqrt(tokens) / s * (4 * w0 + 1) * (two(w_q) ** 4 * two(w_v) ** 2).sum().sqrt() * two(out)
    ratio = (published_two_norm_bound(w_q, w_v, w_o, tokens) / expected).item()
    assert 1 <= ratio <= 1.05


@pytest.mark.parametrize("bound", [published_infinity_bound, published_two_norm_bound])
def test_published_bounds_grow_as_the_map_does(bound):
    """The map is quadratic in w_q and linear in w_v and w_o, once its inputs shrink as w_q grows."""
    w_q, w_v, w_o = paper_weights()
    one = bound(w_q, w_v, w_o, 10)
    close(bound(3 * w_q, w_v, w_o, 10), 9 * one, 1e-9)
    close(bound(w_q, 3 * w_v, w_o, 10), 3 * one, 1e-9)
    close(bound(w_q, w_v, 3 * w_o, 10), 3 * one, 1e-9)


@pytest.mark.parametrize(("norm", "bound"), [("inf", published_infinity_bound), ("2", published_two_norm_bound)])
def test_published_bounds_are_not_exceeded(norm, bound):
    for tokens in (1, 2, 5, 20):
        weights = paper_weights()
        f = L2SelfAttention.from_paper_weights(*weights)
        found = worst_stretch(f, tokens, norm, steps=25)[0].max()
        assert found <= bound(*weights, tokens)


def test_two_norm_bound_with_the_power_of_the_paper_is_exceeded():
    """|W^Q| to the power 2 in place of 4: wrong by any factor once W^Q is large, so the correction matters."""
    w_q, w_v, w_o = paper_weights(heads=1)
    w_q = 100 * w_q / torch.linalg.matrix_norm(w_q, 2, keepdim=True)
    f = L2SelfAttention.from_paper_weights(w_q, w_v, w_o)
    found = worst_stretch(f, 4, "2", size=0.02)[0].max()
    proven = published_two_norm_bound(w_q, w_v, w_o, 4)
    printed = proven / torch.linalg.matrix_norm(w_q, 2).max()
    assert printed < found <= proven


def test_token_bound_is_far_below_the_published_ones():
    """N = 64, D = 64, H = 8: an order of magnitude each, and in its own norm all of them are compared with."""
    heads, features, width, tokens = 8, 64, 8, 64
    w_q, w_v = torch.randn(2, heads, features, width, dtype=torch.float64) / math.sqrt(features)
    w_o = torch.randn(heads, width, features, dtype=torch.float64) / math.sqrt(heads * width)
    token = L2SelfAttention.from_paper_weights(w_q, w_v, w_o).lipschitz_bound(tokens).item()
    two = published_two_norm_bound(w_q, w_v, w_o, tokens).item()
    infinity = published_infinity_bound(w_q, w_v, w_o, tokens).item()
    assert 8 * token < two and 8 * two < infinity


@pytest.mark.parametrize("norm", ["token", "inf", "2"])
def test_bound_with_alibi_stops_growing_with_the_number_of_tokens(norm):
    f = L2SelfAttention(4, 2, position_bias="alibi", coefficient=None)
    lengths = (100, 1000, 3000)
    bounds = [f.lipschitz_bound(n, norm).item() / (math.sqrt(n) if norm == "2" else 1) for n in lengths]
    assert bounds[2] <= 1.1 * bounds[1] and bounds[2] <= 1.01 * bounds[1] + 0.1 * bounds[0]


@pytest.mark.parametrize(("size_W", "size_B"), [(1e-24, 1e-24), (1e20, 1e-20), (1e-38, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_a_single_head_of_any_size_has_a_bound(size_W, size_B):
    W, B = size_W * torch.randn(1, 3, 2), size_B * torch.randn(1, 2, 3)
    bound = token_bound(W, B, torch.full((1, 1), 5.0))
    exact = token_bound(W.double(), B.double(), torch.full((1, 1), 5.0, dtype=torch.float64))
    torch.testing.assert_close(bound.double(), exact, rtol=1e-3, atol=1e-30)
