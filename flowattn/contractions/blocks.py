r"""The diagonal blocks J_ii of a Jacobian over tokens, dense or in the factors of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowattn.checks import nothing_is_recorded, without_autocast


class TokenBlocks(ABC):
    """One square or oblong block per token, [B, N, D_out, D_in]."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The blocks as one tensor."""

    @abstractmethod
    def scaled(self, scale: Tensor) -> TokenBlocks:
        """The block of each token times its entry of scale, [N], [1] or [B, N]."""

    @abstractmethod
    def logabsdet(self) -> Tensor:
        """The sum over tokens of log|det(I + J_ii)|, [B]."""


@dataclass(frozen=True)
class DenseBlocks(TokenBlocks):
    """Blocks that are held as they are."""

    blocks: Tensor

    def dense(self) -> Tensor:
        return self.blocks

    def scaled(self, scale: Tensor) -> DenseBlocks:
        return DenseBlocks(self.blocks * scale[..., None, None])

    def logabsdet(self) -> Tensor:
        identity = torch.eye(self.blocks.shape[-1], dtype=self.blocks.dtype, device=self.blocks.device)
        return torch.linalg.slogdet(identity + self.blocks).logabsdet.sum(-1)


@dataclass(frozen=True)
class HeadBlocks(TokenBlocks):
    r"""The blocks of attention, in factors.

    .. math:: J_{ii} = c_i\, B^T C_i W^T, \qquad C_i = \operatorname{diag}(C_i^1, \dots, C_i^H)

    By Sylvester's identity :math:`\det(I_D + c B^T C W^T) = \det(I_{Hd} + c\, C K)` with :math:`K = W^T B^T`, the
    same for all tokens: a product of d x d blocks per token in place of D x D matrices.
    """

    C: Tensor  # [B, H, N, d, d]
    W: Tensor  # [D_in, H d]
    B: Tensor  # [H d, D_out]
    c: Tensor  # [N], [1] or [B, N]

    def dense(self) -> Tensor:
        batch, heads, tokens, width, _ = self.C.shape
        with without_autocast(self.C):
            W = self.W.mT.unflatten(0, (heads, width))
            right = self._scaled_C().permute(1, 3, 0, 2, 4).reshape(heads, width * batch * tokens, width) @ W
            shape = self.B.shape[1], batch, tokens, len(self.W)
            return (self.B.mT @ right.reshape(heads * width, batch * tokens * len(self.W))).view(shape).movedim(0, 2)

    def scaled(self, scale: Tensor) -> HeadBlocks:
        return HeadBlocks(self.C, self.W, self.B, self.c * scale)

    def logabsdet(self) -> Tensor:
        features, inner = self.W.shape
        if inner > features or torch.compiler.is_compiling():
            return DenseBlocks(self.dense()).logabsdet()
        with without_autocast(self.C):
            K = (self.B @ self.W).mT.unflatten(0, (self.C.shape[1], -1))
            if nothing_is_recorded():
                return _plain_head_logabsdet(self._scaled_C(), K)
            logabsdet: Tensor = _HeadLogAbsDet.apply(self._scaled_C(), K)[0]
        return logabsdet

    def _scaled_C(self) -> Tensor:
        return self.C * (self.c if self.c.ndim == 1 else self.c.unsqueeze(1))[..., None, None]


class _HeadLogAbsDet(torch.autograd.Function):
    r"""The sum over tokens of log|det(I + C_i K)| for C [B, H, N, d, d] and K [H, d, H d].

    Value and gradient come from the inverses :math:`(I + C_i K)^{-1}`, a few sequences at a time, so that none of the
    N matrices H d x H d outlives the cache. The inverse is by blocks of whole heads, without pivoting between them:
    the leading blocks belong to the map of the first heads alone, which is as contractive as that of all, by either
    form of the bound that it was scaled with.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(C: Tensor, K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, heads, tokens, width, _ = C.shape
        inner = heads * width
        parts = []
        step = max(1, 2**20 // (tokens * inner * inner))
        for start in range(0, max(1, batch), step):
            rows = C[start : start + step].flatten(2, 3)
            product = (rows @ K).unflatten(2, (tokens, width)).transpose(1, 2).flatten(2, 3)
            product.diagonal(dim1=-2, dim2=-1).add_(1)
            inverse, logabsdets = _invert_by_heads(product.flatten(0, 1), width)
            columns = inverse.view(len(rows), tokens, inner, heads, width).permute(0, 3, 1, 4, 2).flatten(2, 3)
            dC = (columns @ K.mT).unflatten(2, (tokens, width))
            parts.append((logabsdets.view(len(rows), tokens).sum(-1), dC, rows.mT @ columns))
        logabsdet, dC, dK = map(torch.cat, zip(*parts, strict=True))
        return logabsdet, dC, dK

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> Any:
        C, K, dC, dK = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.func.vjp(_plain_head_logabsdet, C, K)[1](g)
        return dC * g[:, None, None, None, None], (g[:, None, None, None] * dK).sum(0)

    @staticmethod
    def jvp(ctx: Any, C_change: Tensor | None, K_change: Tensor | None) -> Any:
        C, K = ctx.saved_tensors  # of `forward` the gradients are known, but not how they change
        product = _head_product(C, K)
        change = torch.zeros_like(product)
        if C_change is not None:
            change = change + _head_product(C_change, K)
        if K_change is not None:
            change = change + _head_product(C, K_change)
        identity = torch.eye(product.shape[-1], dtype=product.dtype, device=product.device)
        relative = torch.linalg.solve(identity + product, change)
        return relative.diagonal(dim1=-2, dim2=-1).sum((-2, -1)), None, None


def _plain_head_logabsdet(C: Tensor, K: Tensor) -> Tensor:
    return DenseBlocks(_head_product(C, K)).logabsdet()


def _head_product(C: Tensor, K: Tensor) -> Tensor:
    """The matrices C_i K, [B, N, H d, H d]."""
    return torch.einsum("bhnij,hjk->bnhik", C, K).flatten(2, 3)


def _invert_by_heads(A: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The inverses of A [batch, n, n] and log|det A|, by halves that hold whole heads."""
    n = A.shape[-1]
    if n <= max(width, 8):  # products do not pay for less
        factors, pivots, _ = torch.linalg.lu_factor_ex(A)
        identity = torch.eye(n, dtype=A.dtype, device=A.device).expand_as(A)
        logabsdet = factors.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        return torch.linalg.lu_solve(factors, pivots, identity), logabsdet
    h = n // width // 2 * width
    above, below = A[:, :h, h:], A[:, h:, :h]
    P, logabsdet_P = _invert_by_heads(A[:, :h, :h], width)
    left, right = below @ P, P @ above
    S, logabsdet_S = _invert_by_heads(torch.baddbmm(A[:, h:, h:], left, above, alpha=-1), width)
    inverse = torch.empty_like(A, memory_format=torch.contiguous_format)
    corner = right @ S
    inverse[:, :h, :h] = torch.baddbmm(P, corner, left)
    inverse[:, :h, h:] = corner.neg_()
    inverse[:, h:, :h] = (S @ left).neg_()
    inverse[:, h:, h:] = S
    return inverse, logabsdet_P + logabsdet_S
