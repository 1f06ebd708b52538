"""Options of generation (`gen_kwargs`), with the names of lm-evaluation-harness; importable without torch."""

import re
from collections.abc import Mapping
from typing import Any

import yaml
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveInt, restricted_number_type

_TYPES: dict[str, Any] = {
    "temperature": restricted_number_type(None, float, [(">=", 0), ("<=", 100)]),
    "top_k": NonNegativeInt,
    "top_p": restricted_number_type(None, float, [(">", 0), ("<=", 1)]),
    "min_p": ClosedUnitInterval,
    "seed": NonNegativeInt,
    "max_gen_toks": PositiveInt,
    "do_sample": bool,
    "until": lambda value: value,
}


def parse_gen_kwargs(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Parse ``temperature=0.8,top_p=0.95`` or a mapping; raise a ``ValueError`` for an unknown or impossible value.

    The result replaces arguments of tasks, so it has ``do_sample`` if a temperature is given: most tasks have
    ``do_sample: false``, under which a temperature has no effect. ``do_sample`` alone has a temperature of 1.
    """
    if isinstance(given, str):
        given = _split_arguments(given)
    found: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name not in _TYPES:
            raise ValueError(f"`gen_kwargs` has the unknown name '{name}'; known are {', '.join(_TYPES)}.")
        try:
            found[name] = _TYPES[name](value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{name}` of a generation: {error}.") from None
    if found.get("do_sample"):
        found.setdefault("temperature", 1.0)
    if found.get("temperature") and found.get("do_sample") is not False:
        found["do_sample"] = True
    return found


def _split_arguments(text: str) -> dict[str, Any]:
    arguments = {}
    for argument in re.split(r"[,\s]+(?=\w+=)", text.strip()):
        name, _, value = argument.partition("=")
        arguments[name] = yaml.safe_load(value)
    return arguments


def generation_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `transformers.GenerationConfig` for those of a task, or of `parse_gen_kwargs`.

    Greedy without a temperature. Unlike by default in transformers, sampling excludes no token if ``top_k`` is not set.
    """
    others = ("temperature", "do_sample", "until", "max_gen_toks", "seed")
    options = {name: value for name, value in arguments.items() if name not in others and value is not None}
    temperature = arguments.get("temperature")
    if temperature is None and arguments.get("do_sample"):
        temperature = 1.0
    if arguments.get("do_sample") is False or not temperature:
        for name in ("top_k", "top_p", "min_p"):
            options.pop(name, None)
        return {**options, "do_sample": False}
    return {"top_k": 0, **options, "do_sample": True, "temperature": float(temperature)}
