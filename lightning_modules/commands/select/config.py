"""Settings of `longce select`; importable without torch."""

from dataclasses import dataclass
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveInt

OUTPUTS = (".txt", ".parquet", ".jsonl")


@dataclass(frozen=True)
class SelectConfig:
    """Settings of `longce select`. Conditions apply first, then `unique`, `top` and `sample`.

    Args:
        where: Condition on columns in SQL, such as ``key_token_ratio > 0.02 and tokens >= 32768``. For quantiles:
            ``benefit_mean > quantile_cont(benefit_mean, 0.9) over (partition by source)``.
        unique: Keep only the first of several documents with exactly the same text.
        top: Keep the documents with the largest `rank_by` among those that meet the conditions: a fraction up to 1
            (all), or a number of 2 or more.
        rank_by: Column that ranks documents, and whose mean per source is written to `weights`.
        sample: Draw this number of documents at random, without repetition.
        sample_tokens: Draw documents at random until the next one would exceed this number of tokens.
        sample_weight: Column or SQL expression: of two documents, the one with twice the weight is drawn first twice as
            often; documents of weight 0 or null are never drawn. By default all are equally likely.
        seed: Seed of the sample; the same seed draws the same documents, whatever the order of the scores.
        by: Column that names a document's source; ``folder`` is the folder of its file.
        output: File for the selected documents: ``.txt`` for their keys, one per line, ``.parquet`` or ``.jsonl`` for
            ``text`` and scores. An existing file is replaced. A document whose key is empty or has several lines is
            left out of a ``.txt`` file, with a warning.
        files: Files of the documents, as in `data.files`, if they have moved since they were scored.
        weights: YAML file for the mean `rank_by` of each source, as `data.weights` of a mixture of these sources. Add
            it to an experiment with ``-c``.
        mixture: YAML file for a mixture of the sources in `output`, weighted by their tokens, as `data` of an
            experiment. Add it with ``-c``.
        page: HTML file with histograms, examples, and a slider for thresholds, of the documents that are selected.
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
    weights: str | None = None
    mixture: str | None = None
    page: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that are never valid."""
        if self.top is not None and (self.top <= 0 or (self.top > 1 and self.top != int(self.top))):
            raise ValueError(f"`top` must be a fraction up to 1 or a whole number of documents, got {self.top}.")
        if self.sample_weight is not None and self.sample is None and self.sample_tokens is None:
            raise ValueError("`sample_weight` has no effect without `sample` or `sample_tokens`: set one of them.")
        if self.output is not None and Path(self.output).suffix not in OUTPUTS:
            raise ValueError(f"`output` = '{self.output}' must end in one of {', '.join(OUTPUTS)}.")
        if self.mixture is not None and (self.output is None or self.output.endswith(".txt")):
            raise ValueError("`mixture` needs the documents: set `output` to a .jsonl or .parquet file.")
