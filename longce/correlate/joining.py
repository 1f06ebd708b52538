"""Join the values of models from several files, and add the differences to the names of models and values."""

import difflib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from lightning_modules.models.loading.provenance import (
    UNKNOWN,
    Numerics,
    Provenance,
    describe_difference,
    describe_unknown,
)
from lightning_modules.utilities.identity import shorten_hashes
from longce.correlate.result_files import Measured, is_perplexity

_ALIASES = {"ppl": "perplexity", "longppl": "longppl", "perplexity": "perplexity"}
"""Canonical names of perplexities, by their lower-case names in tables."""


class Models(NamedTuple):
    """Measured values of models."""

    values: dict[str, dict[str, float]]  # by model and by name; NaN if a measurement is not a number
    main: set[str]  # names of the values that summarize others, such as an average over tasks
    provenance: dict[str, str]  # content, dtype and attention of the models whose files have them
    key_tokens: dict[str, str]  # by name of a LongPPL: how its key tokens were found

    def names(self, kind: str) -> list[str]:
        """Return the names of perplexities, the ``metrics``, or of all other values, the ``scores``."""
        names = dict.fromkeys(name for entry in self.values.values() for name in entry)
        return [name for name in names if is_perplexity(name) == (kind == "metrics")]


def join(entries: Sequence[Measured]) -> Models:
    """Join the values of the same models.

    Models are the same if their names are equal, or if one name is the last component of exactly one other name
    (``Qwen2-7B`` and ``/models/Qwen2-7B``), and if no file has other weights, dtype, tokenizer or attention under that
    name. Values measured with different settings get different names: LongPPL by two evaluators is two metrics, and
    the names contain what differs.
    """
    models = _model_names(entries)
    names = _value_names(entries)
    joined = Models({}, set(), {}, {})
    places: dict[tuple[str, str], str] = {}
    for number, entry in enumerate(entries):
        model = models[number]
        if entry.provenance is not None:
            joined.provenance[model] = str(entry.provenance)
        if entry.key_tokens:
            joined.key_tokens[names[number, "longppl"]] = entry.key_tokens
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


def describe_numerics(entries: Sequence[Measured]) -> list[str]:
    """Return sentences on dtype, precision and attention: where they differ, and where they are not recorded."""
    groups: dict[Numerics, list[str]] = {}
    for entry in entries:
        if entry.numerics != UNKNOWN:
            groups.setdefault(entry.numerics, []).append(entry.model)
    # Without the lines of a table.
    unknown = [re.sub(r":\d+$", "", entry.place) for entry in entries if not entry.numerics.is_known]
    return describe_unknown(unknown) + ([describe_difference(groups)] if len(groups) > 1 else [])


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


def _find_differing(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the first keys whose values together tell all settings apart, so that names stay short."""
    kept: list[str] = []
    parts = 1
    for key in dict.fromkeys(key for settings in found for key in settings):
        more = len({repr([settings.get(name) for name in (*kept, key)]) for settings in found})
        if more > parts:
            kept.append(key)
            parts = more
    return kept


def _canonical_name(name: str) -> str:
    return _ALIASES.get(name.lower(), name)


def _trim_name(name: str) -> str:
    return str(Path(name).expanduser()) if name.startswith("~") else name.rstrip("/")


def _model_names(entries: Sequence[Measured]) -> list[str]:
    """Name the model of each entry: the last component of its name, unless several models share that.

    Models of one name but different content or numerics are told apart by what differs.
    """
    names = [_trim_name(entry.model) for entry in entries]
    shared = Counter(name.rpartition("/")[2] for name in set(names) if "/" in name)
    short = [name if shared[last := name.rpartition("/")[2]] > 1 else last for name in names]
    variants: dict[str, set[Provenance]] = defaultdict(set)
    for name, entry in zip(short, entries, strict=True):
        variants[name] |= {entry.provenance} if entry.provenance is not None else set()
    return [_name_variant(name, entry, variants[name]) for name, entry in zip(short, entries, strict=True)]


def _name_variant(name: str, entry: Measured, variants: Set[Provenance]) -> str:
    differing = _find_differing([each._asdict() for each in variants])
    if not differing:
        return name
    if entry.provenance is None:
        known = "; ".join(sorted(map(str, variants)))
        raise ValueError(
            f"{entry.place} has '{name}', but the other files have {len(variants)} versions of it ({known}): name the"
            " right one (NAME=FILE), or remove the others."
        )
    details = ", ".join(f"{key}={getattr(entry.provenance, key)}" for key in differing)
    return f"{name} [{shorten_hashes(details)}]"


def _value_names(entries: Sequence[Measured]) -> dict[tuple[int, str], str]:
    """Name each value of each entry by its canonical name and the settings that differ between entries."""
    settings_of: dict[str, dict[tuple[int, str], Mapping[str, Any]]] = defaultdict(dict)
    for number, entry in enumerate(entries):
        for name in entry.values:
            settings_of[_canonical_name(name)][number, name] = entry.settings.get(name, {})
    names = {}
    for canonical, places in settings_of.items():
        reported = [settings for settings in places.values() if settings]
        differing = _find_differing(reported)
        for place, settings in places.items():
            details = ", ".join(f"{key}={settings.get(key)}" for key in differing) if settings else ""
            details = shorten_hashes(details)
            names[place] = f"{canonical} [{details}]" if details else canonical
    return names
