"""Log LongPPL during training: key tokens by frozen evaluators, likelihoods by the trained model."""

import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from callbacks.evaluation_numbers import (
    Found,
    Influence,
    ScoredDocument,
    Thresholds,
    measure_alignment,
    measure_bits,
    measure_key_tokens,
    read_thresholds,
    write_documents,
)
from callbacks.requirements import check_names
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import scan_token_mask, span_token_mask
from lightning_modules.functional.checks import find_impossible
from lightning_modules.functional.influence import check_gamma
from lightning_modules.models.loading.provenance import Provenance
from lightning_modules.models.progress import count_tokens, show_progress
from lightning_modules.models.tokenization.encoding import encode_text
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
from lightning_modules.training.evaluation import join_key, validation_set_keys
from lightning_modules.training.monitoring.numerics import find_numerics
from lightning_modules.training.preemption import interruptible, raise_if_stopping
from lightning_modules.utilities.identity import content_hash
from lightning_modules.visualization.tensorboard.layout import CUSTOM_SCALARS


class ExternalEvaluator(Callback):
    """Logs LongPPL in validation and test: key tokens by an evaluator, likelihoods by the trained model.

    It logs ``val/longppl``, ``val/longppl_soft``, ``val/key_tokens``, ``val/key_token_share`` and
    ``val/documents_without_key_tokens`` (``test/..`` in test). ``val/documents_aligned_by_characters`` counts documents
    whose key tokens were mapped by characters; ``val/tokens_sharing_characters`` and ``val/tokens_without_characters``
    are fractions of the model's tokens, ``val/evaluator_tokens_..`` of the evaluator's. ``val/key_bits_per_byte``,
    ``val/bits_per_byte`` and ``val/longppl_per_evaluator_token`` do not depend on the model's tokenizer
    (`lightning_modules.functional.text_bits.TextBits`).

    With several validation sets (`data.validation_sets`), evaluators (one callback each, with a `name`) or
    `thresholds`, names are ``val/<set>/<evaluator>/<thresholds>/longppl``, without the parts of which there is one. The
    numbers of each document go to ``documents/`` in the folder of the run.

    A training is also evaluated before its first step. The evaluator scores each document once and stores the scores,
    so other thresholds, later epochs and other models need no second pass. Evaluators are loaded one after another,
    when the trained model has scored all documents, and freed. They are not part of the module: they are neither
    optimized nor checkpointed nor cast.

    Args:
        evaluator: Hub id or local folder of the long-context model that finds key tokens, or the addresses of servers,
            which need `tokenizer`. Its tokenizer may differ from that of the trained model.
        key_spans: Instead of an evaluator, a folder of precomputed character spans of the validation texts, in the
            format of the paper's authors: ``[start, end];[start, end];..``. A document's file ends in ``.txt`` and is
            named by its name, by its id (the first word of the name) or by the SHA-256 of its text.
        name: Name of the evaluator in logs and tables, needed if there are several.
        thresholds: Named thresholds instead of `alpha` and `beta`:
            ``{paper: {alpha: 2, beta: -2}, strict: {alpha: 4, beta: -1}}``.
        before_training: Whether a training is evaluated before its first step.
        gamma: Largest weight of soft LongPPL.
        options: The other fields of `lightning_modules.scoring.config.EvaluatorConfig`.
    """

    def __init__(
        self,
        evaluator: str | None = None,
        key_spans: str | None = None,
        *,
        name: str | None = None,
        thresholds: dict[str, dict[str, float]] | None = None,
        before_training: bool = True,
        gamma: float = 5.0,
        **options: Any,
    ) -> None:
        if (evaluator is None) == (key_spans is None):
            raise ValueError(f"Set either `evaluator` or `key_spans`, got {evaluator!r} and {key_spans!r}.")
        if key_spans is not None and not Path(key_spans).is_dir():
            raise ValueError(f"`key_spans` must be a folder of `<document name>.txt` files, got '{key_spans}'.")
        check_gamma(gamma)
        if name is not None and not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                f"`name` is a part of metric and file names: use letters, digits, '_', '-', '.', got {name!r}."
            )
        self.config = EvaluatorConfig(evaluator or "", **options)
        self.gamma = gamma
        self.key_spans = key_spans
        self.name = name
        self.before_training = before_training
        self.thresholds = read_thresholds(thresholds, Thresholds(self.config.alpha, self.config.beta))
        self.evaluator = None if evaluator is None else Evaluator(self.config)
        self.evaluated: dict[str, EvaluatedDocument] = {}  # this process's documents, by SHA-256
        self._documents: list[ScoredDocument] = []
        self._warned: set[str] = set()
        self._layout_is_written = False
        self._key = ""  # part of the names in logs
        self._stored_tokenizer: PreTrainedTokenizerFast | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._key = self.name or "" if check_names(trainer, ExternalEvaluator) > 1 else ""
        if self.config.key_token_rule == "authors" and stage != "predict":
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            name = getattr(data, "tokenizer_name", None)
            revision = getattr(data, "tokenizer_revision", None)
            if name is None:
                raise ValueError("`key_token_rule: authors` needs a data module with a `tokenizer_name`: use `paper`.")
            self._stored_tokenizer = load_tokenizer(name, revision=revision, trimmed_offsets=True)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the layout of TensorBoard's custom scalars, once for all evaluators and evaluations."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        first = next(each for each in callbacks if isinstance(each, ExternalEvaluator))
        if first is self and not self._layout_is_written:
            self._layout_is_written = True
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_custom_scalars(CUSTOM_SCALARS)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the model before the first step, once for all evaluators; a resumed run does not repeat it.

        Not at the start of the training: Lightning's `ThroughputMonitor` may not have started then.
        """
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        wanted = [each for each in callbacks if isinstance(each, ExternalEvaluator) and each.before_training]
        if wanted and wanted[0] is self and trainer.global_step == 0 and trainer.enable_validation:
            # As in Lightning's training loop. The loader draws a random number, which must not change the training.
            trainer.validating = True
            with isolate_rng():
                trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True

    def influence(
        self, batch: PackedBatch, row: int, device: torch.device | str
    ) -> tuple[Tensor, Tensor | None, Coverage]:
        """Return key tokens (by the first thresholds), soft weights and coverage of a row's one document.

        They are ``[T]`` bool and ``[T]`` float64, both 0 where a token is not scored. Precomputed spans have no soft
        weights.
        """
        found = self._find_influence(self._read_row(batch, row, torch.empty(0)), device)
        return next(iter(found.key.values())), found.soft, found.coverage

    def _read_row(self, batch: PackedBatch, row: int, log_likelihood: Tensor) -> ScoredDocument:
        """Return a row's document, with the offsets that the alignment rule uses."""
        text = batch["text"][row]
        tokens = document_tokens(batch, row)
        if self._stored_tokenizer is not None and text:
            tokens = tokens._replace(offsets=stored_offsets(text, tokens, self._stored_tokenizer))
        set_name = batch["sets"][row] if "sets" in batch else ""
        scored = batch["labels"][row].ne(IGNORE_INDEX).cpu()
        if find_impossible(log_likelihood).any():
            rank_zero_warn(
                f"The trained model gives tokens of '{batch['names'][row]}' log-likelihoods that are not finite or"
                " above 0, so LongPPL is NaN: its training has diverged, or `trainer.precision` is too small for it."
            )
            log_likelihood = torch.full_like(log_likelihood, torch.nan)
        return ScoredDocument(set_name, batch["names"][row], text, tokens, log_likelihood, scored)

    def _find_influence(self, document: ScoredDocument, device: torch.device | str) -> Influence:
        text = document.text
        tokens = document.tokens
        scored = document.scored

        def masked(values: Tensor) -> Tensor:
            """Pad the values of tokens to the sequence; 0 where a token is not scored."""
            return torch.cat([values, values.new_zeros(len(scored) - len(values))]) * scored

        if self.evaluator is None:
            spans = self._precomputed_spans(text, document.name)
            authors = self.config.key_token_rule == "authors"
            key = (scan_token_mask if authors else span_token_mask)(tokens.offsets, spans)
            coverage = measure_coverage(tokens, None, "authors" if authors else "characters")
            bits = dict.fromkeys(self.thresholds, measure_bits(document, spans))
            return Influence(dict.fromkeys(self.thresholds, masked(key)), None, coverage, bits)
        # Once for all thresholds: of a sharded evaluator, a process without a text joins once.
        scores = self.evaluator.scores(text, device=device, name=document.name)
        found = {
            name: self.evaluator.evaluate_scores(scores, tokens, thresholds=each)
            for name, each in self.thresholds.items()
        }
        first = next(iter(found.values()))
        self.evaluated[first.scores.text_sha256] = first
        soft = transfer_soft_influence(first.scores, tokens, gamma=self.gamma)
        bits = {name: measure_bits(document, each.spans, each.scores.offsets) for name, each in found.items()}
        return Influence({name: masked(each.key) for name, each in found.items()}, masked(soft), first.coverage, bits)

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
        return read_key_spans(found, merge=self.config.key_token_rule == "paper")

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._documents = []
        self.evaluated = {}

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: PackedBatch, *_: Any
    ) -> None:
        if trainer.sanity_checking and self.before_training:  # the evaluation before training follows
            return
        if "text" not in batch:
            raise ValueError("`ExternalEvaluator` needs a data module whose batches have `text` and `offsets`.")
        rows = zip(range(len(batch["text"])), outputs["log_likelihood"], strict=True)
        self._documents += [self._read_row(batch, row, log_likelihood) for row, log_likelihood in rows]

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking and self.before_training:
            return
        stage = "test" if trainer.testing else "val"
        found = self._find_all(trainer, pl_module.device)
        for set_name, set_key in validation_set_keys(trainer).items():
            place = join_key(stage, set_key, self._key)
            own = [each for each in found if each[0].set == set_name]
            for label, value in self._measure(trainer, own, pl_module.device, place).items():
                value = torch.as_tensor(value, dtype=torch.float32)
                pl_module.log(
                    join_key(place, label), value, prog_bar=join_key(place, label) == "val/longppl", sync_dist=True
                )
        name = self.name or "evaluator"
        numerics = find_numerics(trainer, pl_module)
        settings = {f"model_{name}": value for name, value in numerics._asdict().items()}
        settings |= self._describe_key_tokens(pl_module.device)
        write_documents(trainer, found, self.thresholds, stage=stage, evaluator=name, settings=settings)

    def _describe_key_tokens(self, device: torch.device) -> dict[str, Any]:
        """Return what the key tokens depend on, apart from thresholds: the evaluator's provenance, K, d and rule."""
        if self.evaluator is not None:
            evaluator = self.evaluator.provenance(device)
        else:
            spans = Path(str(self.key_spans))
            evaluator = Provenance(f"sha256:{content_hash(spans, spans.glob('*.txt'))}", "", "", "")
        sizes = {"context_length": self.config.context_length, "stride": self.config.stride} if self.evaluator else {}
        described = {f"evaluator_{name}": value for name, value in evaluator._asdict().items()}
        return {**described, **sizes, "key_token_rule": self.config.key_token_rule}

    def _find_all(self, trainer: Trainer, device: torch.device) -> list[tuple[ScoredDocument, Influence]]:
        """Find the key tokens of all documents, in the same order in all processes, and free the evaluator."""
        found = []
        sizes = {"context_length": self.config.context_length, "stride": self.config.stride}
        tokens = [count_tokens(len(document.tokens.ids), **sizes) for document in self._documents]
        # A sharded evaluator communicates, so its processes cannot wait for each other here.
        sharded = self.evaluator is not None and self.config.sharded
        stopping = interruptible(trainer, communicates=sharded)
        with stopping, show_progress(self._documents, "evaluator", tokens) as documents:
            for document in documents:
                raise_if_stopping(trainer, together=sharded)
                if document.text:
                    found.append((document, self._find_influence(document, device)))
                elif self.evaluator is not None:
                    self.evaluator.join(device=device)
            self._documents = []
            if self.evaluator is not None:
                self.evaluator.release()
        return found

    def _measure(self, trainer: Trainer, documents: Found, device: torch.device, place: str) -> dict[str, Any]:
        """Return the numbers of a set by their names, those that depend on thresholds for each of these."""
        values = measure_alignment(trainer, documents, device=device, place=place)
        if self.evaluator is None:
            del values["longppl_soft"]  # precomputed spans have no soft weights
        for name in self.thresholds:
            key = name if len(self.thresholds) > 1 else ""
            where = join_key(place, key)
            numbers = measure_key_tokens(trainer, documents, name, device=device, place=where, warned=self._warned)
            values |= {join_key(key, label): value for label, value in numbers.items()}
        return values

    on_validation_start = on_test_start = on_fit_start
    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_test_epoch_end = on_validation_epoch_end


def stored_offsets(text: str, tokens: Tokens, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the ``[N, 2]`` offsets of a document's tokens by the unmodified tokenizer, which may trim spaces."""
    for special in (False, True):
        encoded = encode_text(text, tokenizer, add_special_tokens=special)
        if encoded.ids[: len(tokens.ids)] == tokens.ids.tolist():
            return torch.tensor(encoded.offsets[: len(tokens.ids)])
    raise ValueError("`key_token_rule: authors`: the document's tokens are not those of the data module's tokenizer.")
