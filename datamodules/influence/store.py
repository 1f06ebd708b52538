"""Token weights, or losses of a reference model, which many processes store and every run on the same rows reads.

They are one float16 value per token, aligned with the token store. A second file has one byte per row: 1 when the row's
values are on the disk. The header has everything that they depend on: `gamma`, the cap of weights, is null for losses.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 4
"""Version of the files. Increase it with any change to their content or to how the weights are computed."""

HEADER = "header.json"
WEIGHTS = "influence.bin"
DONE = "done.bin"
DTYPE = np.dtype("<f2")

_REMEDY = "Run `longce influence` with the config of this training run, or remove `data.influence`."


def read_header(folder: Path, *, remedy: str = _REMEDY) -> dict[str, Any] | None:
    """Read the header of a folder of weights, complete or not; None if it does not exist.

    Raises:
        ValueError: If the header or a file is damaged, or has another format.
    """
    try:
        header = json.loads((folder / HEADER).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"'{folder / HEADER}' cannot be read ({error}): use a folder of token weights.") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"'{folder / HEADER}' has no token weights of format {FORMAT}. {remedy}")
    kinds: dict[str, type] = {"tokens": int, "rows": int, "made_from": dict}
    damaged = any(not isinstance(header.get(name), kind) for name, kind in kinds.items())
    if damaged or not isinstance(header["made_from"].get("gamma", ""), int | float | None):
        raise ValueError(f"'{folder / HEADER}' is damaged. Delete the folder and run `longce influence` again.")
    for name, size in ((WEIGHTS, header["tokens"] * DTYPE.itemsize), (DONE, header["rows"])):
        file = folder / name
        found = file.stat().st_size if file.exists() else 0
        if found != size:
            raise ValueError(f"'{file}' has {found:,} of {size:,} bytes: restore it, or delete the folder.")
    return header


def missing_rows(folder: Path) -> NDArray[np.int64]:
    """Return the ascending indices of the rows that have no weights yet."""
    return np.flatnonzero(np.fromfile(folder / DONE, dtype=np.uint8) == 0)


def check_identity(folder: Path, found: dict[str, Any], expected: dict[str, Any], *, remedy: str = _REMEDY) -> None:
    """Raise a ``ValueError`` that names the first value of ``found`` that differs from the expected one."""
    reasons = {
        "token_store": "other training text, or another tokenizer",
        "packing": "differently packed sequences",
    }
    for name, value in expected.items():
        if found.get(name) != value:
            difference = reasons.get(name, f"`{name}` = {found.get(name)}, not {value}")
            raise ValueError(f"The token weights in '{folder}' were computed for {difference}. {remedy}")


@dataclass(frozen=True)
class InfluenceStore:
    """Memory-mapped token weights: one value for each token of a token store.

    It pickles as its path, so loader workers may be forked or spawned.

    Raises:
        ValueError: If the weights are missing, incomplete or damaged.
    """

    folder: Path

    def __post_init__(self) -> None:
        if self.header and len(missing_rows(self.folder)):
            raise ValueError(
                f"The token weights in '{self.folder}' are incomplete: run the same `longce influence` command again to"
                " resume it."
            )

    @cached_property
    def header(self) -> dict[str, Any]:
        """Header with everything that the weights depend on under ``made_from``."""
        header = read_header(self.folder)
        if header is None:
            raise ValueError(f"'{self.folder}' does not contain token weights. {_REMEDY}")
        return header

    @cached_property
    def values(self) -> NDArray[np.float16]:
        """Weight of each token of the stream; 0 for tokens that are not in any sequence."""
        return np.memmap(self.folder / WEIGHTS, dtype=DTYPE, mode="r")

    def check(self, expected: dict[str, Any]) -> "InfluenceStore":
        """Return this store; raise a ``ValueError`` unless it matches these keys of a `PackedRowDataset.identity`."""
        check_identity(self.folder, self.header["made_from"], expected)
        return self

    def __reduce__(self) -> tuple[type["InfluenceStore"], tuple[Path]]:
        return type(self), (self.folder,)
