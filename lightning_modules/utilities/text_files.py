"""Text files that a user names: one document to read, or a result to write."""

import os
from pathlib import Path

from lightning_modules.utilities.files import writable_folder


def read_text(file: str) -> str:
    """Return the text of a UTF-8 file; a ``ValueError`` explains what is wrong with it."""
    if not os.path.isfile(file):
        raise ValueError(f"No file {file!r:.300}: give UTF-8 text files, one document each.")
    if Path(file).suffix.lower() in (".json", ".jsonl", ".parquet"):
        raise ValueError(
            f"'{file}' holds records, not one text: write each document to a text file, or score the file as a corpus"
            " with `longce predict -c configs/score_corpus.yaml`."
        )
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"'{file}' cannot be read ({error.strerror}). Check your rights to it.") from error
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")  # which some editors put in front
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"'{file}', line {line}: byte {content[error.start]:#04x} at offset {error.start} is not UTF-8."
            " Convert the file, for example with `iconv -f latin1 -t utf-8`."
        ) from error
    if not text.strip():
        raise ValueError(f"'{file}' is empty or white space only: there is nothing to score. Leave it out.")
    return text


def check_output(output: str) -> None:
    """Raise a ``ValueError`` for a result file that could not be written, before there is a result."""
    folder = Path(output).absolute().parent
    if Path(output).is_dir() or not folder.is_dir():
        raise ValueError(f"`output` must be a file in a folder that exists, got '{output}'.")
    writable_folder(folder, remedy="Name another file by `output`.")
