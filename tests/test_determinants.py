"""Determinants and inverses of many small matrices, against elimination in double precision."""

import pytest
import torch

from flowattn.kernels import determinants
from flowattn.kernels.determinants import invert, invert_by_elimination, invert_by_series, logabsdet_plus_identity


def matrices(size, *, batch=20, n=12, symmetric=False, dtype=torch.float64):
    """Random ones, the largest spectral radius among them being `size`."""
    N = torch.randn(batch, n, n, dtype=torch.float64)
    N = N + N.mT if symmetric else N
    return (N * (size / torch.linalg.eigvals(N).abs().amax())).to(dtype)


def exact(N):
    M = torch.eye(N.shape[-1], dtype=torch.float64) - N.double()
    return torch.linalg.inv(M).mT, torch.linalg.slogdet(M).logabsdet


@pytest.fixture
def num_products(monkeypatch):
    """How many products of matrices there were."""
    counts = [0]
    for name in ("bmm", "baddbmm"):
        right = getattr(torch, name)

        def counted(*args, right=right, **options):
            counts[0] += 1
            return right(*args, **options)

        monkeypatch.setattr(determinants.torch, name, counted)
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("symmetric", [False, True], ids=["any", "symmetric"])
@pytest.mark.parametrize("size", [0.0, 1e-6, 1e-4, 1e-3, 0.003, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2])
@pytest.mark.parametrize("n", [12, 40])
def test_a_series_is_as_exact_as_it_says(n, size, symmetric, dtype):
    N, eps = matrices(size, n=n, symmetric=symmetric, dtype=dtype), torch.finfo(dtype).eps
    found = invert_by_series(N.clone(), torch.full((3, *N.shape), torch.nan, dtype=dtype))
    inverses, logabsdet = exact(N)
    if found is None:
        assert torch.linalg.vector_norm(N @ N, dim=(-2, -1)).amax() ** determinants.MAX_PRODUCTS >= 128 * eps
        return
    assert torch.linalg.vector_norm(found[0] - inverses, dim=(-2, -1)).amax() < 200 * eps
    assert (found[1] - logabsdet).abs().max() < n * eps


@pytest.mark.parametrize(("size", "dtype"), [(0.2, torch.float32), (0.02, torch.float64)], ids=str)
def test_most_series_are_summed_rather_than_given_up(size, dtype):
    N = matrices(size, n=3, dtype=dtype)
    assert invert_by_series(N.clone(), torch.empty(3, *N.shape, dtype=dtype)) is not None


@pytest.mark.parametrize(("size", "expected"), [(0.01, 1), (0.03, 2), (0.07, 3), (0.2, 4), (0.3, 6), (0.4, 8)])
def test_a_series_takes_no_more_products_than_it_needs(size, expected, num_products):
    N = (size * torch.eye(3)).expand(20, 3, 3).contiguous()
    inverses, logabsdet = invert_by_series(N, torch.empty(3, *N.shape))
    assert num_products == [expected]
    torch.testing.assert_close(inverses[7], torch.eye(3) / (1 - size), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logabsdet[7], 3 * torch.tensor(1 - size).log(), rtol=2e-6, atol=1e-7)


def test_matrices_far_from_normal_have_inverses_and_values_as_exact():
    """Their squares are small, but not their cubes against those."""
    N = torch.zeros(8, 6, 6, dtype=torch.float64)
    N[:, :3, 3:], N[:, 3:, :3] = 100 * torch.randn(8, 3, 3), 2e-7 * torch.randn(8, 3, 3)
    found = invert_by_series(N.float(), torch.empty(3, *N.shape))
    assert found is not None
    inverses, logabsdet = exact(N.float())
    torch.testing.assert_close(found[0].double(), inverses, rtol=0, atol=1e-5 * inverses.abs().max().item())
    torch.testing.assert_close(found[1].double(), logabsdet, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_no_series_is_summed_of_what_is_too_large_or_no_number(value):
    N = matrices(0.01, dtype=torch.float32)
    N[3, 2, 1] = N[3, 1, 2] = value
    assert invert_by_series(N, torch.empty(3, *N.shape)) is None


@pytest.mark.parametrize("size", [0.01, 0.9])
def test_parts_are_inverted_as_the_whole(size, monkeypatch):
    N = matrices(size, batch=300, n=9)
    whole, parts = torch.empty_like(N), torch.empty_like(N)
    logabsdet = invert(N, whole)
    monkeypatch.setattr(determinants, "small_enough_for_the_cache", lambda like: 700)
    torch.testing.assert_close((invert(N, parts), parts), (logabsdet, whole), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((whole, logabsdet), exact(N), rtol=1e-12, atol=1e-12)


def test_elimination_is_exact_for_any_size():
    N = matrices(30.0)
    torch.testing.assert_close(invert_by_elimination(N), exact(N), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [0.01, 0.9])
def test_derivatives_of_every_order_are_right(size):
    M = matrices(size, batch=3, n=3).requires_grad_()
    assert torch.autograd.gradcheck(logabsdet_plus_identity, M, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(logabsdet_plus_identity, M)
