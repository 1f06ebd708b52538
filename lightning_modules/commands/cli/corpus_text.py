"""Read one document of a corpus."""

import importlib
from pathlib import Path


def read_row(file: str, row: int, text_column: str) -> tuple[str, str]:
    """Return name and text of a row of a parquet file, or of a line of a JSON-lines file, from 0 as in scores.

    Raises:
        ValueError: If the document does not exist or cannot be scored.
    """
    if not (Path(file).is_file() or "://" in file):
        raise ValueError(f"No file {file!r:.300}: pass a .parquet or .jsonl file with `--row`.")
    datamodules = importlib.import_module("datamodules")  # this package may not import it statically
    for ref, text in datamodules.DocumentCorpus(file, text_column=text_column).documents({Path(file).name: [row]}):
        if ref.error is not None or not text.strip():
            raise ValueError(f"Row {row} of '{file}' cannot be scored: {ref.error or 'it is only white space'}.")
        return f"{Path(file).name}-{row}", text
    raise ValueError(f"'{file}' has no row {row}: rows and lines count from 0, and blank lines are not documents.")
