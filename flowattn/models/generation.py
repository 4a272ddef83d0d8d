"""Writes text with a character model, character by character, from what attention keeps of those before."""

from __future__ import annotations

import copy
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowattn.checks import check_positive
from flowattn.models.transformer import CharTransformer


@torch.no_grad()
def generate(
    model: CharTransformer,
    prompt: Int[Tensor, "texts given"],
    num_characters: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    num_symbols: int | None = None,
    cache: bool = True,
    seed: int = 0,
) -> Int[Tensor, "texts all"]:
    r"""Each prompt, followed by characters drawn from the model one after another.

    .. math:: p(c) \propto e^{l_c / \tau} \text{ for the } k \text{ largest logits } l_c

    Once the text is longer than the model can see, it goes on from its last `max_tokens` / 2 characters. With the
    cache only the new character is computed: dot-product attention keeps keys and values, L2 attention the one z of
    each head, and its rows are scaled by their position alone. Computed in double precision, where both ways give
    the same characters.

    Args:
        model: the model; it is not changed.
        prompt: at least one character per text.
        num_characters: how many to add.
        temperature: 0 takes the most probable character always.
        top_k: how many characters may be drawn; None for all.
        num_symbols: how many symbols the alphabet has, if fewer than the model.
        cache: whether to keep what attention needs, or to compute all characters again for each new one.
        seed: of the draws.

    Cost: O(N D) per character and layer with the cache, N times that without, beside the feed-forward parts.

    Example:
        >>> model = CharTransformer(features=16, num_layers=1, max_tokens=8)
        >>> text = torch.tensor([[3, 1, 4]])
        >>> generate(model, text, 9).equal(generate(model, text, 9, cache=False))
        True
    """
    check_positive(num_characters=num_characters)
    if num_symbols is not None:
        check_positive(num_symbols=num_symbols)
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt must have shape [texts, characters] with a character at least; got {prompt.shape}.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be at least 0; got temperature={temperature}.")
    most = model.num_symbols if num_symbols is None else min(num_symbols, model.num_symbols)
    if top_k is not None and not 1 <= top_k <= most:
        raise ValueError(f"top_k must be None or 1 to num_symbols={most}; got top_k={top_k}.")
    model = copy.deepcopy(model).eval().double()
    random = torch.Generator().manual_seed(seed)
    text, kept, first = prompt, None, max(0, prompt.shape[1] - model.max_tokens)
    for _ in range(num_characters):
        if text.shape[1] - first > model.max_tokens:
            first, kept = text.shape[1] - max(1, model.max_tokens // 2), None
        if cache:
            known = first if kept is None else first + kept[0]
            logits, kept = model.extend(text[:, known:], kept)
        else:
            logits = model(text[:, first:])
        text = torch.cat([text, _draw(logits[:, -1, :most], temperature, top_k, random)], 1)
    return text


def _draw(
    logits: Float[Tensor, "texts symbols"], temperature: float, top_k: int | None, random: torch.Generator
) -> Int[Tensor, "texts 1"]:
    """One character each. The number drawn does not depend on the logits, so that all ways draw the same."""
    uniform = torch.rand(len(logits), 1, generator=random, dtype=torch.float64).to(logits.device)
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    below = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1).cumsum(-1)
    return (below <= uniform * below[:, -1:]).sum(-1, keepdim=True).clamp_max(logits.shape[-1] - 1)
