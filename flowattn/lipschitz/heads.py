"""The weights of dot-product attention, whatever module they come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class DotProductHeads:
    r"""Dot-product attention on plain tokens, or on tokens with weights: a measure :math:`\sum_j a_j \delta_{x_j}`.

    .. math:: f(X)_i = \sum_h O_h \sum_j P^h_{ij} W^v_h x_j, \qquad
        P^h_{ij} \propto a_j \exp\bigl( (W^k_h x_j) \cdot (W^q_h x_i + b_h) \bigr)

    With :math:`A = W^{k,T} W^q` and :math:`V = O W^v` this is the attention of Castin et al.; the usual
    :math:`1/\sqrt d` is part of `query`. A bias of the keys changes nothing, one of the values no derivative.

    Example:
        >>> f = DotProductHeads.single(A=torch.eye(2), V=torch.eye(2))
        >>> f(torch.tensor([[[0.0, 0.0], [2.0, 4.0]]]))[0, 0]
        tensor([1., 2.])
    """

    query: Float[Tensor, "heads width features"]
    key: Float[Tensor, "heads width features"]
    value: Float[Tensor, "heads inner features"]
    out: Float[Tensor, "heads features_out inner"]
    query_bias: Float[Tensor, "heads width"]
    causal: bool = False

    @classmethod
    def single(
        cls, A: Float[Tensor, "features features"], V: Float[Tensor, "out features"], *, causal: bool = False
    ) -> DotProductHeads:
        r"""One head in the letters of Castin et al.: :math:`P_{ij} \propto \exp(x_j \cdot A x_i)` and values V x."""
        eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
        out = torch.eye(len(V), dtype=V.dtype, device=V.device)
        return cls(A[None], eye[None], V[None], out[None], A.new_zeros(1, len(A)), causal)

    @classmethod
    def of(cls, module: Any) -> DotProductHeads | None:
        """The weights of a module of dot-product attention, and None for any other.

        Known are `torch.nn.MultiheadAttention`, this package's DotProductSelfAttention without position bias, and
        the attention of BERT and GPT-2 in Hugging Face's transformers, by the names of their layers. What masks a
        call will use no module can tell; `report` finds out by comparing outputs.
        """
        if isinstance(module, nn.MultiheadAttention):
            return _of_torch(module)
        own = ("in_projection", "out_projection", "num_heads", "head_features", "causal")
        if _has(module, *own) and not getattr(module, "position_bias", None):
            q, k, v = module.in_projection.detach().chunk(3, -1)
            out = module.out_projection.detach().T
            return cls._split(q.T, k.T, v.T, out, module.num_heads, causal=bool(module.causal))
        if _has(module, "query", "key", "value", "num_attention_heads"):
            return _of_bert(module)
        if _has(module, "c_attn", "c_proj", "num_heads") and not getattr(module, "is_cross_attention", False):
            return _of_gpt2(module)
        return None

    @classmethod
    def _split(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        num_heads: int,
        bias: Tensor | None = None,
        causal: bool = False,
    ) -> DotProductHeads:
        """From matrices [inner, features] of all heads, [features, inner] for `out`."""
        query, key, value = (matrix.unflatten(0, (num_heads, -1)) for matrix in (q, k, v))
        scale = 1 / math.sqrt(query.shape[1])
        offset = query.new_zeros(query.shape[:2]) if bias is None else bias.reshape(query.shape[:2])
        joined = out.unflatten(1, (num_heads, -1)).movedim(1, 0)
        return cls(query * scale, key, value, joined, offset * scale, causal)

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> DotProductHeads:
        """The same weights of another type, on another device if one is given."""
        tensors = (self.query, self.key, self.value, self.out, self.query_bias)
        query, key, value, out, bias = (t.to(dtype=dtype, device=device) for t in tensors)
        return DotProductHeads(query, key, value, out, bias, self.causal)

    @property
    def A(self) -> Float[Tensor, "heads features features"]:
        return self.key.mT @ self.query

    @property
    def V(self) -> Float[Tensor, "heads features_out features"]:
        return self.out @ self.value

    def attend(
        self, x: Float[Tensor, "batch tokens features"], weights: Float[Tensor, "*batch tokens"] | None = None
    ) -> Float[Tensor, "batch heads tokens tokens"]:
        """The attention P of all heads."""
        x = x.unsqueeze(1)
        logits = (x @ self.query.mT + self.query_bias.unsqueeze(-2)) @ (x @ self.key.mT).mT
        if weights is not None:
            logits = logits + weights.log()[..., None, None, :]
        if self.causal:
            hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
            logits = logits.masked_fill(hidden, -math.inf)
        return logits.softmax(-1)

    def __call__(
        self, x: Float[Tensor, "batch tokens features"], weights: Float[Tensor, "*batch tokens"] | None = None
    ) -> Float[Tensor, "batch tokens features_out"]:
        """The attention's output, with weights that sum to anything."""
        heads = self.attend(x, weights) @ (x.unsqueeze(1) @ self.value.mT)
        return (heads @ self.out.mT).sum(1)


def _has(module: object, *names: str) -> bool:
    return all(hasattr(module, name) for name in names)


def _of_torch(module: nn.MultiheadAttention) -> DotProductHeads | None:
    if module.bias_k is not None or module.add_zero_attn:
        return None  # a token that is not among the inputs
    if module.in_proj_weight is None:
        if not module.embed_dim == module.kdim == module.vdim:
            return None
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        weights = list(module.in_proj_weight.chunk(3))
    q, k, v = (weight.detach() for weight in weights)
    bias = None if module.in_proj_bias is None else module.in_proj_bias.detach()[: module.embed_dim]
    return DotProductHeads._split(q, k, v, module.out_proj.weight.detach(), module.num_heads, bias)


def _of_bert(module: Any) -> DotProductHeads:
    q, k, v = (layer.weight.detach() for layer in (module.query, module.key, module.value))
    bias = None if module.query.bias is None else module.query.bias.detach()
    out = torch.eye(len(v), dtype=v.dtype, device=v.device)  # the layer after it is the one that joins the heads
    return DotProductHeads._split(q, k, v, out, module.num_attention_heads, bias)


def _of_gpt2(module: Any) -> DotProductHeads:
    q, k, v = module.c_attn.weight.detach().chunk(3, -1)
    bias = module.c_attn.bias.detach().chunk(3)[0]
    return DotProductHeads._split(q.T, k.T, v.T, module.c_proj.weight.detach().T, module.num_heads, bias, causal=True)
