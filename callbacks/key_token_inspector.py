"""Show key tokens and token weights in TensorBoard."""

from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from callbacks.external_evaluator import ExternalEvaluator
from callbacks.requirements import check_names, require_long_context_lm
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import ShortScores
from lightning_modules.functional.equations import check_thresholds
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.context_extension.rotary_checks import check_static
from lightning_modules.models.short_context import short_log_likelihood
from lightning_modules.scoring.records import Definition
from lightning_modules.scoring.token_scores import scores_of_row
from lightning_modules.visualization.tensorboard.layout import CUSTOM_SCALARS
from lightning_modules.visualization.tensorboard.panels import (
    EvaluationPanels,
    InspectedDocument,
    draw_weights,
)
from lightning_modules.visualization.tensorboard.sums import PositionSums, WeightSample


class KeyTokenInspector(Callback):
    """Shows in TensorBoard which tokens need the long context, and how the trained model scores them.

    For some validation documents: a table of the tokens that the long context helps most, by the evaluator once and by
    the model at each evaluation, and the model's log-likelihood of key tokens. For all documents: loss by context
    length with its power law (``val/power_law_..``), and the evaluator's long-short differences and log-likelihoods.
    For training: the token weights of the objective and the model's long-short differences. The custom scalars page
    shows LongPPL next to perplexity.

    The evaluator's scores come from the `ExternalEvaluator` among the callbacks; without it the model's own scores are
    used. An evaluation costs the short passes of the inspected documents, and a fraction of a second for drawing each.
    With several processes, documents and weights come from the first one; losses by context length from all.

    Args:
        documents: Number of validation documents, from the first; or a list of names or ids (first words of names).
        short_context: Whether the trained model also scores the inspected documents in the short context.
        weights_every_n_steps: Optimizer steps between histograms of the token weights.
        alpha: Key tokens have a long-short difference above alpha, in nats; used only without an `ExternalEvaluator`.
        beta: Key tokens have a long-context log-likelihood above beta, in nats; used only without an
            `ExternalEvaluator`.
    """

    def __init__(
        self,
        documents: PositiveInt | list[str] = 2,
        short_context: bool = True,
        weights_every_n_steps: PositiveInt = 10,
        alpha: float = 2.0,
        beta: float = -2.0,
    ) -> None:
        check_thresholds(alpha, beta)
        self.documents = documents
        self.short_context = short_context
        self.weights_every_n_steps = weights_every_n_steps
        self.alpha = alpha
        self.beta = beta
        self._evaluator: ExternalEvaluator | None = None
        self._writers: list[Any] = []
        self._inspected: list[InspectedDocument] = []
        self._positions = PositionSums(1)
        self._weights = WeightSample()
        self._weights_step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module = require_long_context_lm(pl_module, self)
        check_names(trainer, KeyTokenInspector)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._evaluator = next((other for other in callbacks if isinstance(other, ExternalEvaluator)), None)
        if self._evaluator is None and not self.short_context:
            raise ValueError(
                "Without an `ExternalEvaluator`, key tokens need the model's own short context: set"
                " `short_context: true`, or add `callbacks.ExternalEvaluator`."
            )
        if self._evaluator is None:
            self._panels = EvaluationPanels(Definition(alpha=self.alpha, beta=self.beta))
        else:
            first = next(iter(self._evaluator.definitions.values()))
            self._panels = EvaluationPanels(first, precomputed=self._evaluator.evaluator is None)
        if not any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            rank_zero_warn("`KeyTokenInspector` has no effect, because the trainer has no `TensorBoardLogger`.")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._writers = []
        if isinstance(pl_module, LongContextLM):
            pl_module.token_observers.clear()

    def _open_panels(self, trainer: Trainer, pl_module: Any) -> None:
        """Find the TensorBoard writers, and write the layout of custom scalars, unless an evaluator has done so."""
        if self._writers:
            return
        self._writers = [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if self._writers and self.short_context:
            check_static(pl_module.backbone.base_model.config, compares=True)
        if not any(isinstance(each, ExternalEvaluator) for each in trainer.callbacks):  # type: ignore[attr-defined]
            for writer in self._writers:
                writer.add_custom_scalars(CUSTOM_SCALARS)

    # ------------------------------------------------------------------------------------------------------ training

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open_panels(trainer, pl_module)
        if not self._writers or not trainer.is_global_zero or not isinstance(pl_module, LongContextLM):
            return
        objective = pl_module.objective
        if not (objective.uses_short_context or objective.uses_stored):
            return  # every weight is 1

        def observe(long: Tensor, token_weights: Tensor, short: ShortScores | None, batch: PackedBatch) -> None:
            step = trainer.global_step + 1  # the step that this batch belongs to
            if step == 1 or step % self.weights_every_n_steps == 0:
                self._weights_step = step
                self._weights.add(long, token_weights, short, batch["labels"])

        pl_module.token_observers.append(observe)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not len(self._weights) or trainer.global_step < self._weights_step:  # the step has more batches
            return
        weights, differences = self._weights.take()
        objective: Any = pl_module.objective
        for writer in self._writers:
            draw_weights(writer, weights, differences, cap=objective.largest_weight, step=self._weights_step)

    # ---------------------------------------------------------------------------------------------------- evaluation

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open_panels(trainer, pl_module)
        self._inspected = []
        self._positions = PositionSums(1)

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: PackedBatch, *_: Any
    ) -> None:
        if trainer.sanity_checking or not self._writers:
            return
        long = outputs["log_likelihood"]
        scored = batch["labels"].ne(IGNORE_INDEX)
        self._positions.add(batch["position_ids"][scored].cpu(), -long[scored].cpu())
        rows = self._choose_rows(batch)
        short = self._score_short(trainer, pl_module, batch, rows, long)
        for row in rows:
            self._inspected.append(self._inspect_document(pl_module, batch, row, long[row], short[row]))

    def _choose_rows(self, batch: PackedBatch) -> list[int]:
        rows = [row for row, text in enumerate(batch["text"]) if text]
        if isinstance(self.documents, int):
            return rows[: self.documents - len(self._inspected)]
        return [row for row in rows if {batch["names"][row], *batch["names"][row].split()[:1]} & set(self.documents)]

    def _score_short(
        self, trainer: Trainer, pl_module: Any, batch: PackedBatch, rows: list[int], long: Tensor
    ) -> Tensor:
        """Return ``[B, T]`` short-context log-likelihoods of the rows, and the long-context ones elsewhere.

        If weights are sharded, all processes take part, even without rows to inspect.
        """
        if not self.short_context or not (rows or pl_module.backbone.is_sharded):
            return long
        wanted = torch.zeros_like(batch["labels"], dtype=torch.bool)
        wanted[rows] = True
        with trainer.precision_plugin.forward_context():
            short = short_log_likelihood(pl_module.backbone, batch, pl_module.short_context, wanted=wanted)
        return short.fill_missing(long)

    def _inspect_document(
        self, pl_module: Any, batch: PackedBatch, row: int, long: Tensor, short: Tensor
    ) -> InspectedDocument:
        tokens = batch["document_boundaries"][row][-1]
        key = scored = batch["labels"][row, :tokens].ne(IGNORE_INDEX).cpu()
        if self._evaluator is not None and self._panels.precomputed:
            key = scored & self._evaluator.key_tokens(batch, row, pl_module.device).mask
        return InspectedDocument(
            name=batch["names"][row],
            text=batch["text"][row],
            scores=scores_of_row(
                batch,
                row,
                long,
                short,
                evaluator="the model in training",  # a label only
                context_length=pl_module.short_context.context_length,
                stride=pl_module.short_context.stride,
            ),
            key=key,
            scored=scored,
        )

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not self._writers:
            return
        sums = trainer.strategy.reduce(self._positions.sums.to(pl_module.device), reduce_op="sum")
        self._positions.sums = sums.cpu()
        fit = self._positions.fit()
        if fit is not None:
            values = {f"val/power_law_{name}": value for name, value in fit._asdict().items()}
            pl_module.log_dict(values, sync_dist=True)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the panels: by now, all callbacks have their scores."""
        if trainer.sanity_checking or not trainer.is_global_zero or not self._writers:
            return
        if isinstance(self.documents, list) and len(self._inspected) < len(set(self.documents)):
            found = [document.name for document in self._inspected]
            rank_zero_warn(f"`KeyTokenInspector` found only {found} of `documents` in the first process.")
        evaluated = {} if self._evaluator is None else self._evaluator.evaluated
        self._panels.draw(
            self._writers, self._inspected, self._positions, evaluated=evaluated, step=trainer.global_step
        )
