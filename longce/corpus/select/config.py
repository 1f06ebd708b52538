"""Settings of `longce corpus select`; importable without torch."""

from dataclasses import dataclass
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveInt

OUTPUTS = (".txt", ".parquet", ".jsonl")
FIGURES = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class SelectConfig:
    """Settings of `longce corpus select`. Conditions apply first, then `unique`, `top` and `sample`.

    Args:
        where: Condition on columns in SQL, such as ``key_token_ratio > 0.02 and tokens >= 32768``. For quantiles:
            ``benefit_mean > quantile_cont(benefit_mean, 0.9) over (partition by source)``.
        unique: Keep only the first of several documents with exactly the same text (column ``text_hash``).
        top: Keep the documents with the largest `rank_by` among those that meet the conditions: a fraction up to 1
            (all), or a number of 2 or more.
        rank_by: Column that ranks documents.
        sample: Draw this number of documents at random, without repetition.
        sample_tokens: Draw documents at random until the next one would exceed this number of tokens.
        sample_weight: Column or SQL expression: of two documents, the one with twice the weight is drawn first twice as
            often; documents of weight 0 or null are never drawn. By default all are equally likely.
        seed: Seed of the sample; the same seed draws the same documents, whatever the order of the scores.
        by: Column that names a document's source; ``folder`` is the folder of its file.
        output: File for the selected documents: ``.txt`` for their keys, one per line, ``.parquet`` or ``.jsonl`` for
            ``text`` and scores. An existing file is replaced. A document whose key is empty or has several lines is
            left out of a ``.txt`` file, with a warning.
        files: Files of the documents, if they have moved since they were scored.
        figure: ``.svg``, ``.png`` or ``.pdf`` file with histograms of the documents that are selected.
    """

    where: str | None = None
    unique: bool = False
    top: float | None = None
    rank_by: str = "benefit_mean"
    sample: PositiveInt | None = None
    sample_tokens: PositiveInt | None = None
    sample_weight: str | None = None
    seed: NonNegativeInt = 0
    by: str = "file"
    output: str | None = None
    files: str | list[str] | None = None
    figure: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that are never valid."""
        if self.top is not None and (self.top <= 0 or (self.top > 1 and self.top != int(self.top))):
            raise ValueError(f"`top` must be a fraction up to 1 or a whole number of documents, got {self.top}.")
        if self.sample_weight is not None and self.sample is None and self.sample_tokens is None:
            raise ValueError("`sample_weight` has no effect without `sample` or `sample_tokens`: set one of them.")
        for option, path, endings in (("output", self.output, OUTPUTS), ("figure", self.figure, FIGURES)):
            if path is not None and Path(path).suffix not in endings:
                raise ValueError(f"`{option}` = '{path}' must end in one of {', '.join(endings)}.")
