"""Trains a flow of sequences by maximum likelihood."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from nflows.flows import Flow
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from pytorch_lightning.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from torch import Tensor

from flowattn.context import split_context, zero_padding
from flowattn.data.batch import Batch
from flowattn.flows import MeanFreeNormal
from flowattn.metrics import Likelihood, lengths
from flowattn.training.ema import EMA
from flowattn.training.exact import exact_logdets
from flowattn.training.guards import check_batch, check_loss
from flowattn.training.report import Report
from flowattn.training.samples import write_samples
from flowattn.training.schedules import WarmupCosine
from flowattn.transforms.standardize import Standardize


class DensityModule(LightningModule):
    r"""The density of sequences that a flow learns, in the units of the data.

    .. math:: \log p(X) = \log q\bigl((X - \mu) / \sigma\bigr) - N \sum_k \log \sigma_k

    q is the flow; the mean and the scale of each feature are read off the train split when training starts, and are
    part of every checkpoint. Where the flow is one of sequences whose tokens add up to zero, such as `ParticleFlow`,
    nothing is subtracted, all features have one scale, and N - 1 tokens count.

    Training minimises the negative log-likelihood per dimension of a full sequence. Logs `train/nll` in nats per
    sequence, and what `flowattn.metrics` has, `nll`, `nll_error`, `token_nll` and `bpd`, with `val/` and `test/` before
    it.

    Args:
        flow: makes the flow from the event shape: a class of flows, such as `flowattn.flows.AttentionFlow`.
        event_shape: the largest number of tokens and their width; the data's, on the command line.
        optimizer: makes the optimiser from the parameters.
        scheduler: makes a schedule of the learning rate from the optimiser; it steps after every batch.
        ema: the decay of an average of the weights that is used in their place; None for the weights themselves.
        standardize: whether the data are standardised.
        exact_test: whether `test` and `predict` compute log-determinants exactly, whatever training estimates.
    """

    def __init__(
        self,
        flow: Callable[[Sequence[int]], Flow],
        event_shape: Sequence[int],
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable | None = None,
        ema: float | None = None,
        standardize: bool = True,
        exact_test: bool = True,
    ) -> None:
        super().__init__()
        if ema is not None and not 0 < ema < 1:
            raise ValueError(f"ema must be between 0 and 1, or None for no average; got ema={ema}.")
        self.tokens, self.features = event_shape
        self.flow = flow((self.tokens, self.features))
        self.is_mean_free = isinstance(self.flow._distribution, MeanFreeNormal)
        self.standardize = Standardize(self.features)
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.ema = ema
        self.should_standardize = standardize
        self.exact_test = exact_test
        self.likelihood = Likelihood(self.features, self.is_mean_free)
        self._report: Report | None = None
        self._exact = ExitStack()

    # -- the density

    def log_prob(
        self, inputs: Float[Tensor, "batch tokens features"], context: Tensor | None = None
    ) -> Float[Tensor, " batch"]:
        """The log-density of each sequence, in nats and in the units of the data."""
        outputs, logabsdet = self.standardize(inputs, context)
        if self.is_mean_free:  # one of the tokens is given by the others
            logabsdet = logabsdet * (1 - 1 / lengths(inputs, context))
        return self.flow.log_prob(outputs, context) + logabsdet

    @torch.no_grad()
    def sample(self, num_samples: int, context: Tensor | None = None) -> Float[Tensor, "samples tokens features"]:
        """So many sequences; with a context, one for each of its so many rows."""
        if context is None:
            return self.standardize.inverse(self.flow.sample(num_samples))[0]
        if len(context) != num_samples:
            raise ValueError(f"context must have num_samples rows; got {len(context)} and num_samples={num_samples}.")
        return self.standardize.inverse(self.flow.sample(1, context).squeeze(1), context)[0]

    def reconstruct(self, batch: Batch) -> Float[Tensor, "batch tokens features"]:
        """Sequences that went to the noise and came back, zero at padding."""
        inputs, _ = self.standardize(batch.inputs, batch.context)
        noise = self.flow.transform_to_noise(inputs, batch.context)
        outputs, _ = self.flow._transform.inverse(noise, batch.context)
        _, mask = split_context(batch.context, batch.inputs)
        return zero_padding(self.standardize.inverse(outputs, batch.context)[0], mask)

    # -- training

    def setup(self, stage: str) -> None:
        width = getattr(getattr(self.trainer, "datamodule", None), "context_features", None)
        if width is not None and not _takes_context(self.flow):
            raise ValueError(
                f"{type(self.flow).__name__} must take the context of {type(self._data()).__name__}, which is {width} "
                f"wide; got context_features=None. Set it to {width}, or leave the context out of the data."
            )
        if stage == "fit" and self.should_standardize:  # before a checkpoint is loaded, which has its own
            mean, scale = (moment.to(self.device) for moment in self._data().moments())
            if self.is_mean_free:  # any other map of tokens would leave the space, or turn balls into ellipsoids
                mean, scale = torch.zeros_like(mean), scale.square().mean().sqrt().expand_as(scale)
            self.standardize.fix(mean, scale)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer)
        if isinstance(scheduler, WarmupCosine) and scheduler.total_steps is None:
            scheduler.total_steps = int(self.trainer.estimated_stepping_batches)
        if isinstance(scheduler, ReduceLROnPlateau):
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": scheduler.monitor}}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_callbacks(self) -> list[Callback]:
        return [] if self.ema is None else [EMA(self.ema)]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        where = f"train batch {batch_idx}, step {self.global_step}"
        check_batch(batch, where)
        nll = -self.log_prob(batch.inputs, batch.context).mean()
        check_loss(nll, where)
        self.log("train/nll", nll.detach(), prog_bar=True, batch_size=len(batch.inputs))
        return nll / (self.tokens * self.features)

    # -- evaluation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, f"val batch {batch_idx}")

    def on_validation_epoch_end(self) -> None:
        self._log_likelihood("val")

    def on_test_start(self) -> None:
        self._use_exact_logdets()
        data = self._data()
        references = data.references(mean_free=True) if self.is_mean_free else data.references()
        self._report = Report(
            data, type(self.flow).__name__, references, self.device, self.exact_test, self.is_mean_free
        )

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        log_prob = self._evaluate(batch, f"test batch {batch_idx}")
        assert self._report is not None
        self._report.add(batch, log_prob)

    def on_test_epoch_end(self) -> None:
        self._log_likelihood("test")

    def on_test_end(self) -> None:
        self._exact.close()
        assert self._report is not None
        self._report.show(Path(self.trainer.default_root_dir), is_first=self.trainer.is_global_zero)
        self._report = None

    def on_predict_start(self) -> None:
        self._use_exact_logdets()

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The row, the length, the log-density and the log-density per token of each sequence."""
        check_batch(batch, f"predict batch {batch_idx}")
        log_prob, length = self.log_prob(batch.inputs, batch.context), lengths(batch.inputs, batch.context)
        return {"index": batch.index, "length": length, "log_prob": log_prob, "log_prob_per_token": log_prob / length}

    def on_predict_end(self) -> None:
        self._exact.close()

    def write_samples(
        self, out: Path, *, num_samples: int, batch_size: int, datamodule: LightningDataModule | None
    ) -> list[Path]:
        """Writes samples and a picture of them beside data, and says where."""
        return write_samples(self.sample, out, num_samples, batch_size, datamodule, self.device)

    def _data(self) -> Any:
        datamodule = getattr(self.trainer, "datamodule", None)
        if datamodule is None:
            raise ValueError("DensityModule needs a data module: trainer.fit(model, datamodule=...).")
        return datamodule

    def _use_exact_logdets(self) -> None:
        if self.exact_test:
            self._exact.enter_context(exact_logdets(self.flow))

    def _evaluate(self, batch: Batch, where: str) -> Tensor:
        check_batch(batch, where)
        log_prob = self.log_prob(batch.inputs, batch.context)
        self.likelihood.update(log_prob, lengths(batch.inputs, batch.context))
        return log_prob

    def _log_likelihood(self, stage: str) -> None:
        # All ranks come here, also one that had no batch; what is computed is the same on all of them.
        values = {f"{stage}/{name}": value for name, value in self.likelihood.values().items()}
        self.likelihood.reset()
        self.log_dict(values, sync_dist=True)


def _takes_context(flow: Flow) -> bool:
    """Whether a part of a flow says that it looks at features in the context, or none says anything about it."""
    widths = [part.context_features for part in flow.modules() if hasattr(part, "context_features")]
    nflows = any("context" in name for name, _ in flow.named_modules())  # its networks have a context_layer
    return nflows or not widths or any(width is not None for width in widths)
