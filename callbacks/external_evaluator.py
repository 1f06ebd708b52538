"""Log LongPPL during training: key tokens by frozen evaluators, likelihoods by the trained model."""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import chain
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

from callbacks.requirements import check_names
from lightning_modules.batch import PackedBatch
from lightning_modules.functional.checks import find_impossible
from lightning_modules.functional.equations import check_gamma, check_thresholds
from lightning_modules.models.progress import count_tokens, show_progress
from lightning_modules.models.tokenization.encoding import encode_text
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.key_tokens import KeyTokens, Tokens, find_key_tokens
from lightning_modules.scoring.measure import Document, EvaluatedDocument, measure
from lightning_modules.scoring.records import FOLDER, Definition, Record, Source, Sums, summarize, write_records
from lightning_modules.scoring.scored_model import open_evaluator
from lightning_modules.scoring.token_scores import TokenScores, read_key_spans, text_sha256
from lightning_modules.training.evaluation import join_key, records_folder, validation_set_keys
from lightning_modules.training.monitoring.numerics import find_numerics
from lightning_modules.training.preemption import interruptible, raise_if_stopping
from lightning_modules.utilities.collectives import gathered
from lightning_modules.utilities.identity import content_hash
from lightning_modules.visualization.tensorboard.layout import CUSTOM_SCALARS

_OF_ALL_THRESHOLDS = (
    "documents_aligned_by_characters",
    "tokens_sharing_characters",
    "tokens_without_characters",
    "evaluator_tokens_sharing_characters",
    "evaluator_tokens_without_characters",
    "longppl_soft",
)
"""Numbers that do not depend on thresholds."""

_BY_EVALUATOR = ("longppl_soft", "longppl_per_evaluator_token")

_LOGGED_BY_THRESHOLDS = (
    "longppl",
    "key_tokens",
    "key_token_share",
    "documents_without_key_tokens",
    "key_bits_per_byte",
    "bits_per_byte",
    "longppl_per_evaluator_token",
)
"""Numbers that are logged for each pair of thresholds."""


class ExternalEvaluator(Callback):
    """Logs LongPPL in validation and test: key tokens by an evaluator, likelihoods by the trained model.

    It logs ``val/longppl``, ``val/longppl_soft``, ``val/key_tokens``, ``val/key_token_share`` and
    ``val/documents_without_key_tokens`` (``test/..`` in test). ``val/documents_aligned_by_characters`` counts documents
    whose key tokens were mapped by characters; ``val/tokens_sharing_characters`` and ``val/tokens_without_characters``
    are fractions of the model's tokens, ``val/evaluator_tokens_..`` of the evaluator's. ``val/key_bits_per_byte``,
    ``val/bits_per_byte`` and ``val/longppl_per_evaluator_token`` do not depend on the model's tokenizer
    (`lightning_modules.scoring.records.Sums`).

    With several validation sets (`data.validation_sets`), evaluators (one callback each, with a `name`) or
    `thresholds`, names are ``val/<set>/<evaluator>/<thresholds>/longppl``, without the parts of which there is one. The
    records of all documents go to ``documents/`` in the folder of the run (`lightning_modules.scoring.records`).

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
        self.key_spans = key_spans
        self.name = name
        self.before_training = before_training
        self.definitions = self._define(thresholds, gamma)
        self.evaluator = None if evaluator is None else open_evaluator(self.config)
        self.evaluated: dict[str, EvaluatedDocument] = {}  # this process's documents, by SHA-256
        self._documents: list[tuple[Document, Tensor]] = []  # with log-likelihoods [N] on the model's device
        self._warned: set[str] = set()
        self._layout_is_written = False
        self._has_checked_spans = False
        self._key = ""  # part of the names in logs
        self._stored_tokenizer: PreTrainedTokenizerFast | None = None

    def _define(self, thresholds: dict[str, dict[str, float]] | None, gamma: float) -> dict[str, Definition]:
        """Return the definitions of key tokens by the names of their thresholds; the default has no name."""
        config = self.config
        sizes = (config.context_length, config.stride) if self.key_spans is None else (0, 0)
        default = Definition(*sizes, config.alpha, config.beta, config.key_token_rule, gamma)
        if not thresholds:
            return {"": default}
        definitions = {}
        for name, values in thresholds.items():
            if not name or "/" in name or set(values) - {"alpha", "beta"}:
                raise ValueError(
                    f"`thresholds` must be names without '/', each with `alpha` and `beta`, got {thresholds}."
                )
            definitions[name] = default._replace(alpha=values.get("alpha", 2.0), beta=values.get("beta", -2.0))
            check_thresholds(definitions[name].alpha, definitions[name].beta)
        return definitions

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
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the files of spans with the texts of all sets before the model scores them."""
        self.on_fit_start(trainer, pl_module)
        limit = trainer.limit_val_batches
        # Documents that a limit leaves out do not need spans. The others are also compared after the pass.
        if self.evaluator is None and not self._has_checked_spans and isinstance(limit, float) and limit == 1:
            self._has_checked_spans = True
            self._check_spans(_list_texts_of_sets(trainer))

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

    def key_tokens(self, batch: PackedBatch, row: int, device: torch.device | str) -> KeyTokens:
        """Return the key tokens of a row's one document, by the first thresholds; they may be not scored."""
        document = self._read_row(batch, row)
        found_by = self._found_by(document, device)
        first = next(iter(self.definitions.values()))
        return find_key_tokens(found_by, document.tokens, alpha=first.alpha, beta=first.beta, rule=first.key_token_rule)

    def _read_row(self, batch: PackedBatch, row: int) -> Document:
        """Return a row's document, with the offsets that the rule of key tokens uses."""
        document = Document.of_row(batch, row)
        if self._stored_tokenizer is None or not document.text:
            return document
        offsets = stored_offsets(document.text, document.tokens, self._stored_tokenizer)
        return document._replace(tokens=document.tokens._replace(offsets=offsets))

    def _found_by(self, document: Document, device: torch.device | str) -> TokenScores | Tensor:
        """Return the evaluator's scores of a document, or its precomputed spans."""
        if self.evaluator is None:
            return self._precomputed_spans(document.text, document.name)
        self.evaluator.device = device
        return self.evaluator.scores(document.text, name=document.name)

    def _precomputed_spans(self, text: str, name: str) -> Tensor:
        """Read the spans of a document."""
        return read_key_spans(self._find_spans(text_sha256(text), name), merge=self.config.key_token_rule == "paper")

    def _find_spans(self, sha256: str, name: str) -> Path:
        """Return the file of a document's spans, named by the hash of its text, its name or its id."""
        stems = [name.replace("/", "_"), *name.replace("/", "_").split()[:1], sha256]
        paths = [Path(str(self.key_spans)) / f"{stem}.txt" for stem in stems if len(stem) < 200]
        found = next((path for path in (paths[-1], *paths) if path.is_file()), None)
        if found is None:
            names = " or ".join(f"'{path.name}'" for path in dict.fromkeys(paths))
            raise FileNotFoundError(
                f"Document '{name}' has no precomputed key spans in '{self.key_spans}': expected {names}."
            )
        return found

    def _check_spans(self, documents: Iterable[tuple[str, str]]) -> None:
        """Raise a ``ValueError`` if two texts have the same file of spans, such as of one name in two sets.

        Documents are the SHA-256 of their text and their name.
        """
        texts: dict[Path, str] = {}
        for sha256, name in documents:
            path = self._find_spans(sha256, name)
            if texts.setdefault(path, sha256) != sha256:
                raise ValueError(
                    f"'{path}' would be the key spans of two texts, of which one is '{name}': name their files by the"
                    " SHA-256 of the texts. A book that is cut to another length is another text."
                )

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
        for row, log_likelihood in enumerate(outputs["log_likelihood"]):
            document = self._read_row(batch, row)
            log_likelihood = log_likelihood[: len(document.tokens.ids)]
            if find_impossible(log_likelihood).any():
                rank_zero_warn(
                    f"The trained model gives tokens of '{document.name}' log-likelihoods that are not finite or above"
                    " 0, so LongPPL is NaN: its training has diverged, or `trainer.precision` is too small for it."
                )
                log_likelihood = torch.full_like(log_likelihood, torch.nan)
            self._documents.append((document, log_likelihood))

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking and self.before_training:
            return
        stage = "test" if trainer.testing else "val"
        own = self._measure_all(trainer, pl_module, stage)
        # Processes take turns with the documents.
        records = list(chain.from_iterable(gathered(own)))
        records.sort(key=lambda record: (record.set, record.document))
        if self.evaluator is None:
            self._check_spans((record.text_sha256, record.document) for record in records)
        for set_name, set_key in validation_set_keys(trainer).items():
            place = join_key(stage, set_key, self._key)
            of_set = [record for record in records if record.set == set_name]
            for label, value in self._find_numbers(of_set, place).items():
                name = join_key(place, label)
                number = torch.tensor(value, dtype=torch.float32)
                pl_module.log(name, number, prog_bar=name == "val/longppl", sync_dist=True)
        self._write(trainer, records, stage)

    def _measure_all(self, trainer: Trainer, module: LightningModule, stage: str) -> list[Record]:
        """Measure the documents of this process, in the same order in all processes, and free the evaluator."""
        records: list[Record] = []
        numerics = find_numerics(trainer, module)
        model = Source(**numerics._asdict())
        if self.evaluator is not None:
            self.evaluator.device = module.device  # known only now
        evaluator = self._describe_evaluator()
        tokens = [count_tokens(len(each.tokens.ids), self.config.short_context) for each, _ in self._documents]
        # A sharded evaluator communicates, so its processes cannot wait for each other here.
        sharded = self.evaluator is not None and self.config.sharded
        stopping = interruptible(trainer, communicates=sharded)
        with stopping, show_progress(self._documents, "evaluator", tokens) as documents:
            for document, log_likelihood in documents:
                raise_if_stopping(trainer, together=sharded)
                if document.text:
                    # Once for all thresholds: of a sharded evaluator, a process without a text joins once.
                    found_by = self._found_by(document, module.device)
                    # Sources of a mixture may differ in whether special tokens are added.
                    source = model._replace(special_tokens=document.special_tokens)
                    records += measure(
                        document, log_likelihood, found_by, self.definitions, model=source, evaluator=evaluator
                    )
                    if isinstance(found_by, TokenScores):
                        self.evaluated[found_by.text_sha256] = EvaluatedDocument(found_by, document.tokens)
                elif self.evaluator is not None:
                    self.evaluator.join()
            self._documents = []
            if self.evaluator is not None:
                self.evaluator.release()
        about: dict[str, Any] = {"stage": stage, "step": trainer.global_step, "evaluator_label": self.name or ""}
        return [record._replace(**about) for record in records]

    def _describe_evaluator(self) -> Source:
        """Return the identity of the evaluator, or of the precomputed spans."""
        if self.evaluator is not None:
            return self.evaluator.source
        spans = Path(str(self.key_spans))
        return Source("key spans", f"sha256:{content_hash(spans, spans.glob('*.txt'))}")

    def _find_numbers(self, records: Sequence[Record], place: str) -> dict[str, float]:
        """Return the numbers of a set by their names, those that depend on thresholds for each of these."""
        by_label = summarize(records, by="thresholds_label")
        first = by_label.get(next(iter(self.definitions)), Sums())
        warning = first.coverage_warning()
        if warning is not None:
            rank_zero_warn(f"{place} documents: {warning}")
        # A set without documents has the names of an evaluator's numbers as well.
        unknown = {} if self.evaluator is None else dict.fromkeys(_BY_EVALUATOR, math.nan)
        numbers = unknown | first.numbers()
        values = {name: numbers[name] for name in _OF_ALL_THRESHOLDS if name in numbers}
        for label in self.definitions:
            sums = by_label.get(label, Sums())
            key = label if len(self.definitions) > 1 else ""
            self._warn_without_key_tokens(sums, join_key(place, key))
            numbers = unknown | sums.numbers()
            values |= {join_key(key, name): numbers[name] for name in _LOGGED_BY_THRESHOLDS if name in numbers}
        return values

    def _warn_without_key_tokens(self, sums: Sums, place: str) -> None:
        """Warn of documents without key tokens, once for each place."""
        if not sums.without_key_tokens or place in self._warned:
            return
        self._warned.add(place)
        consequence = ": LongPPL is undefined (NaN)"
        if sums.key_tokens:
            consequence = " and do not count in LongPPL"
        rank_zero_warn(
            f"{sums.without_key_tokens} of {sums.documents} {place} documents have no key token{consequence}. They may"
            " be too short for `context_length`, or the evaluator may not use the long context."
        )

    def _write(self, trainer: Trainer, records: Sequence[Record], stage: str) -> None:
        """Write the records to ``documents/STAGE-EVALUATOR-step-N.parquet`` in the run's folder."""
        folder = records_folder(trainer)
        if records and folder is not None:
            name = f"{stage}-{self.name or 'evaluator'}-step-{trainer.global_step}.parquet"
            write_records(folder / FOLDER / name, records)

    on_test_start = on_fit_start
    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_test_epoch_end = on_validation_epoch_end


def _list_texts_of_sets(trainer: Trainer) -> list[tuple[str, str]]:
    """Return the SHA-256 and the name of each text of several validation sets; nothing for a single set."""
    dataset = getattr(trainer.val_dataloaders, "dataset", None)
    if len(validation_set_keys(trainer)) == 1 or dataset is None:
        return []
    texts = []
    for index in range(len(dataset)):
        row = dataset[index]
        if "text" in row:  # token ids have none without a tokenizer, which is an error in the first batch
            texts.append((text_sha256(row["text"]), row["name"]))
    return texts


def stored_offsets(text: str, tokens: Tokens, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the ``[N, 2]`` offsets of a document's tokens by the unmodified tokenizer, which may trim spaces."""
    for special in (False, True):
        encoded = encode_text(text, tokenizer, add_special_tokens=special)
        if encoded.ids[: len(tokens.ids)] == tokens.ids.tolist():
            return torch.tensor(encoded.offsets[: len(tokens.ids)])
    raise ValueError("`key_token_rule: authors`: the document's tokens are not those of the data module's tokenizer.")
