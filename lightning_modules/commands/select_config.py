"""Settings of `longce select`; importable without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SelectConfig:
    """Settings of `longce select`.

    Args:
        where: Condition on columns in SQL, such as ``key_token_ratio > 0.02 and tokens >= 32768``. For quantiles:
            ``benefit_mean > quantile_cont(benefit_mean, 0.9) over (partition by source)``.
        top: Keep the documents with the largest `rank_by` among those that meet the conditions: a fraction up to 1
            (all), or a number of 2 or more.
        rank_by: Column that ranks documents, and whose mean per source is written to `weights`.
        by: Column that names a document's source; ``folder`` is the folder of its file.
        output: File for the selected documents: ``.txt`` for their keys, one per line, ``.parquet`` or ``.jsonl`` for
            ``text`` and scores. An existing file is replaced. A document whose key is empty or has several lines is
            left out of a ``.txt`` file, with a warning.
        files: Files of the documents, as in `data.files`, if they have moved since they were scored.
        weights: YAML file for the mean `rank_by` of each source, as `data.weights` of a mixture of these sources. Add
            it to an experiment with ``-c``.
    """

    where: str | None = None
    top: float | None = None
    rank_by: str = "benefit_mean"
    by: str = "file"
    output: str | None = None
    files: str | list[str] | None = None
    weights: str | None = None
