"""Read text files that the user names, and check result files before they are written."""

import os
from pathlib import Path

from lightning_modules.utilities.files import writable_folder


def read_text(file: str, *, may_be_blank: bool = False) -> str:
    """Read a UTF-8 text file; raise a ``ValueError`` that explains the problem if it cannot be scored."""
    if not os.path.isfile(file):
        raise ValueError(f"No file {file!r:.300}: pass UTF-8 text files, one document each.")
    suffix = Path(file).suffix.lower()
    if suffix in (".json", ".jsonl", ".parquet", ".gz", ".zst"):
        reason = "is compressed" if suffix in (".gz", ".zst") else "contains records, not one text"
        raise ValueError(
            f"'{file}' {reason}: choose a document with `--row`, or score all of them with `longce score` or `longce"
            " corpus score`."
        )
    content = Path(file).read_bytes()
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")  # the byte-order mark that some editors add
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"'{file}', line {line}: byte {content[error.start]:#04x} at offset {error.start} is not UTF-8."
            " Convert the file, for example with `iconv -f latin1 -t utf-8`."
        ) from error
    if not text.strip() and not may_be_blank:
        raise ValueError(f"'{file}' is empty or only white space: remove it.")
    return text


def check_output(output: str) -> None:
    """Raise a ``ValueError`` if a result file cannot be written; call it before the work begins."""
    folder = Path(output).absolute().parent
    if Path(output).is_dir() or not folder.is_dir():
        raise ValueError(f"`output` must be a file in an existing folder, got '{output}'.")
    writable_folder(folder, remedy="Choose another file with `output`.")
