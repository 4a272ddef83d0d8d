"""The bounds of dot-product attention hold, at adversarial inputs too, and say what they are said to say."""

import itertools
import math

import pytest
import torch

from flowattn.lipschitz import (
    DotProductHeads,
    adversarial_tokens,
    attention_matrix_bound,
    ball_bound,
    local_bound,
    local_lipschitz,
    logit_gap,
    published_ball_bound,
    published_mean_field_bound,
    search_lipschitz,
    softmax_bound,
    split_token,
    transport_lipschitz,
    wasserstein2,
)

causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["unmasked", "causal"])


def draw_heads(num_heads=2, width=2, features=3, *, causal=False, bias=0.5):
    shapes = [(num_heads, width, features)] * 3 + [(num_heads, features, width), (num_heads, width)]
    q, k, v, out, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return DotProductHeads(q, k, v, out, bias * b, causal)


def one_dimension(A, *, causal=False):
    one = torch.ones(1, 1, dtype=torch.float64)
    return DotProductHeads.single(A * one, one, causal=causal)


def check_at(heads, x):
    """Every bound is at least what is measured at x. The smallest ratio of the sharper ones is returned."""
    n, radii = x.shape[1], torch.linalg.vector_norm(x, dim=-1).amax(-1)
    ratios = []
    for norm in ("2", "token"):
        local = local_lipschitz(heads, x, norm)
        bounds = [local_bound(heads, x, norm)]
        bounds += [torch.stack([ball_bound(heads, n, radius.item(), norm) for radius in radii])]
        ratios.append((bounds[0] / local).min().item())
        if norm == "2":
            bounds += [attention_matrix_bound(heads, x)]
            bounds += [torch.stack([published_ball_bound(heads, n, radius.item()) for radius in radii])]
            bounds += [torch.stack([published_mean_field_bound(heads, radius.item()) for radius in radii])]
        for bound in bounds:
            assert (bound >= local).all()
    return min(ratios)


@causal_or_not
def test_every_bound_holds_at_random_tokens_of_all_sizes(causal):
    for num_heads, width, features, n in [(1, 2, 1, 2), (1, 1, 3, 1), (2, 2, 3, 7), (3, 1, 2, 4)]:
        heads = draw_heads(num_heads, width, features, causal=causal)
        scale = 10 ** torch.linspace(-2, 1, 6, dtype=torch.float64)
        assert check_at(heads, scale[:, None, None] * torch.randn(6, n, features, dtype=torch.float64)) < 10


def in_ball(f, radius):
    """The map behind a projection to the ball, whose local constant is that of f at points inside."""

    def g(x):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return f(x * (radius / length.clamp_min(radius)))

    return g


def searched(causal, searches, steps):
    """The best inputs of many searches, each of its own weights and size, in a ball: they must meet every bound."""
    largest = 0.0
    for index in range(searches):
        torch.manual_seed(index)
        features, n, radius = 1 + index % 3, (2, 5, 12)[index % 3], (0.5, 1.0, 2.0, 3.0)[index % 4]
        if index % 2:
            heads = draw_heads(1 + index % 2, 2, features, causal=causal, bias=index % 5 / 4)
        else:
            A = torch.randn(features, features, dtype=torch.float64)
            heads = DotProductHeads.single(A, torch.eye(features, dtype=torch.float64), causal=causal)
        starts = radius * torch.nn.functional.normalize(torch.randn(3, n, features, dtype=torch.float64), dim=-1)
        starts[0] = adversarial_tokens(heads.A[0], n, radius)
        norm = ("2", "token")[index // 2 % 2]
        options = {"num_restarts": 6, "num_steps": steps, "scales": [radius, radius / 2], "start": starts}
        x = search_lipschitz(in_ball(heads, radius), (n, features), norm, **options).x
        x = x * (radius / torch.linalg.vector_norm(x, dim=-1, keepdim=True)).clamp_max(1)
        check_at(heads, x[None])
        value = local_lipschitz(heads, x[None], norm).item()
        largest = max(largest, value / ball_bound(heads, n, radius, norm).item())
    return largest


@causal_or_not
def test_every_bound_survives_a_few_adversarial_searches(causal):
    assert searched(causal, searches=6, steps=10) > 0.2


@pytest.mark.slow
@causal_or_not
def test_every_bound_survives_two_hundred_adversarial_searches(causal):
    assert searched(causal, searches=200, steps=30) > 0.3


def test_the_published_mean_field_bound_fails_under_a_causal_mask_and_ours_does_not():
    f = one_dimension(0.0, causal=True)
    found = local_lipschitz(f, torch.zeros(1, 8, 1, dtype=torch.float64), "2").item()
    assert found == pytest.approx(1.3798, abs=1e-4)
    assert published_mean_field_bound(one_dimension(0.0), 1.0) < 1.01 < found < published_mean_field_bound(f, 1.0)


def test_our_ball_bound_is_below_both_published_ones():
    for radius, n in itertools.product((0.1, 1.0, 2.0), (2, 50, 10_000)):
        f = draw_heads(bias=0.0)
        published = min(published_ball_bound(f, n, radius), published_mean_field_bound(f, radius))
        assert ball_bound(f, n, radius) <= published


def test_published_bounds_are_the_formulas_of_the_paper():
    f = DotProductHeads.single(2 * torch.eye(2).double(), 3 * torch.eye(2).double())
    assert published_ball_bound(f, 7, 1.5).item() == pytest.approx(
        math.sqrt(3) * 3 * math.sqrt(4 * 1.5**4 * 29 + 7), rel=0.03
    )
    assert published_mean_field_bound(f, 0.5).item() == pytest.approx(3 * (1 + 1.5) * math.exp(1), rel=0.05)


def test_softmax_bound_holds_and_is_attained():
    p = torch.randn(2000, 6, dtype=torch.float64).mul(4).softmax(-1)
    true = torch.linalg.matrix_norm(torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2), ord=2)
    assert (softmax_bound(p) >= true * (1 - 1e-12)).all()
    assert (softmax_bound(p) / true).min() < 1.001


@causal_or_not
@pytest.mark.parametrize("kind", ["half", "opposite", "free"])
def test_adversarial_tokens_grow_like_the_root_of_their_number(kind, causal):
    A = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    f = DotProductHeads.single(A, torch.eye(2, dtype=torch.float64), causal=causal)
    unit = logit_gap(A, adversarial_tokens(A, 2, 1.0, kind)).item()
    assert unit == pytest.approx({"half": 0.25, "opposite": 2.0, "free": 2.0}[kind])
    radius = math.sqrt(14 / unit)
    few, many = (local_lipschitz(f, adversarial_tokens(A, n, radius, kind)[None], "2").item() for n in (16, 128))
    assert math.log(many / few) / math.log(8) == pytest.approx(0.5, abs=0.05)


def test_a_matrix_without_real_eigenvalues_has_adversarial_tokens_of_the_free_kind_only():
    A = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert logit_gap(A, adversarial_tokens(A, 5, 2.0)).item() == pytest.approx(4.0)
    with pytest.raises(ValueError, match="real positive eigenvalue"):
        adversarial_tokens(A, 5, 2.0, "half")


def test_transport_constants_are_those_of_sequences_with_copies():
    heads = draw_heads()
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    both = transport_lipschitz(heads, x)
    assert torch.allclose(both.moving, local_lipschitz(heads, x, "2"))
    copied = local_lipschitz(heads, x.repeat_interleave(2, 1), "2")
    assert torch.allclose(torch.maximum(*both), copied)
    weights = torch.tensor([1, 2, 2], dtype=torch.float64).expand(4, -1)
    weighted = torch.maximum(*transport_lipschitz(heads, x, weights))
    copies = x[:, [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]  # every token is there twice, so that each of them can be split
    assert torch.allclose(weighted, local_lipschitz(heads, copies, "2"))
    assert (transport_lipschitz(heads, x[:, :1]).splitting < 1e-12).all()


def test_weights_are_counts():
    heads = draw_heads()
    x = torch.randn(2, 3, 3, dtype=torch.float64)
    output = heads(x, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert torch.allclose(output, heads(x[:, [0, 1, 1, 2, 2, 2]])[:, [0, 1, 3]])
    more, shares = split_token(x[0], torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), 1)
    same = heads(x[:1], torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))
    assert torch.allclose(heads(more[None], shares)[0, :3], same[0])


def test_wasserstein_distance_is_the_best_assignment_and_in_one_dimension_the_sorted_one():
    x, y, equal = torch.randn(5, 2), torch.randn(5, 2), torch.full((5,), 0.2)
    cost = torch.cdist(x.double(), y.double()).square()
    best = min(sum(cost[i, j] for i, j in enumerate(order)) for order in itertools.permutations(range(5)))
    assert wasserstein2(x, equal, y, equal) ** 2 == pytest.approx(best.item() / 5)
    x, y, equal = torch.randn(40, 1), torch.randn(40, 1), torch.full((40,), 1 / 40)
    in_order = (x.sort(0).values - y.sort(0).values).square().mean().sqrt()
    assert wasserstein2(x, equal, y, equal) == pytest.approx(in_order.item(), rel=1e-5)


def test_wasserstein_distance_shares_weight_where_it_must():
    zero, ends = torch.zeros(1, 1), torch.tensor([[-3.0], [4.0]])
    assert wasserstein2(zero, torch.ones(1), ends, torch.tensor([0.25, 0.75])) ** 2 == pytest.approx(14.25)
    with pytest.raises(ValueError, match=r"a must be positive and sum to 1; got a sum of 2\.0"):
        wasserstein2(zero, 2 * torch.ones(1), ends, torch.tensor([0.25, 0.75]))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda f: ball_bound(f, 3, -1.0), "radius must be finite and at least 0; got radius=-1.0"),
        (lambda f: ball_bound(f, 3, math.nan), "radius must be finite"),
        (lambda f: ball_bound(f, 0, 1.0), "num_tokens must be a whole number"),
        (lambda f: ball_bound(f, 3, 1.0, "inf"), "norm must be 'token' or '2'"),
        (lambda f: adversarial_tokens(f.A[0], 3, 0.0), "radius must be positive and finite; got radius=0.0"),
        (
            lambda f: transport_lipschitz(f, torch.zeros(1, 2, 3).double(), torch.zeros(1, 2).double()),
            "weights must be",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call(draw_heads())
