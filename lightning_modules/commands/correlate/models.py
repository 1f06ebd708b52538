"""Values of many models put together from many files."""

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_modules.commands.correlate.result_files import Measured, is_perplexity

_ALIASES = {"ppl": "perplexity", "longppl": "longppl", "perplexity": "perplexity"}
"""Names by which tables and people call the two; by their letters in small."""


class Models(NamedTuple):
    """What is known of models.

    Attributes:
        values: By model, and by name of the value; NaN for what was measured and is no number.
        metrics: Names of the perplexities.
        scores: Names of all other values.
        main: Names of those that stand for others.
    """

    values: dict[str, dict[str, float]]
    metrics: list[str]
    scores: list[str]
    main: set[str]


def join(entries: Sequence[Measured]) -> Models:
    """Put together what files say of the same models.

    Models are the same if their names are, or if one is the last part of the other (``Qwen2-7B`` and
    ``/models/Qwen2-7B``) and of no third one. Values of other settings are others: LongPPL by two evaluators is two
    metrics, told apart by what differs.

    Args:
        entries: Of all files.

    Raises:
        ValueError: If two places give different values for the same.
    """
    names = _model_names([entry.model for entry in entries])
    labels = _labels(entries)
    values: dict[str, dict[str, float]] = {}
    places: dict[tuple[str, str], str] = {}
    main: set[str] = set()
    for number, entry in enumerate(entries):
        model = names[_trimmed(entry.model)]
        for name, value in entry.values.items():
            label = labels[number, name]
            known = values.setdefault(model, {}).setdefault(label, value)
            if known != value and not (math.isnan(known) and math.isnan(value)):
                raise ValueError(
                    f"'{model}' has {label} = {known:g} in {places[model, label]} and {value:g} in {entry.place}: leave"
                    " one of them out, or give one of the models another name (NAME=FILE)."
                )
            places.setdefault((model, label), entry.place)
            main |= {label} if name in entry.main else set()
    known_names = list(dict.fromkeys(label for entry in values.values() for label in entry))
    metrics = [name for name in known_names if is_perplexity(name)]
    return Models(values, metrics, [name for name in known_names if not is_perplexity(name)], main)


def select(wanted: Sequence[str] | None, there: Sequence[str], models: Models, kind: str) -> list[str]:
    """Names of values to look at: those wanted, whatever they are, or else the main ones of a kind.

    Raises:
        ValueError: If there are none, or one that is wanted is not there.
    """
    if wanted is None and not there:
        raise ValueError(f"There are no {kind} in these files: add some that have them.")
    if wanted is None:
        return [name for name in there if name in models.main] or list(there)
    there = [*there, *(name for name in (*models.metrics, *models.scores) if name not in there)]
    chosen = []
    for word in wanted:
        found = [name for name in there if name == word] or [
            name for name in there if _canonical(name.partition(" [")[0]) == _canonical(word)
        ]
        if not found:
            near = difflib.get_close_matches(word, there, n=3) or list(there)[:20]
            raise ValueError(f"No {kind} '{word}' in these files. There are: {', '.join(near)}.")
        chosen += found
    return list(dict.fromkeys(chosen))


def _canonical(name: str) -> str:
    return _ALIASES.get(name.lower(), name)


def _trimmed(name: str) -> str:
    return str(Path(name).expanduser()) if name.startswith("~") else name.rstrip("/")


def _model_names(given: Sequence[str]) -> dict[str, str]:
    """Under which name each model is known."""
    names = list(dict.fromkeys(map(_trimmed, given)))
    whole = [name for name in names if "/" in name]
    last: dict[str, list[str]] = {}
    for name in whole:
        last.setdefault(name.rpartition("/")[2], []).append(name)
    # A name is short as long as it says enough.
    return {name: short if len(last.get(short := name.rpartition("/")[2], [name])) == 1 else name for name in names}


def _labels(entries: Sequence[Measured]) -> dict[tuple[int, str], str]:
    """How each value of each entry is called: by its name, and by those settings that are not the same everywhere."""
    labels: dict[tuple[int, str], str] = {}
    by_name: dict[str, list[tuple[int, str, Mapping[str, Any]]]] = {}
    for number, entry in enumerate(entries):
        for name in entry.values:
            by_name.setdefault(_canonical(name), []).append((number, name, entry.settings.get(name, {})))
    for canonical, places in by_name.items():
        keys = dict.fromkeys(key for _, _, settings in places for key in settings)
        told = [settings for _, _, settings in places if settings]
        differ = [key for key in keys if len({repr(settings.get(key)) for settings in told}) > 1]
        for number, name, settings in places:
            parts = ", ".join(f"{key}={settings.get(key)}" for key in differ) if settings else ""
            labels[number, name] = f"{canonical} [{parts}]" if parts else canonical
    return labels
