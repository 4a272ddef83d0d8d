"""The report knows attention layers by their weights, and believes them only if they give the outputs."""

import math

import pytest
import torch

from flowattn.contractions import Declared, DotProductSelfAttention, L2SelfAttention
from flowattn.lipschitz import DotProductHeads, local_lipschitz, report
from flowattn.models.attention import PairAttention


def tokens(n=5, features=4):
    return torch.randn(2, n, features)


def bounds(found, norm):
    return {bound.name: bound.value for bound in found.bounds if bound.norm == norm}


LAYERS = {
    "torch": lambda: torch.nn.MultiheadAttention(4, 2, batch_first=True),
    "torch, tokens first": lambda: torch.nn.MultiheadAttention(4, 2, bias=False),
    "ours": lambda: DotProductSelfAttention(4, 2),
    "ours, causal": lambda: DotProductSelfAttention(4, 2, causal=True),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_dot_product_layers_are_recognised_and_stay_below_their_bounds(make):
    layer = make()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    found = report(layer, tokens())
    for norm in ("2", "token"):
        assert {"covariances", "ball"} <= bounds(found, norm).keys()
        assert all(value >= found.local[norm] for value in bounds(found, norm).values())
    assert "Yudin et al." in bounds(found, "2")


def test_a_causal_mask_is_found_out_and_another_mask_gets_no_bounds():
    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    x = tokens()
    found = report(layer, x, call=lambda layer, x: layer(x, x, x, attn_mask=causal)[0])
    assert "causal" in found.note and "mean field, causal" in bounds(found, "2")
    found = report(layer, x, call=lambda layer, x: layer(x, x, x, attn_mask=causal.T)[0])
    assert not found.bounds and "do not give its outputs" in found.note


def test_local_constants_are_those_of_local_lipschitz():
    layer, x = torch.nn.MultiheadAttention(4, 2, batch_first=True), tokens()
    heads = DotProductHeads.of(layer)
    assert report(layer, x).local["2"] == pytest.approx(local_lipschitz(heads, x, "2").amax().item(), rel=1e-4)


def test_dropout_is_off_while_measuring_and_on_afterwards():
    layer, x = torch.nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.5), tokens()
    assert str(report(layer, x)) == str(report(layer, x))
    assert layer.training and torch.backends.mha.get_fastpath_enabled()


def test_l2_attention_is_asked_for_its_bound_and_a_plain_function_has_none():
    layer, x = L2SelfAttention(4, 2), tokens()
    found = report(layer, x)
    assert bounds(found, "token")["declared"] == pytest.approx(layer.lipschitz_bound(5).item())
    assert all(bound.ratio >= 1 and bound.scope == "everywhere" for bound in found.bounds)
    plain = report(torch.sin, x)
    assert not plain.bounds and plain.name == "sin" and "No bound" in plain.note


def test_a_layer_that_refuses_to_give_a_bound_is_quoted():
    layer = DotProductSelfAttention(4, 2, position_bias="alibi")
    assert "has no Lipschitz bound" in report(layer, tokens()).note


def test_text_and_plot_show_every_bound_and_a_bound_that_overflows_is_not_drawn():
    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    found = report(layer, 100 * tokens())
    assert str(found).count("\n") == 1 + len(found.local) + len(found.bounds) + 1
    infinite = [bound for bound in found.bounds if bound.value == math.inf]
    assert len(found.plot().patches) == len(found.local) + len(found.bounds) - len(infinite)


@pytest.mark.parametrize("make", [*LAYERS.values(), lambda: L2SelfAttention(4, 2)], ids=[*LAYERS, "L2"])
def test_tokens_of_another_width_are_refused_in_words(make):
    with pytest.raises(ValueError, match=r"x must have shape \[batch, tokens, 4\]; got \[2, 5, 3\]"):
        report(make(), tokens(features=3))


def test_tokens_that_are_not_numbers_are_refused():
    with pytest.raises(ValueError, match="x must be finite"):
        report(torch.nn.MultiheadAttention(4, 2, batch_first=True), tokens() * math.nan)


transformers_only = pytest.mark.filterwarnings("ignore")


@transformers_only
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_layers_of_hugging_face_are_recognised(kind):
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    if kind == "bert":
        layer = hf.BertModel(hf.BertConfig(**sizes)).encoder.layer[0].attention.self
    else:
        layer = hf.GPT2Model(hf.GPT2Config(**sizes)).h[0].attn
    found = report(layer, tokens(features=8), norms=["2"])
    assert ("causal" in found.note) == (kind == "gpt2")
    assert all(value >= found.local["2"] for value in bounds(found, "2").values()) and found.bounds


@pytest.mark.parametrize("kind", ["dot_product", "l2_tied"])
def test_layers_of_character_models_are_no_modules_that_are_known(kind):
    layer = PairAttention(8, 2, kind=kind, max_tokens=5, position_bias=False)
    assert DotProductHeads.of(layer) is None
    assert "local" in str(report(layer, torch.randn(1, 5, 8)))


def test_a_bound_that_is_declared_in_one_norm_is_told():
    found = report(Declared(torch.nn.Tanh(), 3, 0.999, structure="tokenwise"), torch.randn(1, 4, 3))
    assert [(bound.name, bound.norm) for bound in found.bounds if bound.name == "declared"] == [("declared", "token")]
    assert "No bound" not in str(found)
