"""Scores of documents for long-range dependence, as a function of a batch of rows for any engine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import pyarrow
import torch
from transformers import PreTrainedTokenizerFast

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, batch_to, pack_sequence, stack_documents
from lightning_modules.functional.checks import check_count
from lightning_modules.functional.equations import check_gamma, check_thresholds
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_scorer
from lightning_modules.models.tokenization.detokenization import (
    TokenCharacters,
    count_start_tokens,
    drop_end_tokens,
)
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.config import tokenizer_name
from lightning_modules.scoring.context_lengths import ContextLengths
from lightning_modules.scoring.corpus.counts import LEFT_OUT
from lightning_modules.scoring.corpus.table import ScoreTable, TokenType
from lightning_modules.scoring.document_scorer import DocumentScorer, Failed
from lightning_modules.scoring.score import find_device
from lightning_modules.scoring.token_scores import TokenScores, shorten_text, text_sha256


@dataclass(frozen=True)
class EncodedDocument:
    """A tokenized document, or why it cannot be scored."""

    batch: PackedBatch | None  # one row
    error: str | None = None
    text_hash: str | None = None  # of the whole text
    first_words: str | None = None
    truncated: bool | None = None  # whether its end was cut off

    @property
    def tokens(self) -> int:
        """Number of tokens to score."""
        return 0 if self.batch is None else self.batch["labels"].numel()


class LongContextScorer:
    """Scores documents for long-range dependence: a callable that takes a batch of rows and returns their scores.

    Ray Data's `map_batches`, a `PipelineStep` of datatrove or a loop can call it, and `longce corpus score` does. The
    model is loaded once, when the first document is scored, and the scorer is pickled without it.

    Scores are the columns of `longce corpus score` without ``file``, ``row`` and ``key``; see `document_scores`. A
    document that cannot be scored has a reason in ``error``, and does not stop the others.

    Args:
        model: Hub id, local folder or server of the model.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one short window.
        alpha: Key tokens have a long-short difference (LSD) above alpha, in nats.
        beta: Key tokens have a long-context log-likelihood (LCL) above beta, in nats.
        gamma: Largest weight of the soft-weighted benefit.
        contexts: Ascending context lengths in tokens that are compared as well, by the last `stride` tokens of each
            document; by default none.
        per_token: Also return the long-short difference (``lsd``) and the long-context log-likelihood (``lcl``) of each
            token as lists of this type, with its character offsets (``token_starts``, ``token_ends``). ``lsd`` is null
            where the short context is the whole context, ``lcl`` where a token is not scored.
        max_tokens: Maximum number of tokens of a document.
        overlong: What to do with longer documents: ``cut`` scores their first tokens, ``skip`` leaves them out and
            records the reason.
        batch_tokens: Score short documents of a call together, in batches of at most this many tokens including
            padding. By default each document is scored alone, so that its scores do not depend on others in the last
            digits.
        text_column: Name of the column with the text. It is not returned.
        token_column: Name of a column with lists of the model's token ids, in place of a text. Their text is decoded
            for hash, first words and character offsets. Special tokens at the start and the end are not scored.
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
        per_token: TokenType | None = None,
        max_tokens: int | None = None,
        overlong: Literal["cut", "skip"] = "cut",
        batch_tokens: int | None = None,
        text_column: str = "text",
        token_column: str | None = None,
        tokenizer: str | None = None,
        add_special_tokens: bool = False,
        device: str = "auto",
        **loading: Any,
    ) -> None:
        self.short_context = ShortContext(context_length, stride)
        check_thresholds(alpha, beta)
        check_gamma(gamma)
        for name, number in (("`max_tokens`", max_tokens), ("`batch_tokens`", batch_tokens)):
            if number is not None:
                check_count(name, number)
        if overlong not in ("cut", "skip") or per_token not in (None, "float16", "float32"):
            raise ValueError(
                "`overlong` must be 'cut' or 'skip', and `per_token` None, 'float16' or 'float32', got"
                f" {overlong!r} and {per_token!r}."
            )
        self.loading = ModelConfig(model, **loading)
        self.alpha = alpha
        self.beta = beta
        self.gamma = gamma
        self.context_lengths = ContextLengths(tuple(contexts), stride) if contexts else None
        self.per_token: TokenType | None = per_token
        self.max_tokens = max_tokens
        self.overlong = overlong
        self.batch_tokens = batch_tokens
        self.text_column = text_column
        self.token_column = token_column
        self.tokenizer_name = tokenizer_name(model, tokenizer, "`tokenizer`")
        self.add_special_tokens = add_special_tokens
        self.device = device

    @property
    def schema(self) -> pyarrow.Schema:
        """Names and types of the columns with scores."""
        return self._new_table().schema

    def __call__(self, rows: Any) -> Any:
        """Score a batch of documents, and return their other columns with their scores, in the same form.

        Args:
            rows: A ``pyarrow.Table``, a list of dicts, or a dict of columns; with the column `text_column`, or
                `token_column` if that is set.

        Returns:
            A table, a list of dicts, or a dict of columns. Missing values are null, or None.

        Raises:
            ValueError: If the text column is missing, or the rows already have a column of scores.
        """
        documents, scored = self._split(rows)
        encode = self.encode if self.token_column is None else self.encode_tokens
        scores = self.score_encoded([encode(document) for document in documents])
        for name in scores.column_names:
            if name in scored.column_names:
                raise ValueError(f"The rows have a column '{name}', which is that of a score: rename it.")
            scored = scored.append_column(scores.schema.field(name), scores[name])
        if isinstance(rows, pyarrow.Table):
            return scored
        return scored.to_pydict() if isinstance(rows, Mapping) else scored.to_pylist()

    def score(self, texts: Sequence[str | None]) -> pyarrow.Table:
        """Return a table with the scores of each text, in this order; columns and types are those of `schema`."""
        return self.score_encoded([self.encode(text) for text in texts])

    def encode(self, text: Any) -> EncodedDocument:
        """Tokenize a text, without the model."""
        if not isinstance(text, str):
            reason = "the text is null" if text is None else f"the text has type {type(text).__name__}"
            return EncodedDocument(None, reason)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return EncodedDocument(None, f"the text has a lone surrogate at {error.start}, which no tokenizer reads")
        document = EncodedDocument(None, None, text_sha256(text), shorten_text(text))
        if not text.strip():
            return replace(document, error=f"{LEFT_OUT}the text is empty or only white space")
        kept = self.max_tokens if self.overlong == "cut" else None
        special = self.add_special_tokens
        tokenizer = self.tokenizer  # before `try`: a failure to load it is not the document's fault
        try:
            batch = encode_document(text, tokenizer, add_special_tokens=special, max_tokens=kept)
        except ValueError as error:  # the tokenizer fails on it
            return replace(document, error=" ".join(str(error).split()))
        tokens = batch["labels"].numel()
        if self.max_tokens is not None and tokens > self.max_tokens:
            return replace(document, error=f"{LEFT_OUT}{tokens} tokens exceed `max_tokens` = {self.max_tokens}")
        return replace(document, batch=batch, truncated=len(batch["text"][0]) < len(text))

    def encode_tokens(self, ids: Any) -> EncodedDocument:
        """Check token ids, and decode them."""
        if ids is None or len(ids) == 0:
            return EncodedDocument(None, "the token ids are null" if ids is None else f"{LEFT_OUT}it has no token")
        characters = self._characters  # before `try`: an unusable tokenizer is not the document's fault
        try:
            tokens = torch.as_tensor(ids)
            size = characters.vocabulary_size
            is_integer = not (tokens.dtype.is_floating_point or tokens.dtype == torch.bool)
            tokens = tokens.long()  # torch finds no extremes of unsigned integers
            if not is_integer or tokens.ndim != 1 or tokens.min() < 0 or tokens.max() >= size:
                raise ValueError(f"they must be a list of integers from 0 to {size - 1}")
        except (TypeError, ValueError, RuntimeError) as error:
            return EncodedDocument(None, f"the token ids cannot be used: {' '.join(str(error).split())}")
        tokens = drop_end_tokens(tokens, self.tokenizer)
        if len(tokens) == 0:
            return EncodedDocument(None, f"{LEFT_OUT}it has only special tokens")
        text, offsets = characters.decode_document(tokens)
        document = EncodedDocument(None, None, text_sha256(text), shorten_text(text))
        count = len(tokens)
        kept = count if self.max_tokens is None else min(count, self.max_tokens)
        if kept < count and self.overlong == "skip":
            return replace(document, error=f"{LEFT_OUT}{count} tokens exceed `max_tokens` = {self.max_tokens}")
        offsets = offsets[:kept]
        batch = pack_sequence([tokens[:kept]])
        start = count_start_tokens(tokens[:kept], self.tokenizer)
        batch["labels"][:, :start] = IGNORE_INDEX
        batch["scored"][:, :start] = False
        batch |= {"text": [text[: int(offsets.max())]], "offsets": offsets.unsqueeze(0), "names": ["document"]}
        return replace(document, batch=batch, truncated=kept < count)

    def score_encoded(self, documents: Sequence[EncodedDocument]) -> pyarrow.Table:
        """Return a table with the scores of each document, like `score`."""
        scores: list[TokenScores | Failed] = [Failed(str(document.error)) for document in documents]
        batches = {place: each.batch for place, each in enumerate(documents) if each.batch is not None}
        for places in self.group_by_length(documents):
            batch = stack_documents([batches[place] for place in places])
            scorer = self.document_scorer
            with torch.inference_mode():
                scorer.backbone.check_batch(batch)
                found = scorer.try_to_score(batch_to(batch, scorer.backbone.device))
            for place, result in zip(places, found, strict=True):
                scores[place] = result
        table = self._new_table()
        for document, result in zip(documents, scores, strict=True):
            text = {name: getattr(document, name) for name in ("truncated", "text_hash", "first_words")}
            table.add(text, result)
        return table.table()

    def group_by_length(self, documents: Sequence[EncodedDocument]) -> Iterator[list[int]]:
        """Yield the places of documents of similar length, with at most `batch_tokens` tokens or one document.

        Documents that cannot be scored are left out.
        """
        places = [place for place, document in enumerate(documents) if document.batch is not None]
        group: list[int] = []
        for place in sorted(places, key=lambda place: documents[place].tokens):
            if group and documents[place].tokens * (len(group) + 1) > (self.batch_tokens or 0):
                yield group
                group = []
            group.append(place)
        if group:
            yield group

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, loaded once."""
        revision = self.loading.revision if self.tokenizer_name == self.loading.pretrained_model_name_or_path else None
        return load_tokenizer(self.tokenizer_name, revision=revision, trust_remote_code=self.loading.trust_remote_code)

    @cached_property
    def _characters(self) -> TokenCharacters:
        return TokenCharacters(self.tokenizer)

    @cached_property
    def document_scorer(self) -> DocumentScorer:
        """Scorer with the model, loaded once."""
        backbone = load_scorer(self.loading, find_device(self.device))
        name = str(self.loading.pretrained_model_name_or_path)
        return DocumentScorer(backbone, name, self.short_context, self.context_lengths)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings without the model and tokenizer."""
        loaded = ("document_scorer", "tokenizer", "_characters")
        return {name: value for name, value in vars(self).items() if name not in loaded}

    def _split(self, rows: Any) -> tuple[list[Any], pyarrow.Table]:
        """Return the texts or token ids of a batch, and a table of the other columns."""
        source = self.token_column or self.text_column
        if isinstance(rows, pyarrow.Table):
            columns = {name: rows[name] for name in rows.column_names}
        elif isinstance(rows, Mapping):
            columns = dict(rows)
        else:
            names = dict.fromkeys(name for row in rows for name in row)  # in order; a row may lack some
            columns = {name: [row.get(name) for row in rows] for name in names or [source]}
        if source not in columns:
            raise ValueError(f"The rows have no column '{source}', only {[*columns]}.")
        texts = columns.pop(source)
        texts = texts.to_pylist() if isinstance(texts, pyarrow.ChunkedArray) else list(texts)
        if columns:
            return texts, pyarrow.table(columns)
        return texts, pyarrow.table({"": [None] * len(texts)}).select([])

    def _new_table(self) -> ScoreTable:
        contexts = () if self.context_lengths is None else self.context_lengths.contexts
        thresholds = {"alpha": self.alpha, "beta": self.beta, "gamma": self.gamma}
        return ScoreTable(contexts, per_token=self.per_token, **thresholds)
