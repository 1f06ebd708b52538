"""Log LongPPL during training: key tokens by a frozen evaluator, likelihoods by the trained model."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from callbacks.same_names import check_single
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import scan_token_mask, span_token_mask
from lightning_modules.functional.influence import check_gamma
from lightning_modules.metrics import LongPerplexity
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.evaluator import EvaluatedDocument, Evaluator
from lightning_modules.scoring.key_tokens import (
    Coverage,
    Tokens,
    document_tokens,
    measure_coverage,
    transfer_soft_influence,
)
from lightning_modules.scoring.token_scores import read_key_spans, text_sha256

_COUNTS = 4 + len(Coverage._fields)


class ExternalEvaluator(Callback):
    """Logs LongPPL in validation and test: key tokens by an evaluator, likelihoods by the trained model.

    It logs ``val/longppl``, ``val/longppl_soft``, ``val/key_tokens``, ``val/key_token_share`` and
    ``val/documents_without_key_tokens`` (``test/..`` in test), with histograms of the evaluator's long-short
    difference and long-context log-likelihood. ``val/documents_aligned_by_characters`` counts documents whose key
    tokens were mapped by characters; ``val/tokens_sharing_characters`` and ``val/tokens_without_characters`` are
    fractions of the model's tokens, ``val/evaluator_tokens_..`` of the evaluator's. The evaluator scores each document
    once and stores the scores, so other thresholds, later epochs and other models need no second pass. Its memory is
    freed after each evaluation. It is not part of the module: it is neither optimized nor checkpointed nor cast.

    Args:
        evaluator: Hub id or local folder of the long-context model that finds key tokens. Its tokenizer may differ
            from that of the trained model.
        key_spans: Instead of an evaluator, a folder of precomputed character spans of the validation texts, in the
            format of the paper's authors: ``[start, end];[start, end];..``. A document's file ends in ``.txt`` and is
            named by its name, by its id (the first word of the name) or by the SHA-256 of its text.
        gamma: Largest weight of soft LongPPL.
        options: The other fields of `lightning_modules.scoring.config.EvaluatorConfig`.

    Raises:
        ValueError: If not exactly one of ``evaluator`` and ``key_spans`` is given, it does not exist, or a threshold is
            not valid; at setup, if there are several callbacks, whose values would be averaged under one name.
    """

    def __init__(
        self,
        evaluator: str | None = None,
        key_spans: str | None = None,
        *,
        gamma: float = 5.0,
        **options: Any,
    ) -> None:
        if (evaluator is None) == (key_spans is None):
            raise ValueError(f"Set either `evaluator` or `key_spans`, got {evaluator!r} and {key_spans!r}.")
        if key_spans is not None and not Path(key_spans).is_dir():
            raise ValueError(f"`key_spans` must be a folder of `<document name>.txt` files, got '{key_spans}'.")
        check_gamma(gamma)
        self.config = EvaluatorConfig(evaluator or "", **options)
        self.gamma, self.key_spans = gamma, key_spans
        self.evaluator = None if evaluator is None else Evaluator(self.config)
        self.longppl = LongPerplexity()
        self.longppl_soft = LongPerplexity()
        self._counts = torch.zeros(_COUNTS, dtype=torch.float64)
        self.evaluated: dict[str, EvaluatedDocument] = {}  # this process's documents, by SHA-256
        self._drawn: set[str] = set()
        self._stored_tokenizer: PreTrainedTokenizerFast | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        names = "val/longppl, val/key_tokens, .."
        check_single(trainer, ExternalEvaluator, lambda other: repr(other.key_spans or other.config.evaluator), names)
        if self.config.key_tokens == "authors" and stage != "predict":
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            name, revision = getattr(data, "tokenizer_name", None), getattr(data, "tokenizer_revision", None)
            if name is None:
                raise ValueError("`key_tokens: authors` needs a data module with a `tokenizer_name`: use `paper`.")
            self._stored_tokenizer = load_tokenizer(name, revision=revision, trimmed_offsets=True)

    def read(self, batch: PackedBatch, row: int) -> Tokens:
        """Return the tokens of a row's document, with the offsets that the alignment rule uses."""
        tokens = document_tokens(batch, row)
        if self._stored_tokenizer is None:
            return tokens
        return tokens._replace(offsets=stored_offsets(batch["text"][row], tokens, self._stored_tokenizer))

    def influence(self, batch: PackedBatch, row: int, device: torch.device) -> tuple[Tensor, Tensor | None, Coverage]:
        """Return key tokens and soft weights of a row's one document, and its coverage.

        They are ``[T]`` bool and ``[T]`` float64, both 0 where a token is not scored. Precomputed spans have no soft
        weights.
        """
        text, name, tokens = batch["text"][row], batch["names"][row], self.read(batch, row)
        scored = batch["labels"][row].ne(IGNORE_INDEX).cpu()
        hard, soft = torch.zeros_like(scored), torch.zeros(len(scored), dtype=torch.float64)
        end = len(tokens.ids)
        if self.evaluator is None:
            spans = self._precomputed_spans(text, name)
            authors = self.config.key_tokens == "authors"
            hard[:end] = (scan_token_mask if authors else span_token_mask)(tokens.offsets, spans)
            return hard & scored, None, measure_coverage(tokens, None, "authors" if authors else "characters")
        document = self.evaluator.evaluate(text, tokens, device=device, name=name)
        self.evaluated[document.scores.text_sha256] = document
        hard[:end] = document.key
        soft[:end] = transfer_soft_influence(document.scores, tokens, gamma=self.gamma)
        return hard & scored, soft * scored, document.coverage

    def _precomputed_spans(self, text: str, name: str) -> Tensor:
        """Read the spans of a document from the file named by its name, its id or the hash of its text."""
        stems = [name.replace("/", "_"), *name.replace("/", "_").split()[:1], text_sha256(text)]
        paths = [Path(str(self.key_spans)) / f"{stem}.txt" for stem in stems if len(stem) < 200]
        found = next((path for path in paths if path.is_file()), None)
        if found is None:
            names = " or ".join(f"'{path.name}'" for path in dict.fromkeys(paths))
            raise FileNotFoundError(
                f"Document '{name}' has no precomputed key spans in '{self.key_spans}': expected {names}."
            )
        return read_key_spans(found, merge=self.config.key_tokens == "paper")

    def _draw_histograms(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Draw the evaluator's scores of this process, once for each set of documents because they do not change."""
        if not self.evaluated or set(self.evaluated) <= self._drawn or trainer.sanity_checking:
            return
        self._drawn |= set(self.evaluated)
        long = torch.cat([document.scores.long for document in self.evaluated.values()])
        difference = long - torch.cat([document.scores.short for document in self.evaluated.values()])
        compared = difference != 0  # tokens without a short context would be one large bar at 0
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and compared.any():
                step = trainer.global_step
                logger.experiment.add_histogram(f"{stage}/evaluator_lsd_nats", difference[compared], step)
                logger.experiment.add_histogram(f"{stage}/evaluator_lcl_nats", long[compared], step)

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for metric in (self.longppl, self.longppl_soft):
            metric.to(pl_module.device).reset()
        self._counts = torch.zeros(_COUNTS, dtype=torch.float64)
        self.evaluated = {}

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: PackedBatch, *_: Any
    ) -> None:
        if "text" not in batch:
            raise ValueError("`ExternalEvaluator` needs a data module whose batches have `text` and `offsets`.")
        for row, text in enumerate(batch["text"]):
            if not text:  # a sequence that only keeps the processes in lockstep
                if self.evaluator is not None:
                    self.evaluator.join(device=pl_module.device)
                continue
            log_likelihood = outputs["log_likelihood"][row]
            hard, soft, coverage = self.influence(batch, row, pl_module.device)
            self.longppl.update(log_likelihood, hard.to(log_likelihood.device))
            if soft is not None:
                self.longppl_soft.update(log_likelihood, soft.to(log_likelihood.device))
            scored = batch["labels"][row].ne(IGNORE_INDEX).sum()
            counts = [hard.sum(), scored, not hard.any(), 1, *coverage]
            self._counts += torch.tensor(counts, dtype=torch.float64)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stage = "test" if trainer.testing else "val"
        counts = trainer.strategy.reduce(self._counts.to(pl_module.device), reduce_op="sum")
        key_tokens, scored, without, documents = counts[:4].tolist()
        coverage = Coverage(*counts[4:].tolist())
        values = {
            "longppl": self.longppl.compute(),
            "key_tokens": key_tokens,
            "key_token_share": key_tokens / max(scored, 1),
            "documents_without_key_tokens": without,
            "documents_aligned_by_characters": coverage.by_characters,
            **coverage.fractions(),
        }
        if self.evaluator is not None:
            values["longppl_soft"] = self.longppl_soft.compute()
        if without:
            rank_zero_warn(
                f"{without:.0f} of {documents:.0f} {stage} documents have no key token"
                + (": LongPPL is undefined (NaN)." if key_tokens == 0 else " and do not count in LongPPL.")
                + " They may be too short for `context_length`, or the evaluator may not use the long context."
            )
        if (warning := coverage.warning()) is not None:
            rank_zero_warn(f"{stage} documents: {warning}")
        for name, value in values.items():
            value = torch.as_tensor(value, dtype=torch.float32)
            pl_module.log(f"{stage}/{name}", value, prog_bar=name == "longppl", sync_dist=True)
        self._draw_histograms(trainer, pl_module, stage)
        if self.evaluator is not None:
            self.evaluator.release()

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_test_epoch_end = on_validation_epoch_end


def stored_offsets(text: str, tokens: Tokens, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the ``[N, 2]`` offsets of a document's tokens by the unmodified tokenizer, which may trim spaces."""
    for special in (False, True):
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=special)
        if encoding.ids[: len(tokens.ids)] == tokens.ids.tolist():
            return torch.tensor(encoding.offsets[: len(tokens.ids)])
    raise ValueError("`key_tokens: authors`: the document's tokens are not those of the data module's tokenizer.")
