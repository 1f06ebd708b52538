"""Join the results of many models from many files."""

import difflib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_modules.commands.correlate.result_files import Measured, is_perplexity

_ALIASES = {"ppl": "perplexity", "longppl": "longppl", "perplexity": "perplexity"}
"""Canonical names of perplexities, by their lower-case names in tables."""


class Models(NamedTuple):
    """Measured values of models."""

    values: dict[str, dict[str, float]]  # by model and by name; NaN if a measurement is not a number
    main: set[str]  # names of the values that summarize others, such as an average over tasks

    def names(self, kind: str) -> list[str]:
        """Return the names of perplexities, the ``metrics``, or of all other values, the ``scores``."""
        names = dict.fromkeys(name for entry in self.values.values() for name in entry)
        return [name for name in names if is_perplexity(name) == (kind == "metrics")]


def join(entries: Sequence[Measured]) -> Models:
    """Join the values of the same models.

    Models are the same if their names are equal, or if one name is the last component of exactly one other name
    (``Qwen2-7B`` and ``/models/Qwen2-7B``). Values measured with different settings get different names: LongPPL by
    two evaluators is two metrics, and the names contain what differs.
    """
    models = _model_names([entry.model for entry in entries])
    names = _value_names(entries)
    joined = Models({}, set())
    places: dict[tuple[str, str], str] = {}
    for number, entry in enumerate(entries):
        model = models[_trim_name(entry.model)]
        for given, value in entry.values.items():
            name = names[number, given]
            known = joined.values.setdefault(model, {}).setdefault(name, value)
            place = places.setdefault((model, name), entry.place)
            if known != value and not (math.isnan(known) and math.isnan(value)):
                raise ValueError(
                    f"'{model}' has {name} = {known:g} in {place} and {value:g} in {entry.place}: remove one of"
                    " them, or rename one of the models (NAME=FILE)."
                )
            if given in entry.main:
                joined.main.add(name)
    return joined


def choose_names(wanted: Sequence[str] | None, models: Models, kind: str) -> list[str]:
    """Return the wanted names of values, or by default the main ``metrics`` or ``scores``.

    Wanted names may omit the settings in brackets, and scores may include perplexities.
    """
    known = models.names(kind)
    if wanted is None:
        if not known:
            raise ValueError(f"These files have no {kind}: add files with {kind}.")
        return [name for name in known if name in models.main] or known
    known = list(dict.fromkeys([*known, *models.names("metrics"), *models.names("scores")]))
    chosen = []
    for word in wanted:
        same = [name for name in known if _canonical_name(name.partition(" [")[0]) == _canonical_name(word)]
        found = [word] if word in known else same
        if not found:
            near = difflib.get_close_matches(word, known, n=3) or known[:20]
            raise ValueError(f"No {kind} '{word}' in these files, only {', '.join(near)}.")
        chosen += found
    return list(dict.fromkeys(chosen))


def _canonical_name(name: str) -> str:
    return _ALIASES.get(name.lower(), name)


def _trim_name(name: str) -> str:
    return str(Path(name).expanduser()) if name.startswith("~") else name.rstrip("/")


def _model_names(given: Sequence[str]) -> dict[str, str]:
    """Shorten model names to their last components, unless several models share one."""
    names = {_trim_name(name) for name in given}
    shared = Counter(name.rpartition("/")[2] for name in names if "/" in name)
    return {name: name if shared[short := name.rpartition("/")[2]] > 1 else short for name in names}


def _value_names(entries: Sequence[Measured]) -> dict[tuple[int, str], str]:
    """Name each value of each entry by its canonical name and the settings that differ between entries."""
    settings_of: dict[str, dict[tuple[int, str], Mapping[str, Any]]] = defaultdict(dict)
    for number, entry in enumerate(entries):
        for name in entry.values:
            settings_of[_canonical_name(name)][number, name] = entry.settings.get(name, {})
    names = {}
    for canonical, places in settings_of.items():
        reported = [settings for settings in places.values() if settings]
        keys = dict.fromkeys(key for settings in reported for key in settings)
        differing = [key for key in keys if len({repr(settings.get(key)) for settings in reported}) > 1]
        for place, settings in places.items():
            details = ", ".join(f"{key}={settings.get(key)}" for key in differing) if settings else ""
            names[place] = f"{canonical} [{details}]" if details else canonical
    return names
