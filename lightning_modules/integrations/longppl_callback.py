"""LongPPL of the model in training, in Hugging Face's Trainer and those that are based on it."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from typing_extensions import override

from lightning_modules.batch import PackedBatch, batch_to
from lightning_modules.functional.checks import find_impossible
from lightning_modules.integrations.longce_forward import check_sharding, find_causal_lm
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.models.optimizations import eval_mode
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.measure import Document, measure
from lightning_modules.scoring.records import Definition, Record, Source, Sums, summarize
from lightning_modules.scoring.scored_model import open_evaluator
from lightning_modules.utilities.collectives import gathered, rank_and_size

log = logging.getLogger(__name__)

Result = TypeVar("Result")

LOGGED = (
    "longppl",
    "perplexity",
    "key_tokens",
    "key_token_share",
    "documents_without_key_tokens",
    "longppl_per_evaluator_token",
    "longppl_soft",
)
"""Numbers of `Sums` that are logged."""


class LongPPLCallback(TrainerCallback):
    """Logs LongPPL when Hugging Face's Trainer evaluates: key tokens by an evaluator, likelihoods by the trained model.

    The metrics of the evaluation get ``eval_longppl``, ``eval_perplexity`` (of the same texts), ``eval_key_tokens`` and
    more, so ``metric_for_best_model="eval_longppl"`` works; `Trainer.log` sends them to all loggers. The numbers are
    those of `longce.score`. Processes take turns with the texts, and each loads the evaluator only for texts of which
    no scores are stored: ``longce score`` before the training stores them.

    Add it to a trainer that exists: ``trainer.add_callback(LongPPLCallback(trainer, texts, evaluator))``.

    Args:
        trainer: The trainer, with the tokenizer as its ``processing_class``.
        texts: Texts by their names, or only texts.
        evaluator: Hub id, local folder or server of the long-context model that finds key tokens.
        special_tokens: Whether the tokenizer of the trained model puts its special tokens before a text. By default
            not, as in `longce.score`; Gemma is far worse without.
        max_tokens: Cut each text after this number of the evaluator's tokens.
        options: The other fields of `lightning_modules.scoring.config.EvaluatorConfig`, such as ``context_length``.

    Raises:
        ValueError: If `texts` is empty, or the trainer does not have a fast tokenizer.
    """

    def __init__(
        self,
        trainer: Trainer,
        texts: Mapping[str, str] | Sequence[str],
        evaluator: str,
        *,
        special_tokens: bool = False,
        max_tokens: int | None = None,
        **options: Any,
    ) -> None:
        self.config = EvaluatorConfig(evaluator, **options)
        if self.config.sharded:
            raise ValueError("`sharded` evaluators are for `longce fit`: store their scores with `longce score` first.")
        self.trainer = trainer
        self.evaluator = open_evaluator(self.config)
        self.special_tokens = special_tokens
        tokenizer = self._load_tokenizer(trainer.processing_class)
        named = dict(texts) if isinstance(texts, Mapping) else {f"text {i}": text for i, text in enumerate(texts)}
        if not named:
            raise ValueError("`texts` is empty: LongPPL needs at least one text.")
        self.documents: list[PackedBatch] = []
        for name, text in named.items():
            kept = text if max_tokens is None else self.evaluator.cut(text, max_tokens, name=name)
            self.documents.append(encode_document(kept, tokenizer, name=name, add_special_tokens=special_tokens))
        self.records: list[Record] = []  # of the last evaluation, on all processes
        self._backbone: Backbone | None = None
        self._numbers: dict[str, float] = {}  # of the last evaluation
        self._weights: object = None  # identifies the weights of the last evaluation
        self._data_sets: set[str] = set()  # that it has evaluated

    def _load_tokenizer(self, tokenizer: Any) -> PreTrainedTokenizerFast:
        """Return a copy of the trainer's tokenizer whose offsets cover all characters."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(
                f"`LongPPLCallback` needs a fast tokenizer as the trainer's `processing_class`, got"
                f" {type(tokenizer).__name__}: pass it to the trainer."
            )
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            return load_tokenizer(folder, trimmed_offsets=self.config.key_token_rule == "authors")

    @override
    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        metrics = {} if metrics is None else metrics
        # An evaluation of several data sets ends once for each of them, and is over when one comes again.
        data_set = next((name for name in metrics if name.endswith("_runtime")), "")
        prefix = data_set.partition("_")[0] or "eval"
        # Torch counts the changes of each weight, including those from loading the best model.
        weights = (state.global_step, [(id(each), each._version) for each in kwargs["model"].parameters()])
        if self._weights != weights or data_set in self._data_sets:
            self.records = self._measure(kwargs["model"])
            total = summarize(self.records)
            _warn_without_key_tokens(total)
            numbers = total.numbers()
            self._numbers = {name: float(numbers[name]) for name in LOGGED if name in numbers}
            self._weights = weights
            self._data_sets = set()
            self.trainer.log({f"{prefix}_{name}": value for name, value in self._numbers.items()})
        self._data_sets.add(data_set)
        metrics.update({f"{prefix}_{name}": value for name, value in self._numbers.items()})

    def _measure(self, model: Any) -> list[Record]:
        """Return a record of each document; the processes share them."""
        base = find_causal_lm(model)
        check_sharding(base)
        if self._backbone is None or self._backbone.base_model is not base:
            self._backbone = Backbone(base)
        backbone = self._backbone
        self.evaluator.device = backbone.device
        config = self.config
        definition = Definition(config.context_length, config.stride, config.alpha, config.beta, config.key_token_rule)
        source = Source(
            dtype=str(base.dtype).removeprefix("torch."),
            attention=backbone.attention.removeprefix("document_"),
            precision=self.trainer.accelerator.mixed_precision,
            special_tokens=self.special_tokens,
        )
        rank, size = rank_and_size()
        own: list[Record] = []
        for first in range(0, len(self.documents), size):
            # All processes make the same number of passes, for which FSDP2 gathers weights.
            document = self.documents[min(first + rank, len(self.documents) - 1)]
            log_likelihood = self._score(base, backbone, document)
            if first + rank < len(self.documents):
                found_by = self.evaluator.scores(document["text"][0], name=document["names"][0])
                about = {"model": source, "evaluator": self.evaluator.source}
                own += measure(Document.of_row(document), log_likelihood, found_by, {"": definition}, **about)
        self.evaluator.release()
        step = self.trainer.state.global_step
        records = [record._replace(stage="val", step=step) for found in gathered(own) for record in found]
        return sorted(records, key=lambda record: record.document)

    def _score(self, model: PreTrainedModel, backbone: Backbone, document: PackedBatch) -> Tensor:
        """Return the ``[T]`` log-likelihoods of a document, all NaN if one is impossible: the training has diverged."""

        def score() -> Tensor:
            check_scoring(backbone)
            scores: Tensor = backbone(batch_to(document, backbone.device))[0]
            return scores

        with torch.no_grad(), eval_mode(model), self.trainer.accelerator.autocast():
            log_likelihood = _run_as_forward(model, score).float().cpu()
        if find_impossible(log_likelihood).any():
            log.warning("The trained model gives tokens of '%s' impossible log-likelihoods.", document["names"][0])
            return torch.full_like(log_likelihood, torch.nan)
        return log_likelihood


def _run_as_forward(model: PreTrainedModel, function: Callable[[], Result]) -> Result:
    """Call a function in place of the model's ``forward``: FSDP2 gathers its weights around it."""
    with _own_forward(model) as restore:

        def forward() -> Result:
            restore()
            return function()

        model.forward = forward
        result: Result = model()
        return result


@contextmanager
def _own_forward(model: PreTrainedModel) -> Iterator[Callable[[], None]]:
    """Restore the model's ``forward`` when the yielded function is called, at the latest at the end of the block."""
    replaced = vars(model).get("forward")

    def restore() -> None:
        vars(model).pop("forward", None)
        if replaced is not None:
            model.forward = replaced

    try:
        yield restore
    finally:
        restore()


def _warn_without_key_tokens(total: Sums) -> None:
    if total.without_key_tokens:
        log.warning(
            "%d of %d texts have no key token: they may be too short for `context_length`, or the evaluator may not use"
            " the long context.",
            total.without_key_tokens,
            total.documents,
        )
