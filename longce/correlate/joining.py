"""Join the values of models from several files, and add the differences to the names of models and values."""

import difflib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lightning_modules.utilities.identity import shorten_hashes
from longce.correlate.result_files import Measured, is_perplexity, known_name


class Models(NamedTuple):
    """Measured values of models."""

    values: dict[str, dict[str, float]]  # by model and by name; NaN if a measurement is not a number
    main: set[str]  # names of the values that summarize others, such as an average over tasks
    provenance: dict[str, str]  # content, dtype and attention of the models whose files have them
    key_tokens: dict[str, str]  # by name of a LongPPL: how its key tokens were found

    def names(self, kind: str) -> list[str]:
        """Return the names of perplexities, the ``metrics``, or of all other values, the ``scores``."""
        names = dict.fromkeys(chain.from_iterable(self.values.values()))
        return [name for name in names if is_perplexity(name) == (kind == "metrics")]


def join(entries: Sequence[Measured]) -> Models:
    """Join the values of the same models.

    Models are the same if their names are equal, or if one name is the last component of exactly one other name
    (``Qwen2-7B`` and ``/models/Qwen2-7B``) or a path to the same weights, and if no file has other weights, dtype,
    tokenizer or attention under that name. Values measured with different settings get different names: LongPPL by two
    evaluators is two metrics, and the names contain what differs.
    """
    models = _name_models(entries)
    entries = _name_evaluators(entries)
    differing = _find_differing_settings(entries)
    joined = Models({}, set(), {}, {})
    places: dict[tuple[str, str], str] = {}
    for model, entry in zip(models, entries, strict=True):
        if entry.provenance is not None:
            joined.provenance[model] = str(entry.provenance)
        for given, value in entry.values.items():
            name = given
            if value.settings:
                name = _add_details(given, value.settings, differing[given])
            number = value.number
            known = joined.values.setdefault(model, {}).setdefault(name, number)
            place = places.setdefault((model, name), entry.place)
            if known != number and not (math.isnan(known) and math.isnan(number)):
                raise ValueError(
                    f"'{model}' has {name} = {known:g} in {place} and {number:g} in {entry.place}: remove one of"
                    " them, or rename one of the models (NAME=FILE)."
                )
            if value.is_main:
                joined.main.add(name)
            if given == "longppl" and entry.key_tokens:
                joined.key_tokens[name] = entry.key_tokens
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
    for word in map(known_name, wanted):
        found = [word]
        if word not in known:
            found = [name for name in known if name.partition(" [")[0] == word]
        if not found:
            near = difflib.get_close_matches(word, known, n=3) or known[:20]
            raise ValueError(f"No {kind} '{word}' in these files, only {', '.join(near)}.")
        chosen += found
    return list(dict.fromkeys(chosen))


def _name_models(entries: Sequence[Measured]) -> list[str]:
    """Name the model of each entry: the last component of its name, unless several models share that.

    Models of one name but different content or numerics are told apart by what differs.
    """
    given = [_trim_name(entry.model) for entry in entries]
    # A model may be given by several paths, or by its hub id: the first name of its content replaces the others, also
    # where a file knows a name only.
    first_names: dict[tuple[str, str], str] = {}  # by last component and content
    replaced: dict[str, str] = {}
    for name, entry in zip(given, entries, strict=True):
        if entry.provenance is not None and entry.provenance.identity:
            content = (name.rpartition("/")[2], entry.provenance.identity)
            first = first_names.setdefault(content, replaced.get(name, name))
            replaced.setdefault(name, first)
    full = [replaced.get(name, name) for name in given]
    shared = Counter(name.rpartition("/")[2] for name in set(full) if "/" in name)
    names = []
    versions: dict[str, set[Any]] = defaultdict(set)
    for name, entry in zip(full, entries, strict=True):
        last = name.rpartition("/")[2]
        names.append(name if shared[last] > 1 else last)
        if entry.provenance is not None:
            versions[names[-1]].add(entry.provenance)
    for number, entry in enumerate(entries):
        found = versions[names[number]]
        if len(found) < 2:
            continue
        if entry.provenance is None:
            known = "; ".join(sorted(map(str, found)))
            raise ValueError(
                f"{entry.place} has '{names[number]}', but the other files have {len(found)} versions of it ({known}):"
                " name the right one (NAME=FILE), or remove the others."
            )
        differing = _find_differing(each._asdict() for each in found)
        names[number] = _add_details(names[number], entry.provenance._asdict(), differing)
    return names


def _name_evaluators(entries: Sequence[Measured]) -> list[Measured]:
    """Give each evaluator the first of its names: a folder may be given by several paths, or by its hub id."""
    first_names: dict[tuple[str, str], str] = {}  # by last component and content
    found = []
    for entry in entries:
        values = {}
        for name, value in entry.values.items():
            settings = dict(value.settings)
            identity = settings.get("evaluator.identity")
            if identity:
                evaluator = settings["evaluator"]
                settings["evaluator"] = first_names.setdefault((Path(evaluator).name, identity), evaluator)
                value = value._replace(settings=settings)
            values[name] = value
        found.append(entry._replace(values=values))
    return found


def _trim_name(name: str) -> str:
    return str(Path(name).expanduser()) if name.startswith("~") else name.rstrip("/")


def _find_differing_settings(entries: Sequence[Measured]) -> dict[str, list[str]]:
    """Return the settings that differ among the values of a name, by name."""
    settings: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in entries:
        for name, value in entry.values.items():
            if value.settings:
                settings[name].append(value.settings)
    return {name: _find_differing(found) for name, found in settings.items()}


def _find_differing(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the first keys whose values together tell all settings apart, so that names stay short."""
    found = list(found)
    kept: list[str] = []
    groups = 1
    for key in dict.fromkeys(chain.from_iterable(found)):
        more = [*kept, key]
        values = [repr([settings.get(name) for name in more]) for settings in found]
        told_apart = len(set(values))
        if told_apart > groups:
            kept = more
            groups = told_apart
    return kept


def _add_details(name: str, settings: Mapping[str, Any], differing: Sequence[str]) -> str:
    """Return ``longppl [evaluator=a, alpha=2.0]``, or the name alone if no setting differs."""
    if not differing:
        return name
    details = ", ".join(f"{key}={settings.get(key)}" for key in differing)
    return f"{name} [{shorten_hashes(details)}]"
