"""Settings of `longce select`; importable without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SelectConfig:
    """Settings of `longce select`.

    Args:
        where: Comparisons of columns, joined by ``and``, ``or`` and ``not``, with parentheses:
            ``key_token_ratio > 0.02 and tokens >= 32768``.
        top: Take the documents with the largest `rank_by` of those that meet the conditions: a fraction up to 1 (all of
            them), or a number from 2.
        rank_by: Column that ranks documents, and whose means `weights` are.
        by: Column that names a document's source; ``folder`` for the folder of its file.
        output: File of the chosen ones: ``.txt`` for their keys, one per line, ``.parquet`` or ``.jsonl`` for the
            documents with ``text`` and scores. An existing file is replaced. A document whose key is empty or has
            several lines is left out of a ``.txt`` file, with a warning.
        files: The documents' files, if they are no longer where they were scored; as `data.files`.
        weights: YAML file for the mean `rank_by` of each source, as `data.weights` of a mixture of these sources:
            add it to the experiment by ``-c``.
    """

    where: str | None = None
    top: float | None = None
    rank_by: str = "benefit_mean"
    by: str = "file"
    output: str | None = None
    files: str | list[str] | None = None
    weights: str | None = None
