"""Arrow tables with a row of scores per document."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow
from torch import Tensor

from lightning_modules.scoring.corpus.columns import COLUMNS, document_scores, ladder_columns, ladder_scores
from lightning_modules.scoring.corpus.shards import PER_TOKEN
from lightning_modules.scoring.document_scorer import Failed
from lightning_modules.scoring.token_scores import TokenScores

TokenType = Literal["float16", "float32"]

_TEXT_COLUMNS = {"truncated": pyarrow.bool_(), "text_hash": pyarrow.string(), "first_words": pyarrow.string()}
_ERROR_COLUMN = {"error": pyarrow.string()}
_ARROW_TYPES = {int: pyarrow.int64(), float: pyarrow.float64()}


class ScoreTable:
    """Collects the scores of documents (`document_scores`).

    Values of single tokens are included if ``per_token`` is set to their dtype.
    """

    def __init__(
        self,
        contexts: Sequence[int] = (),
        *,
        per_token: TokenType | None = None,
        alpha: float = 2.0,
        beta: float = -2.0,
        gamma: float = 5.0,
    ) -> None:
        scores = {name: _ARROW_TYPES[kind] for name, kind in {**COLUMNS, **ladder_columns(contexts)}.items()}
        tokens: dict[str, pyarrow.DataType] = {}
        if per_token is not None:
            value = pyarrow.float16() if per_token == "float16" else pyarrow.float32()
            index = pyarrow.int32()
            tokens = dict(zip(PER_TOKEN, map(pyarrow.list_, (value, value, index, index)), strict=True))
        self.schema = pyarrow.schema({**_TEXT_COLUMNS, **scores, **_ERROR_COLUMN, **tokens})
        self.contexts = contexts
        self.per_token = per_token
        self.thresholds = {"alpha": alpha, "beta": beta}
        self.gamma = gamma
        self._rows: list[dict[str, Any]] = []

    def add(self, text: Mapping[str, Any], scores: TokenScores | Failed) -> None:
        """Add the row of a document; ``text`` has the columns that depend only on its text."""
        row = dict(text)
        if isinstance(scores, Failed):
            row["error"] = scores.reason
        else:
            row |= document_scores(scores, **self.thresholds, gamma=self.gamma)
            row |= ladder_scores(scores, self.contexts, **self.thresholds)
            row |= self._list_token_values(scores)
        self._rows.append(row)

    def table(self) -> pyarrow.Table:
        """Return all rows."""
        return pyarrow.Table.from_pylist(self._rows, self.schema)  # the scores of a failed document are null

    def _list_token_values(self, scores: TokenScores) -> dict[str, Any]:
        if self.per_token is None:  # such lists are nearly all of a shard's bytes
            return {}
        # Missing values are null: the first tokens are not scored, and the first short contexts are the whole context.
        lsd = _null_before(scores.short_context.window_length, self._round(scores.long - scores.short))
        lcl = _null_before(scores.unscored, self._round(scores.long))
        starts, ends = (column.numpy() for column in scores.offsets.int().unbind(-1))
        return dict(zip(PER_TOKEN, (lsd, lcl, starts, ends), strict=True))

    def _round(self, values: Tensor) -> Tensor:
        if self.per_token == "float32":
            return values
        limit = float(np.finfo(np.float16).max)  # larger values would become infinite
        return values.clamp(-limit, limit).half()


def _null_before(start: int, values: Tensor) -> pyarrow.Array:
    return pyarrow.array(values.numpy(), mask=np.arange(len(values)) < start)


def find_reserved_names(names: Sequence[str]) -> list[str]:
    """Return the columns of a corpus that have the name of a column of scores, or of each other, as SQL reads it."""
    taken = {"key", "file", "row", "text", "token_ids", "token_hash"}
    taken |= {*_TEXT_COLUMNS, *_ERROR_COLUMN, *COLUMNS, *PER_TOKEN}
    clashing = []
    for name in names:
        lower = name.lower()  # SQL ignores case
        if lower in taken or lower.startswith("ladder_"):  # for any context lengths
            clashing.append(name)
        taken.add(lower)
    return sorted(clashing)
