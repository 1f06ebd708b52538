"""Scores of documents for long-range dependence, as a function of a batch of rows for any engine."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow
import torch
from transformers import PreTrainedTokenizerFast

from lightning_modules.batch import DocumentRef, PackedBatch, batch_to
from lightning_modules.functional.influence import check_gamma, check_thresholds
from lightning_modules.functional.windows import check_context
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_scorer
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.config import tokenizer_name
from lightning_modules.scoring.context_lengths import ContextLadder
from lightning_modules.scoring.corpus.failures import LEFT_OUT
from lightning_modules.scoring.corpus.table import ScoreTable
from lightning_modules.scoring.document_scorer import DocumentScorer, Failed
from lightning_modules.scoring.score import find_device
from lightning_modules.scoring.token_scores import shorten_text, text_sha256

_IDENTITY = ["key", "file", "row"]  # of a document in a corpus; rows of other engines have columns of their own


class LongContextScorer:
    """Scores documents for long-range dependence: a callable that takes a batch of rows and returns their scores.

    Ray Data's `map_batches`, a `PipelineStep` of datatrove or a loop can call it. The model is loaded once, when the
    first document is scored, and the scorer is pickled without it. Each document is scored alone, so its scores do not
    depend on the batch.

    Scores are the columns of `longce predict` without ``file``, ``row`` and ``key``; see `document_scores`. A document
    that cannot be scored has a reason in ``error``, and does not stop the others.

    Args:
        model: Hub id, local folder or server of the model.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one short window.
        alpha: Key tokens have a long-short difference (LSD) above alpha, in nats.
        beta: Key tokens have a long-context log-likelihood (LCL) above beta, in nats.
        gamma: Largest weight of the soft-weighted benefit.
        contexts: Ascending context lengths in tokens that are compared as well; by default none.
        max_tokens: Longer documents are cut to this number of tokens.
        text_column: Name of the column with the text. It is not returned.
        tokenizer: Hub id or local folder of the tokenizer; by default the model's.
        add_special_tokens: Whether the tokenizer adds special tokens to each document.
        device: Device such as ``cuda:0`` or ``cpu``; ``auto`` is the first GPU, or the CPU.
        loading: Other fields of `lightning_modules.models.loading.config.ModelConfig`, such as ``dtype``.

    Raises:
        ValueError: If settings do not fit together.
    """

    def __init__(
        self,
        model: str,
        *,
        context_length: int = 4096,
        stride: int = 1024,
        alpha: float = 2.0,
        beta: float = -2.0,
        gamma: float = 5.0,
        contexts: Sequence[int] = (),
        max_tokens: int | None = None,
        text_column: str = "text",
        tokenizer: str | None = None,
        add_special_tokens: bool = False,
        device: str = "auto",
        **loading: Any,
    ) -> None:
        check_context(context_length, stride)
        check_thresholds(alpha, beta)
        check_gamma(gamma)
        self.loading = ModelConfig(model, **loading)
        self.context_length = context_length
        self.stride = stride
        self.alpha = alpha
        self.beta = beta
        self.gamma = gamma
        self.contexts = tuple(contexts)
        self.ladder = ContextLadder([*contexts]) if contexts else None
        self.max_tokens = max_tokens
        self.text_column = text_column
        self.tokenizer_name = tokenizer_name(model, tokenizer, "`tokenizer`")
        self.add_special_tokens = add_special_tokens
        self.device = device

    @property
    def schema(self) -> pyarrow.Schema:
        """Names and types of the columns with scores."""
        return self._new_table().table().drop_columns(_IDENTITY).schema

    def __call__(self, rows: Any) -> Any:
        """Score a batch of documents, and return their other columns with their scores, in the same form.

        Args:
            rows: A ``pyarrow.Table``, a list of dicts, or a dict of columns; with the column `text_column`.

        Returns:
            A table, a list of dicts, or a dict of columns. Missing values are null, or None.

        Raises:
            ValueError: If the text column is missing, or the rows already have a column of scores.
        """
        table = self._as_table(rows)
        scores = self.score(table[self.text_column].to_pylist())
        scored = table.drop_columns([self.text_column])
        for name in scores.column_names:
            if name in scored.column_names:
                raise ValueError(f"The rows have a column '{name}', which is that of a score: rename it.")
            scored = scored.append_column(scores.schema.field(name), scores[name])
        if isinstance(rows, pyarrow.Table):
            return scored
        return scored.to_pydict() if isinstance(rows, Mapping) else scored.to_pylist()

    def score(self, texts: Sequence[str | None]) -> pyarrow.Table:
        """Return a table with the scores of each text, in this order; columns and types are those of `schema`."""
        table = self._new_table()
        for number, text in enumerate(texts):
            ref = DocumentRef("", "", number, {})
            try:
                batch = self._encode(text)
            except ValueError as error:  # there is no text, or the tokenizer fails on it
                table.add(ref, Failed(" ".join(str(error).split())))
                continue
            scorer = self.document_scorer
            with torch.inference_mode():
                scorer.backbone.check_batch(batch)
                (scores,) = scorer.try_to_score(batch_to(batch, scorer.backbone.device))
            truncated = len(batch["text"][0]) < len(str(text))
            ref = ref._replace(
                truncated=truncated, text_hash=text_sha256(str(text)), first_words=shorten_text(str(text))
            )
            table.add(ref, scores)
        return table.table().drop_columns(_IDENTITY)

    def _encode(self, text: str | None) -> PackedBatch:
        """Return a text as a batch; raise a ``ValueError`` if it cannot be scored."""
        if not isinstance(text, str):
            raise ValueError("the text is null" if text is None else f"the text has type {type(text).__name__}")
        if not text.strip():
            raise ValueError(f"{LEFT_OUT}the text is empty or only white space")
        special = self.add_special_tokens
        return encode_document(text, self.tokenizer, add_special_tokens=special, max_tokens=self.max_tokens)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, loaded once."""
        revision = self.loading.revision if self.tokenizer_name == self.loading.pretrained_model_name_or_path else None
        return load_tokenizer(self.tokenizer_name, revision=revision, trust_remote_code=self.loading.trust_remote_code)

    @cached_property
    def document_scorer(self) -> DocumentScorer:
        """Scorer with the model, loaded once."""
        backbone = load_scorer(self.loading, find_device(self.device))
        sizes = (self.context_length, self.stride)
        lengths = None if self.ladder is None else self.ladder.resolve_for_model(backbone, *sizes)
        return DocumentScorer(backbone, str(self.loading.pretrained_model_name_or_path), *sizes, lengths)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings without the model and tokenizer."""
        return {name: value for name, value in vars(self).items() if name not in ("document_scorer", "tokenizer")}

    def _as_table(self, rows: Any) -> pyarrow.Table:
        if isinstance(rows, Mapping):
            rows = pyarrow.table(dict(rows))
        elif not isinstance(rows, pyarrow.Table) and len(rows) == 0:
            rows = pyarrow.table({self.text_column: pyarrow.array([], pyarrow.string())})
        elif not isinstance(rows, pyarrow.Table):
            rows = pyarrow.Table.from_pylist([dict(row) for row in rows])
        if self.text_column not in rows.column_names:
            raise ValueError(f"The rows have no column '{self.text_column}', only {rows.column_names}.")
        return rows

    def _new_table(self) -> ScoreTable:
        return ScoreTable({}, self.contexts, alpha=self.alpha, beta=self.beta, gamma=self.gamma)
