"""Norms of sequences, upper bounds of spectral norms, and the Lambert function."""

import copy
import math
import pickle
import threading

import mpmath
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

from flowattn.contractions import FeedForward, L2SelfAttention
from flowattn.lipschitz import gram, head_norms, lambert_w0, sequence_norm, spectral, spectral_norm_bound, token_norm
from flowattn.lipschitz.memory import Remembered

# -- norms of sequences


def test_norms_of_a_sequence_are_their_definitions():
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    rows = x.square().sum(-1).sqrt()
    torch.testing.assert_close(token_norm(x), rows.max(-1).values)
    torch.testing.assert_close(sequence_norm(x), rows.max(-1).values)
    torch.testing.assert_close(sequence_norm(x, "inf"), x.abs().flatten(1).max(-1).values)
    torch.testing.assert_close(sequence_norm(x, "2"), x.flatten(1).norm(dim=-1))


@pytest.mark.parametrize("norm", ["Token", "fro", 2, None])
def test_a_norm_that_has_no_such_name_is_refused(norm):
    with pytest.raises((ValueError, TypeError), match="norm"):
        sequence_norm(torch.zeros(2, 2), norm)


# -- spectral norms


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [gram.PANELS_FROM - 1, gram.PANELS_FROM, gram.PANELS_FROM + 1])
def test_a_symmetric_product_is_computed_up_to_its_diagonal(size, batch):
    X = torch.randn(batch, size, 50, dtype=torch.float64)
    Q = X @ X.mT
    room = torch.full_like(Q, math.nan)
    torch.testing.assert_close(gram.symmetric_product(X, X.mT), Q, rtol=0, atol=1e-12)
    with torch.no_grad():
        found = gram.symmetric_product(Q, Q, room)
    assert found is room
    torch.testing.assert_close(found, Q @ Q, rtol=1e-13, atol=1e-10)
    if size >= gram.PANELS_FROM:
        assert torch.equal(found[:, :9, -9:], found[:, -9:, :9].mT)


@pytest.fixture(params=["plain", "shifted", "shifted, in panels"])
def kind(request, monkeypatch):
    """Each iteration, whatever the size of the matrix."""
    monkeypatch.setattr(gram, "SHIFTED_FROM", math.inf if request.param == "plain" else 1)
    monkeypatch.setattr(gram, "PANELS_FROM", 1 if request.param == "shifted, in panels" else math.inf)


either_iteration = pytest.mark.usefixtures("kind")


def orthogonal(rows, columns):
    Q = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns), dtype=torch.float64)).Q
    return Q if rows >= columns else Q.mT


def with_spectrum(rows, columns, spectrum):
    rank = min(rows, columns)
    values = torch.diag(spectrum(torch.arange(rank, dtype=torch.float64) / rank))
    return orthogonal(rows, rank) @ values @ orthogonal(rank, columns)


MATRICES = {
    "random": lambda r, c: torch.randn(r, c, dtype=torch.float64),
    "orthogonal": orthogonal,
    "rank one": lambda r, c: torch.randn(r, 1, dtype=torch.float64) @ torch.randn(1, c, dtype=torch.float64),
    "two equal values": lambda r, c: with_spectrum(r, c, lambda k: (k < 2 / min(r, c)).double() + 0.01),
    "clustered at the top": lambda r, c: with_spectrum(r, c, lambda k: 1 - 0.01 * k),
    "decaying slowly": lambda r, c: with_spectrum(r, c, lambda k: 1 / (1 + k)),
    "decaying fast": lambda r, c: with_spectrum(r, c, lambda k: torch.exp(-20 * k)),
    "positive": lambda r, c: torch.rand(r, c, dtype=torch.float64),
    "one entry": lambda r, c: torch.nn.functional.one_hot(torch.tensor(r * c // 2), r * c).view(r, c).double(),
}
each_matrix = pytest.mark.parametrize("make", MATRICES.values(), ids=MATRICES.keys())
SHAPES = [(1, 1), (1, 7), (7, 1), (2, 2), (5, 3), (16, 64), (100, 100), (256, 64)]


def ratio(matrix):
    """The bound over the true norm of the very same numbers."""
    return spectral_norm_bound(matrix).double() / torch.linalg.matrix_norm(matrix.double(), 2)


@either_iteration
@each_matrix
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bound_is_between_the_spectral_norm_and_one_percent_more(make, shape):
    matrix = make(*shape)
    for dtype in (torch.float32, torch.float64):
        assert 1 <= ratio(matrix.to(dtype)).item() <= 1.01


@either_iteration
@pytest.mark.parametrize("make", [MATRICES["random"], orthogonal], ids=["random", "orthogonal"])
@pytest.mark.parametrize("shape", [(1024, 1024)], ids=str)
def test_bound_of_a_large_matrix_is_at_most_one_percent_above(make, shape):
    for dtype in (torch.float32, torch.float64):
        assert 1 <= ratio(make(*shape).to(dtype)).item() <= 1.01


@either_iteration
@pytest.mark.slow
@each_matrix
@pytest.mark.parametrize("shape", [(512, 2048), (1024, 1024), (1000, 1024), (2048, 300)], ids=str)
def test_bound_of_any_large_matrix_is_at_most_one_percent_above(make, shape):
    matrix = make(*shape)
    for dtype in (torch.float32, torch.float64):
        assert 1 <= ratio(matrix.to(dtype)).item() <= 1.01


@either_iteration
@each_matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30])
def test_bound_holds_for_tiny_and_huge_matrices(make, dtype, scale):
    assert 1 <= ratio((make(12, 20) * scale).to(dtype)).item() <= 1.01


@either_iteration
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_gradient_of_the_bound_does_not_depend_on_the_scale(scale):
    W = torch.randn(4, 6)
    expected, got = (
        torch.autograd.grad(spectral_norm_bound(V), V)[0]
        for V in (W.clone().requires_grad_(), (W * scale).requires_grad_())
    )
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@either_iteration
def test_bound_of_many_random_matrices_is_never_below():
    for dtype in (torch.float32, torch.float64):
        for shape in ((2000, 1, 3), (2000, 3, 3), (500, 8, 5), (200, 16, 16)):
            assert ratio(torch.randn(shape, dtype=dtype)).min().item() >= 1


def test_a_tolerance_of_zero_is_refused():
    with pytest.raises(ValueError, match="tolerance must be above 0; got tolerance=0"):
        spectral_norm_bound(torch.eye(2), tolerance=0.0)


@either_iteration
def test_every_order_of_second_derivatives_of_the_bound_is_the_same():
    W, V = torch.randn(2, 4, 6, dtype=torch.float64)

    def bound(t):
        return spectral_norm_bound(W + t * V)

    t, one = torch.tensor([0.3, 1.0], dtype=torch.float64)
    grad, jvp = torch.func.grad, torch.func.jvp
    expected = grad(grad(bound))(t).item()
    assert grad(lambda t: jvp(bound, (t,), (one,))[1])(t).item() == pytest.approx(expected, rel=1e-9)
    assert jvp(grad(bound), (t,), (one,))[1].item() == pytest.approx(expected, rel=1e-9)


@either_iteration
def test_a_tolerance_is_kept():
    W = orthogonal(200, 200)
    assert 1 <= ratio(W).item() <= 1.01
    assert 1 <= (spectral_norm_bound(W, tolerance=0.05)).item() <= 1.05
    assert 1 <= (spectral_norm_bound(W, tolerance=1e-3)).item() <= 1 + 1e-3


@either_iteration
def test_bound_of_a_batch_is_that_of_each_matrix():
    W = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    one_by_one = torch.stack([torch.stack([spectral_norm_bound(w) for w in row]) for row in W])
    torch.testing.assert_close(spectral_norm_bound(W), one_by_one, rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.func.vmap(spectral_norm_bound)(W), one_by_one, rtol=1e-14, atol=0)


@either_iteration
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bound_of_the_zero_matrix_and_its_gradient_are_zero(dtype):
    W = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
    bound = spectral_norm_bound(W)
    assert bound.item() == 0
    assert (torch.autograd.grad(bound, W, retain_graph=True)[0] == 0).all()
    assert (torch.autograd.grad(bound, W, create_graph=True)[0] == 0).all()


@either_iteration
def test_a_zero_matrix_does_not_spoil_its_batch():
    W = torch.stack([torch.zeros(3, 4), torch.randn(3, 4)]).double().requires_grad_()
    (g,) = torch.autograd.grad(spectral_norm_bound(W).sum(), W)
    assert (g[0] == 0).all() and g[1].norm() > 0.5


@either_iteration
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (2, 4), (2, 3, 3)], ids=str)
def test_bound_passes_gradcheck_twice(shape):
    W = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert gradcheck(spectral_norm_bound, W)
    assert gradgradcheck(spectral_norm_bound, W)


@either_iteration
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (2, 3, 3)], ids=str)
def test_bound_passes_gradcheck_in_forward_mode(shape):
    W = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert gradcheck(spectral_norm_bound, W, check_forward_ad=True, check_backward_ad=False)


@either_iteration
@pytest.mark.parametrize("shape", [(3, 2), (2, 4)], ids=str)
def test_bound_is_differentiable_under_torch_func(shape):
    W = torch.randn(shape, dtype=torch.float64)
    reverse = torch.func.jacrev(spectral_norm_bound)(W)
    torch.testing.assert_close(torch.func.jacfwd(spectral_norm_bound)(W), reverse)
    (plain,) = torch.autograd.grad(spectral_norm_bound(W.requires_grad_()), W)
    torch.testing.assert_close(plain, reverse)
    assert torch.func.hessian(spectral_norm_bound)(W.detach()).shape == (*shape, *shape)


@either_iteration
def test_gradient_of_the_bound_is_near_that_of_the_norm():
    W = torch.randn(30, 20, dtype=torch.float64, requires_grad=True)
    W.data[0] += 10  # one value far above the others
    (expected,) = torch.autograd.grad(torch.linalg.matrix_norm(W, 2), W)
    (got,) = torch.autograd.grad(spectral_norm_bound(W), W)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@either_iteration
def test_compiled_bound_and_its_gradient_are_the_same(without_shape_checks):
    torch.compiler.reset()
    W = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(spectral_norm_bound, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(W), spectral_norm_bound(W))
    (got,), (expected,) = torch.autograd.grad(compiled(W), W), torch.autograd.grad(spectral_norm_bound(W), W)
    torch.testing.assert_close(got, expected)


@either_iteration
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_bound_is_not_rounded_by_autocast(half):
    W = torch.randn(12, 10)
    expected = spectral_norm_bound(W)
    with torch.autocast("cpu", half):
        assert spectral_norm_bound(W).item() == expected.item()


@either_iteration
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_bound_of_half_precision_weights_holds(half):
    assert 1 <= ratio(torch.randn(12, 10).to(half)).item() <= 1.01


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_heads", [1, 2])
def test_norms_of_heads_of_half_precision_hold(half, num_heads):
    W, B = torch.randn(num_heads, 8, 6).to(half), torch.randn(num_heads, 6, 8).to(half)
    true_W, true_B = (torch.linalg.matrix_norm(t.double(), 2) for t in (W, B))
    if num_heads == 1:
        assert 1 <= (head_norms.single_head_norms(W, B)[0] / (true_W * true_B)).item() <= 1.011
    else:
        norm_W, norm_B, _ = head_norms.head_norms(W, B)
        assert (norm_W >= true_W).all() and (norm_B >= true_B).all()


def clusters(rank):
    """Gram matrices with a few eigenvalues of 1 and the others all the same, the worst that was found."""
    counts = torch.tensor(sorted({*range(1, min(rank, 5)), *(int(rank**p) for p in (0.3, 0.5, 0.62, 0.75, 0.9))}))
    values = torch.cat([torch.linspace(0, 0.95, 12), torch.tensor([0.44, 0.46])]).double()
    is_top = torch.arange(rank) < counts[:, None]
    return torch.where(is_top[:, None], 1.0, values[:, None]).flatten(0, 1)


@pytest.mark.parametrize("rank", [3, 7, 20, 64, 130, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tolerance", [0.3, 0.085, 0.01, 1e-3])
def test_shifted_iteration_is_within_its_tolerance_of_hard_spectra(rank, tolerance, monkeypatch):
    monkeypatch.setattr(gram, "SHIFTED_FROM", 1)
    excess = []
    for eigenvalues in clusters(rank).split(8):
        bound = spectral_norm_bound(torch.diag_embed(eigenvalues.sqrt()), tolerance)
        excess.append(bound / eigenvalues.amax(-1).sqrt() - 1)
    assert torch.cat(excess).min() >= 0
    assert torch.cat(excess).max() <= tolerance


@pytest.mark.parametrize("num_squarings", [1, 2, 3])
def test_a_search_over_spectra_finds_no_more_than_the_stated_excess(num_squarings):
    rank = 12
    free = torch.randn(64, rank, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([free], lr=0.1)
    for _ in range(100):
        values = torch.cat([torch.ones(64, 1), free[:, 1:].sigmoid()], -1)
        found = gram.shifted(num_squarings).run(torch.diag_embed(values.square()), True)[0].sqrt() - 1
        optimizer.zero_grad()
        (-found.clamp_min(1e-12).log().sum()).backward()
        optimizer.step()
    stated = gram.EXCESS[num_squarings] * (math.log(rank) + 0.7) ** 2.4
    assert 0.2 * stated < found.max().item() <= stated


def test_large_matrices_take_few_squarings():
    assert gram._num_plain(512, 0.05) == 5 and gram._num_shifted(512, 0.085) == 3
    assert gram._num_plain(1024, 0.01) == 8 and gram._num_shifted(1024, 0.01) == 5
    assert gram._num_shifted(1024, 1e-5) > gram._num_shifted(1024, 1e-4) > len(gram.EXCESS)


# -- norms of heads


def drawn(heads, features, width):
    return [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((heads, features, width), (heads, width, features))
    ]


def of_heads(W, B):
    norms = (head_norms.head_norms if len(W) > 1 else head_norms.single_head_norms)(W, B)
    return torch.cat([norm.view(-1) for norm in norms])


SIZES = pytest.mark.parametrize("size", [(1, 4, 4), (1, 4, 3), (2, 4, 2), (3, 4, 2), (2, 3, 5)], ids=str)


@SIZES
@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_norms_of_heads_are_the_same_in_every_mode(size, scale):
    W, B = (scale * t.detach() for t in drawn(*size))
    recorded = of_heads(W.requires_grad_(), B)
    with torch.no_grad():
        torch.testing.assert_close(of_heads(W, B), recorded, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.func.vmap(of_heads)(W[None], B[None])[0], recorded, rtol=1e-12, atol=0)
    of_W, of_B, of_all = (torch.linalg.matrix_norm(t, 2) for t in (W, B, B.flatten(0, 1)))
    true = torch.cat([of_W, of_B, of_all[None]]) if len(W) > 1 else of_W * of_B
    assert (recorded[: len(true)] >= true).all()


@SIZES
def test_norms_of_heads_pass_gradcheck_twice(size):
    given = drawn(*size)
    assert gradcheck(of_heads, given)
    assert gradgradcheck(of_heads, given)


@SIZES
def test_many_gradients_of_norms_of_heads_are_those_one_by_one(size):
    W, B = drawn(*size)
    norms = of_heads(W, B)
    rows = torch.eye(len(norms), dtype=torch.float64)
    together = torch.autograd.grad(norms, [W, B], rows, retain_graph=True, is_grads_batched=True)
    for k, row in enumerate(rows):
        for all_rows, one in zip(together, torch.autograd.grad(norms, [W, B], row, retain_graph=True), strict=True):
            torch.testing.assert_close(all_rows[k], one)


@pytest.mark.parametrize("heads", [1, 3])
def test_recorded_gradients_of_tied_weights_count_once(heads):
    W, _ = drawn(heads, 4, 2)
    total = of_heads(W, 2 * W.mT).sum()
    (plain,) = torch.autograd.grad(total, W, retain_graph=True)
    (recorded,) = torch.autograd.grad(total, W, create_graph=True)
    torch.testing.assert_close(recorded, plain)


@pytest.mark.parametrize(("W", "B"), [((1, 4, 2), (1, 3, 4)), ((2, 4, 2), (1, 2, 4)), ((4, 2), (1, 2, 4))])
def test_weights_that_do_not_fit_are_refused(W, B):
    with pytest.raises(ValueError, match=r"W must have shape \[heads, features, width\].*; got \["):
        head_norms.head_norms(torch.randn(W), torch.randn(B))


@pytest.mark.parametrize("matrix", [torch.ones(3), torch.ones(2, 2, dtype=torch.int64)], ids=["a vector", "integers"])
def test_what_is_no_matrix_has_no_norm(matrix, without_shape_checks):
    with pytest.raises(ValueError, match="matrix must be of a floating-point type and have shape"):
        spectral_norm_bound(matrix)


# -- bounds that are remembered


def counting(monkeypatch):
    """The shapes of the matrices whose bounds are computed from now on."""
    shapes = []

    def counted(function):
        def count(matrix, *args, **kwargs):
            shapes.append(list(matrix.shape))
            return function(matrix, *args, **kwargs)

        return count

    for module, name in ((spectral, "upper_bound"), (head_norms, "use_up")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return shapes


def test_a_bound_is_computed_once_while_weights_stay(monkeypatch):
    norm = Remembered(spectral_norm_bound, num_calls=4)
    matrices = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(4, 3), torch.randn(4, 3).double()]
    bounds = list(map(spectral_norm_bound, matrices))
    shapes = counting(monkeypatch)
    with torch.no_grad():
        for _ in range(3):
            for matrix, bound in zip(matrices, bounds, strict=True):
                assert norm(matrix) == bound
    assert len(shapes) == 4


def test_a_bound_is_remembered_for_its_precision_only():
    norm, matrix = Remembered(spectral_norm_bound, num_calls=2), torch.randn(40, 40)
    with torch.no_grad():
        assert norm(matrix).dtype == torch.float32
        assert norm(matrix.double()).dtype == torch.float64


def test_all_of_several_matrices_must_be_the_same():
    both, one, other = Remembered(lambda *pair: (pair[0].sum(), pair[1].sum())), torch.ones(2, 2), torch.ones(3, 2)
    with torch.no_grad():
        assert both(one, other) == (4, 6)
        other[2, 1] = 0
        assert both(one, other) == (4, 5)
        one[0, 0] = 0
        assert both(one, other) == (3, 5)


@pytest.mark.parametrize(
    "module", [L2SelfAttention(6, 1), L2SelfAttention(6, 2), FeedForward(6, 6, num_layers=4)], ids=lambda m: str(m)[:20]
)
def test_modules_remember_the_bounds_of_their_weights(module, monkeypatch):
    shapes, x = counting(monkeypatch), torch.randn(2, 3, 6)
    with torch.no_grad():
        first = module(x)
        computed = len(shapes)
        assert computed > 0
        assert torch.equal(module(x), first)
        assert len(shapes) == computed
        for weight in module.parameters():
            weight += torch.randn_like(weight)
        module(x)
        assert len(shapes) > computed


@pytest.mark.parametrize("by", ["in place", "data", "not a number"])
def test_any_change_of_a_weight_is_noticed(by):
    norm, matrix = Remembered(spectral_norm_bound), torch.randn(5, 6)
    with torch.no_grad():
        norm(matrix)
        if by == "in place":
            matrix[4, 5] += 1
        elif by == "data":
            matrix.data[4, 5] = 9
        else:
            matrix[4, 5] = torch.nan
            assert norm(matrix).isnan()
        torch.testing.assert_close(norm(matrix), spectral_norm_bound(matrix), rtol=0, atol=0, equal_nan=True)


def test_what_is_remembered_is_limited():
    norm = Remembered(spectral_norm_bound)
    with torch.no_grad():
        for _ in range(9):
            norm(torch.randn(2, 2))
    assert len(norm.known) == 1
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert len(other.known) == 0 and other.num_calls == 1 and other.function is spectral_norm_bound


@pytest.mark.parametrize(
    "call",
    [
        lambda norm, W: gradcheck(norm, (W.requires_grad_(),)),
        lambda norm, W: torch.func.vmap(norm)(W[None]),
        lambda norm, W: torch.func.jacrev(norm)(W),
        lambda norm, W: torch.func.jacfwd(norm)(W),
        lambda norm, W: norm(FakeTensorMode().from_tensor(W)),
    ],
    ids=["gradcheck", "vmap", "jacrev", "jacfwd", "fake"],
)
def test_nothing_is_remembered_while_somebody_else_is_looking(call, monkeypatch):
    norm, matrix = Remembered(spectral_norm_bound), torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        norm(matrix)
        before, shapes = norm.known, counting(monkeypatch)
        with torch.set_grad_enabled(call.__code__.co_names[0] == "gradcheck"):
            call(norm, matrix.clone())
    assert len(shapes) > 0
    assert norm.known is before


@pytest.mark.filterwarnings("ignore")  # tracing warns of every size, and of itself
def test_a_trace_follows_the_weights(without_shape_checks):
    norm, matrix = Remembered(spectral_norm_bound), torch.randn(3, 4)
    with torch.no_grad():
        norm(matrix)
        traced = torch.jit.trace(lambda matrix: norm(matrix), matrix, check_trace=False)
        torch.testing.assert_close(traced(5 * matrix), 5 * norm(matrix))


def test_a_remembered_bound_is_a_tensor_like_any_other(monkeypatch):
    norm, matrix = Remembered(spectral_norm_bound), torch.randn(3, 4)
    with torch.inference_mode():
        norm(matrix)
    shapes = counting(monkeypatch)
    with torch.no_grad():
        bound = norm(matrix)
    (bound * torch.ones(1, requires_grad=True)).sum().backward()  # which an inference tensor would refuse
    bound.zero_()
    with torch.no_grad():
        assert norm(matrix) > 0
    assert not shapes


def test_threads_may_share_a_memory():
    matrices, norm, wrong = [torch.randn(4, 4) for _ in range(6)], Remembered(spectral_norm_bound, num_calls=3), []

    def run():
        with torch.no_grad():
            for k in range(100):
                matrix = matrices[k % 6]
                if norm(matrix) != spectral_norm_bound(matrix):
                    wrong.append(k)
            wrong.append("done")

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == ["done"] * 8


# -- the Lambert function


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_lambert_function_is_that_of_mpmath(dtype, tolerance):
    largest = 38 if dtype == torch.float32 else 307
    z = torch.cat([torch.logspace(-35, largest, 500), torch.tensor([0.0, 1.0, math.e]), torch.linspace(0, 10, 200)])
    z = torch.cat([z, -torch.logspace(-35, math.log10(0.36), 200)]).to(dtype)
    z = z[z.isfinite()]
    expected = torch.tensor([float(mpmath.lambertw(v).real) for v in z.tolist()], dtype=torch.float64)
    torch.testing.assert_close(lambert_w0(z).double(), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lambert_function_is_right_next_to_its_branch_point(dtype):
    z = (-1 / math.e + torch.logspace(-6 if dtype == torch.float32 else -12, -1, 100, dtype=torch.float64)).to(dtype)
    expected = torch.tensor([float(mpmath.lambertw(v).real) for v in z.tolist()], dtype=torch.float64)
    # near the branch point the function is a square root: half of the digits are all there is
    torch.testing.assert_close(lambert_w0(z).double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps ** 0.5)


@pytest.mark.parametrize("z", [-1.0, -0.3679, -math.inf, math.nan])
def test_lambert_function_refuses_what_is_outside_its_domain(z):
    with pytest.raises(ValueError, match=r"z >= -1/e only; got z="):
        lambert_w0(torch.tensor([1.0, z]))


def test_lambert_function_of_infinity_is_infinity():
    assert lambert_w0(torch.tensor(math.inf)).item() == math.inf


def test_lambert_function_passes_gradcheck_twice():
    z = torch.tensor([-0.3, -1e-3, 0.0, 1e-3, 0.5, 1.0, 30.0, 1e6], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambert_w0, z, check_forward_ad=True)
    assert gradgradcheck(lambert_w0, z, check_fwd_over_rev=True)


def test_derivative_of_the_lambert_function_is_that_of_mpmath():
    z = torch.logspace(-10, 30, 50, dtype=torch.float64)
    expected = torch.tensor([float(mpmath.lambertw(v).real / (v * (1 + mpmath.lambertw(v).real))) for v in z.tolist()])
    got = torch.func.vmap(torch.func.grad(lambert_w0))(z)
    torch.testing.assert_close(got, expected.double(), rtol=1e-6, atol=0)


def test_lambert_function_can_be_compiled(without_shape_checks):
    torch.compiler.reset()
    z = torch.linspace(0, 5, 7, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambert_w0, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(z), lambert_w0(z))
    (got,), (expected,) = (torch.autograd.grad(f(z).sum(), z) for f in (compiled, lambert_w0))
    torch.testing.assert_close(got, expected)
