"""The log-determinants of the diagonal blocks of attention, against one elimination per token."""

import pytest
import torch

from flowattn.contractions import head_logdet
from flowattn.contractions.head_logdet import head_logabsdet

HEADS, WIDTH = 3, 2


def blocks(apart, tokens=9, batch=4, dtype=torch.float64):
    """Blocks of tokens that are alike but for `apart` of their size."""
    generator = torch.Generator().manual_seed(tokens)
    common, own = (
        torch.randn(*shape, HEADS, tokens, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        for shape in ((1,), (batch,))
    )
    K = torch.randn(HEADS, WIDTH, HEADS * WIDTH, generator=generator, dtype=torch.float64)
    C = 0.1 * (common[:, :, :1] + apart * own)
    return C.to(dtype).requires_grad_(), K.to(dtype).requires_grad_()


def brute_force(C, K):
    """One determinant per token, through the block-diagonal matrix."""
    total = []
    for sequence in C:
        total.append(0.0)
        for token in sequence.unbind(1):
            A = torch.block_diag(*token) @ K.flatten(0, 1)
            total[-1] = total[-1] + torch.linalg.slogdet(torch.eye(len(A), dtype=C.dtype) + A).logabsdet
    return torch.stack(total)


@pytest.fixture
def methods(monkeypatch):
    """Which of the two ways each stretch went."""
    ways = []
    right = head_logdet.invert_by_series

    def watched(*args):
        found = right(*args)
        ways.append("none" if found is None else "series")
        return found

    monkeypatch.setattr(head_logdet, "invert_by_series", watched)
    return ways


@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
@pytest.mark.parametrize(("apart", "ways"), [(0.0, {"series"}), (0.01, {"series"}), (3.0, {"none", "series"})])
def test_value_and_gradient_are_those_of_eliminations(apart, ways, tokens, methods):
    C, K = blocks(apart, tokens)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    got, want = head_logabsdet(C, K), brute_force(C, K)
    assert set(methods) <= ways
    assert apart < 1 or "none" in methods
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(head_logabsdet(C, K), want, rtol=1e-11, atol=1e-12)
    gradients = [torch.autograd.grad(value @ weights, (C, K)) for value in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("apart", [0.01, 0.1, 0.3, 1.0, 10.0])
def test_single_precision_loses_its_last_digits_only(apart):
    C, K = blocks(apart, tokens=40, dtype=torch.float32)
    exact = (t.detach().double().requires_grad_() for t in (C, K))
    value, truth = head_logabsdet(C, K), brute_force(*(pair := tuple(exact)))
    assert (value - truth).abs().max() < 3e-6 * 40
    for got, want in zip(torch.autograd.grad(value.sum(), (C, K)), torch.autograd.grad(truth.sum(), pair), strict=True):
        assert (got - want).abs().max() < (1e-4 if apart > 1 else 2e-5) * want.abs().max()


def test_stretches_cover_every_token_once_and_grow():
    for tokens in (1, 2, 7, 100):
        for longest in (1, 5, 1000):
            stretches = list(head_logdet._stretches(tokens, longest))
            assert [i for s in stretches for i in range(s.start, s.stop)] == list(range(tokens))
            assert all(s.stop - s.start <= longest for s in stretches)


def test_a_sequence_far_from_its_mates_spoils_nobody():
    C, K = blocks(0.1)
    far = torch.cat([C[:3], 40 * C[3:]]).detach()
    torch.testing.assert_close(head_logabsdet(far, K), brute_force(far, K), rtol=1e-11, atol=1e-12)
    huge = torch.cat([C[:3], 1e60 * C[3:]]).detach()
    torch.testing.assert_close(head_logabsdet(huge, K), brute_force(huge, K), rtol=1e-11, atol=1e-12)
    singular = torch.stack([torch.eye(WIDTH).expand(HEADS, 1, -1, -1).double() * s for s in (1.0, -3.0)])
    K = torch.eye(HEADS * WIDTH, dtype=torch.float64).unflatten(0, (HEADS, WIDTH))  # the mean block is -I
    torch.testing.assert_close(head_logabsdet(singular, K), brute_force(singular, K))


def test_what_is_not_a_number_stays_so_and_no_sequence_is_none():
    C, K = (t.detach() for t in blocks(0.1))
    C[1] = torch.nan
    assert head_logabsdet(C, K).isnan()[1]
    assert head_logabsdet(C[:0], K).shape == (0,)


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)], ids=["C", "K", "both"])
def test_vmap_is_a_loop(dims):
    scales = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    given = [
        t.detach() if dim is None else torch.stack([t.detach() * scale for scale in scales])
        for t, dim in zip(blocks(0.1), dims, strict=True)
    ]
    one_by_one = [[t if dim is None else t[i] for t, dim in zip(given, dims, strict=True)] for i in range(len(scales))]
    got = torch.func.vmap(head_logabsdet, dims)(*given)
    torch.testing.assert_close(got, torch.stack([brute_force(*pair) for pair in one_by_one]), rtol=1e-11, atol=1e-12)

    def gradient(f):
        return torch.func.grad(lambda C, K: f(C, K).sum(), argnums=(0, 1))

    got = torch.func.vmap(gradient(head_logabsdet), dims)(*given)
    want = [torch.stack(parts) for parts in zip(*(gradient(brute_force)(*pair) for pair in one_by_one), strict=True)]
    torch.testing.assert_close(got, tuple(want), rtol=1e-10, atol=1e-11)


def test_derivatives_of_derivatives_are_right():
    C, K = blocks(0.5, tokens=3, batch=2)
    assert torch.autograd.gradcheck(head_logabsdet, (C, K), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(head_logabsdet, (C, K))


def test_many_sequences_and_wide_heads_go_a_few_at_a_time(monkeypatch):
    C, K = blocks(0.1, tokens=20, batch=40)
    want = head_logabsdet(C, K)
    gradients = torch.autograd.grad(want.sum(), (C, K))
    monkeypatch.setattr(head_logdet, "small_enough_for_the_cache", lambda like: 1)
    got = head_logabsdet(C, K)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), (C, K)), gradients, rtol=1e-10, atol=1e-11)
