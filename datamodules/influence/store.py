"""Read token weights that were computed once, for every training run on the same rows."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 2
"""Version of the files. Increase it with any change to their content or to how the weights are computed."""

HEADER, WEIGHTS = "header.json", "influence.bin"
DONE = "done.bin"  # one byte per row: 1 when its weights are on the disk
DTYPE = np.dtype("<f2")

_REMEDY = "Run `longce influence` with the config of this training run, or remove `data.influence`."


def read_header(folder: Path) -> dict[str, Any] | None:
    """Read the header of a folder of weights, complete or not; None if it does not exist."""
    try:
        header = json.loads((folder / HEADER).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"'{folder / HEADER}' cannot be read ({error}): use a folder of token weights.") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"'{folder}' has no token weights of format {FORMAT}; longce 0.1.0 reads format 1. {_REMEDY}")
    if not isinstance(header.get("made_from"), dict):
        raise ValueError(f"'{folder / HEADER}' is damaged: it lacks `made_from`. Delete the folder.")
    return header


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
    """

    folder: Path

    def __post_init__(self) -> None:
        header = self.header
        if not header["complete"]:
            raise ValueError(
                f"The token weights in '{self.folder}' are incomplete: run the same `longce influence` command again to"
                " resume it."
            )
        found = (self.folder / WEIGHTS).stat().st_size if (self.folder / WEIGHTS).exists() else 0
        if found != header["tokens"] * DTYPE.itemsize:
            raise ValueError(
                f"'{self.folder / WEIGHTS}' is damaged: {found:,} of {header['tokens'] * DTYPE.itemsize:,} bytes."
                " Delete the folder and run `longce influence` again."
            )

    @cached_property
    def header(self) -> dict[str, Any]:
        """Header with statistics of the weights and, under ``made_from``, everything they depend on."""
        header = read_header(self.folder) or {}
        kinds: dict[str, type] = {"complete": bool, "tokens": int, "made_from": dict}
        damaged = any(not isinstance(header.get(name), kind) for name, kind in kinds.items())
        if damaged or not isinstance(header["made_from"].get("gamma"), int | float):
            raise ValueError(
                f"There are no token weights in '{self.folder}', or no whole '{HEADER}' of them. {_REMEDY}"
            )
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
