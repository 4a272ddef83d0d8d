r"""The diagonal blocks J_ii of a Jacobian over tokens, dense or in the factors of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from flowattn.checks import without_autocast
from flowattn.contractions.head_logdet import head_logabsdet
from flowattn.kernels.determinants import logabsdet_plus_identity


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
        return logabsdet_plus_identity(self.blocks).sum(-1)


@dataclass(frozen=True)
class HeadBlocks(TokenBlocks):
    r"""The blocks of attention, in factors.

    .. math:: J_{ii} = c_i\, B^T C_i W^T, \qquad C_i = \operatorname{diag}(C_i^1, \dots, C_i^H)

    By Sylvester's identity :math:`\det(I_D + c B^T C W^T) = \det(I_{Hd} + c\, C K)` with :math:`K = W^T B^T`, the
    same for all tokens: a product of d x d blocks per token in place of D x D matrices, see `head_logdet`.
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
            return head_logabsdet(self._scaled_C(), K)

    def _scaled_C(self) -> Tensor:
        return self.C * (self.c if self.c.ndim == 1 else self.c.unsqueeze(1))[..., None, None]
