"""The character Transformer: every rung is causal, sized alike, and writes the same with a cache and without."""

import copy
import math

import pytest
import torch

from flowattn.contractions import L2SelfAttention
from flowattn.lipschitz import published_infinity_bound
from flowattn.models import RUNGS, CharTransformer, generate
from flowattn.models.attention import ContractiveAttention, PairAttention, extend_contraction
from flowattn.transforms import ResidualTransform

TOKENS = 12

MODELS = {
    **{rung: {"rung": rung} for rung in RUNGS},
    "dot_product, LayerNorm": {"rung": "dot_product", "layer_norm": True},
    "dot_product, absolute": {"rung": "dot_product", "position": "absolute"},
    "l2_untied, both": {"rung": "l2_untied", "position": "both"},
    "contractive_token, absolute, LayerNorm": {
        "rung": "contractive_token",
        "position": "absolute",
        "layer_norm": True,
        "norm_start": None,
        "radius": None,
    },
    "invertible, contractive feed-forward": {"feed_forward": "contractive", "position": "both"},
    "invertible, matrices between": {"between": "linear", "radius": 1.5},
    "invertible, nothing between": {"between": "none", "norm_start": None},
}
each = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
each_invertible = pytest.mark.parametrize("options", list(MODELS.values())[-3:], ids=list(MODELS)[-3:])


def make(features=16, num_layers=2, **options):
    return CharTransformer(50, features, 4, num_layers, TOKENS, **options)


def stir(model, scale=0.3):
    """Moves all weights away from where they start."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(scale * torch.randn_like(weight))
    return model


def text(count=3, tokens=TOKENS):
    return torch.randint(50, (count, tokens))


@each
def test_no_logit_depends_on_later_characters(options):
    model = stir(make(**options)).double()
    one = text()
    other = one.clone()
    other[:, 7:] = (one[:, 7:] + 1) % 50
    a, b = model(one), model(other)
    assert torch.allclose(a[:, :7], b[:, :7], atol=1e-12)
    assert not torch.allclose(a[:, 7:], b[:, 7:], atol=1e-3)
    assert torch.allclose(model(one[:, :5]), a[:, :5], atol=1e-12)


@each
def test_every_weight_is_learned(options):
    model = stir(make(**options))
    model(text()).square().mean().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        assert weight.grad.any() or weight.numel() == 1, name


@each
def test_new_characters_are_computed_as_in_the_whole_text(options):
    model, whole = stir(make(**options)).double(), text()
    expected = model(whole)
    kept, parts = None, []
    for piece in whole.split([4, 1, 1, 6], 1):
        logits, kept = model.extend(piece, kept)
        parts.append(logits)
    assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-10)


@each
def test_text_is_the_same_with_the_cache_and_without(options):
    model, prompt = stir(make(**options), 0.1), text(2, 5)
    settings = {"num_characters": TOKENS, "temperature": 2.0, "top_k": 40, "seed": 3}
    written = generate(model, prompt, **settings)
    assert written.equal(generate(model, prompt, cache=False, **settings))
    assert written[:, :5].equal(prompt) and written.shape == (2, 5 + TOKENS)
    assert not written.equal(generate(model, prompt, **{**settings, "seed": 4}))


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(("features", "num_layers"), [(16, 1), (32, 3)])
def test_no_rung_has_more_parameters_than_dot_products_and_none_has_many_fewer(rung, features, num_layers):
    for layer_norm in {False, rung != "invertible"}:
        most = make(features, num_layers, rung="dot_product", layer_norm=layer_norm)
        model = make(features, num_layers, rung=rung, layer_norm=layer_norm)
        per_unit = 2 * num_layers * (features + 1)
        assert most.num_parameters - per_unit <= model.num_parameters <= most.num_parameters
    assert most.hidden_width == 4 * features


def test_a_published_contraction_is_one():
    with pytest.raises(ValueError, match="coefficient must be between 0 and 1; got coefficient=5"):
        make(rung="contractive_inf", coefficient=5.0)


def test_counting_parameters_draws_no_random_numbers():
    width = make().hidden_width
    torch.manual_seed(5)
    one = make(hidden=width)
    torch.manual_seed(5)
    other = make()
    assert one.hidden_width == other.hidden_width
    assert torch.equal(one.embedding.weight, other.embedding.weight)


# -- branches


@pytest.mark.parametrize("tokens", [5, TOKENS])
def test_the_published_construction_is_that_of_the_papers_weights(tokens):
    branch = PairAttention(16, 4, kind="l2_tied_A", max_tokens=TOKENS, position_bias=False).double()
    w_q, w_v = (w.unflatten(1, (4, 4)).movedim(1, 0) for w in branch.in_projection.chunk(2, -1))
    w_o = branch.out_projection.unflatten(0, (4, 4))
    x = torch.randn(2, tokens, 16, dtype=torch.float64)
    expected = L2SelfAttention.from_paper_weights(w_q, w_v, w_o, causal=True)(x)
    assert torch.allclose(branch(x), expected, atol=1e-12)
    branch.kind = "contractive_inf"
    bound = published_infinity_bound(w_q, w_v, w_o, TOKENS)
    assert torch.allclose(branch(x), expected * (branch.coefficient / bound), atol=1e-12)


def test_l2_branches_weigh_by_distance_wherever_the_origin_is():
    branch = PairAttention(8, 2, kind="l2_untied", max_tokens=TOKENS, position_bias=False)
    x = torch.randn(1, 6, 8)
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (x @ branch.in_projection).split(8, -1))
    logits = -torch.cdist(q, k).square() / math.sqrt(4)
    P = logits.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    expected = (P @ v).transpose(1, 2).flatten(2) @ branch.out_projection
    assert torch.allclose(branch(x), expected, atol=1e-5)


def test_contractive_attention_is_a_contraction_in_its_learned_norm():
    branch = stir(ContractiveAttention(L2SelfAttention(8, 2, causal=True, radius="learned"), start=0.1), 1.0).double()
    gain = branch.log_gain.exp()
    for _ in range(20):
        x, step = torch.randn(2, 4, 7, 8, dtype=torch.float64)
        x, step = 3 * x, 0.01 * step
        moved = ((branch(x + step) - branch(x)) * gain).norm(dim=-1).amax(-1)
        assert (moved <= 0.97 * (step * gain).norm(dim=-1).amax(-1)).all()


# -- the invertible rung


@each_invertible
def test_characters_and_embeddings_are_recovered(options):
    model, given = stir(make(num_layers=3, **options), 0.1), text(16)
    hidden = model.hidden(given)
    found = model.invert(hidden)
    assert found.characters.equal(given)
    assert (found.certified_error <= 1e-8).all()
    assert (found.residual <= 1e-5 * hidden.abs().max()).all()
    embeddings = model.invert(model.double().hidden(given)).embeddings
    assert torch.allclose(embeddings, model.embedding(given), atol=1e-5)


def test_the_trunk_is_the_composite_that_nflows_knows():
    model = stir(make(), 0.1).double()
    x = model.embedding(text())
    y, logabsdet = model.trunk(x)
    assert torch.allclose(y, model.trunk.map(x), atol=1e-10)
    assert logabsdet.shape == (3,)
    back, minus = model.trunk.inverse(y)
    assert torch.allclose(back, x, atol=1e-6) and torch.allclose(minus, -logabsdet, atol=1e-5)


def test_every_attention_of_the_trunk_is_bounded_whatever_its_weights():
    model = stir(make(), 3.0)
    blocks = [t.contraction for t in model.trunk._transforms if isinstance(t, ResidualTransform)]
    assert len(blocks) == 2
    assert all(block.lipschitz_bound(TOKENS) <= 0.97 for block in blocks)


def test_the_trunk_starts_with_linear_maps_that_undo_each_other():
    linear, gain, attention, undo, again, _ = make(num_layers=1, between="linear").trunk._transforms
    x = torch.randn(2, 3, 16)
    y = x
    for transform in (linear, gain, undo, again):
        y = transform(y)[0]
    assert torch.allclose(y, x, atol=1e-5)
    assert not torch.allclose(gain(x)[0], x, atol=0.1)
    assert isinstance(attention, ResidualTransform)


def test_a_hidden_text_that_was_tampered_with_is_noticed():
    model, given = make(), text()
    hidden = model.hidden(given)
    found = model.invert(hidden + 0.1 * torch.randn_like(hidden))
    assert (found.residual > 1e-3).all()


def test_a_model_is_the_same_after_inversion_and_generation():
    model = make()
    before = copy.deepcopy(model.state_dict())
    model.invert(model.hidden(text()))
    generate(model, text(1, 2), 3)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rung": "l3"}, "rung must be one of"),
        ({"features": 18}, "num_heads must divide features; got num_heads=4, features=18"),
        ({"layer_norm": True}, "a LayerNorm cannot be inverted"),
        ({"rung": "contractive_inf", "position": "relative"}, "its bound knows no bias"),
        ({"norm_start": 0.0}, "norm_start must be None or above 0"),
        ({"between": "spline"}, "between must be one of"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"position": "sine"}, "position must be one of"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_embeddings_that_leave_no_parameters_are_named_as_the_cause():
    with pytest.raises(ValueError, match=r"hidden must be given.*\d+ > \d+.*max_tokens=512, position='both'"):
        CharTransformer(features=8, max_tokens=512, position="both", rung="l2_tied")
    assert CharTransformer(features=8, max_tokens=512, position="both", rung="l2_tied", hidden=3).hidden_width == 3


def test_the_trunk_adds_up_log_determinants_in_single_precision():
    trunk = make(num_layers=1).trunk.bfloat16()
    assert trunk(torch.randn(2, 3, 16, dtype=torch.bfloat16))[1].dtype == torch.float32


def test_wrong_texts_are_refused():
    model = make()
    for characters in (torch.zeros(2, TOKENS + 1, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)):
        with pytest.raises(ValueError, match=f"1 to max_tokens={TOKENS} characters"):
            model(characters)
    with pytest.raises(ValueError, match="must be whole numbers"):
        model(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="invert needs rung='invertible'"):
        make(rung="l2_tied").invert(torch.zeros(1, 2, 16))
    with pytest.raises(ValueError, match="hidden must be finite"):
        model.invert(torch.full((1, 2, 16), math.nan))
    for settings, message in (
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 51}, "top_k"),
        ({"num_characters": 0}, "num_characters"),
        ({"num_symbols": 0}, "num_symbols must be a whole number of at least 1; got num_symbols=0"),
        ({"num_symbols": -1}, "num_symbols must be"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, text(1, 2), **{"num_characters": 3, **settings})


def test_temperature_zero_and_one_candidate_take_the_likeliest():
    model, prompt = stir(make()), text(2, 3)
    greedy = generate(model, prompt, 6, temperature=0.0)
    assert greedy.equal(generate(model, prompt, 6, top_k=1, seed=9))
    assert greedy[:, 3].equal(model.double()(prompt)[:, -1].argmax(-1))


def test_characters_are_drawn_with_their_probabilities():
    model = make(num_layers=1)
    prompt = text(1, 4)
    expected = model.double()(prompt)[0, -1].softmax(-1).detach()
    drawn = generate(model, prompt.expand(4000, -1), 1)[:, -1].bincount(minlength=50) / 4000
    assert ((drawn - expected).abs() < 5 * (expected / 4000).sqrt()).all()


def test_rows_that_are_added_are_as_precise_as_the_whole_far_from_the_origin():
    f = L2SelfAttention(8, 2, causal=True, max_tokens=6)
    with torch.no_grad():
        f.W.mul_(16)
    x = torch.randn(1, 6, 8) + 1e3
    truth = copy.deepcopy(f).double()(x.double())
    kept, rows = None, []
    for token in x.split(1, 1):
        row, kept = extend_contraction(f, token, kept)
        rows.append(row)
    error = (torch.cat(rows, 1) - truth).abs().max()
    assert error <= 4 * (f(x) - truth).abs().max() + 1e-6
