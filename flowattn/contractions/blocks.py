r"""The diagonal blocks J_ii of a Jacobian over tokens, dense or in the factors of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class TokenBlocks(ABC):
    """One square or oblong block per token, [B, N, D_out, D_in]."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The blocks as one tensor."""

    @abstractmethod
    def scaled(self, scale: Tensor) -> TokenBlocks:
        """The block of each token times its entry of scale, [N], [1] or [B, N]."""

    def logabsdet(self) -> Tensor:
        """log|det(I + J_ii)| of every token, [B, N]."""
        return _logabsdet_plus_identity(self.dense())


@dataclass(frozen=True)
class DenseBlocks(TokenBlocks):
    """Blocks that are held as they are."""

    blocks: Tensor

    def dense(self) -> Tensor:
        return self.blocks

    def scaled(self, scale: Tensor) -> DenseBlocks:
        return DenseBlocks(self.blocks * scale[..., None, None])


@dataclass(frozen=True)
class HeadBlocks(TokenBlocks):
    r"""The blocks of attention, in factors.

    .. math:: J_{ii} = c_i\, B^T C_i W^T, \qquad C_i = \operatorname{diag}_h(C_i^h) \in R^{Hd \times Hd}

    By Sylvester's identity :math:`\det(I_D + c B^T C W^T) = \det(I_{Hd} + c\, C K)` with :math:`K = W^T B^T`, the
    same for all tokens: a product of d x d blocks per token in place of D x D matrices.
    """

    C: Tensor  # [B, H, N, d, d]
    W: Tensor  # [D_in, H d]
    B: Tensor  # [H d, D_out]
    c: Tensor  # [N], [1] or [B, N]

    def dense(self) -> Tensor:
        heads, width = self.C.shape[1], self.C.shape[-1]
        right = torch.einsum("bhnij,khj->bnhik", self.C, self.W.unflatten(1, (heads, width)))
        return self.c[..., None, None] * (self.B.mT @ right.flatten(2, 3))

    def scaled(self, scale: Tensor) -> HeadBlocks:
        return HeadBlocks(self.C, self.W, self.B, self.c * scale)

    def logabsdet(self) -> Tensor:
        features, inner = self.W.shape
        if inner > features:
            return super().logabsdet()
        heads, width = self.C.shape[1], self.C.shape[-1]
        K = (self.B @ self.W).mT.unflatten(0, (heads, width))
        scaled = self.C * (self.c if self.c.ndim == 1 else self.c.unsqueeze(1))[..., None, None]
        product = torch.einsum("bhnij,hjk->bnhik", scaled, K)
        return _logabsdet_plus_identity(product.flatten(2, 3))


def _logabsdet_plus_identity(blocks: Tensor) -> Tensor:
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    return torch.linalg.slogdet(identity + blocks).logabsdet
