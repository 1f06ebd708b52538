"""Options of RULER's tasks, which follow the name of a task: ``vt(hops=8,chains=2)``."""

import difflib
from typing import Any, NamedTuple

import yaml

from lightning_modules.tasks.questions.ruler import DRAW, NEEDLE_DEPTHS
from lightning_modules.tasks.questions.task import SETTINGS


class Range(NamedTuple):
    """Numbers of a type, from the lowest to the highest."""

    kind: type[int] | type[float]
    low: float
    high: float


_COUNT = Range(int, 1, 1000)

OPTIONS: dict[str, dict[str, Range | tuple[str, ...]]] = {
    "needles": {
        "keys": _COUNT,
        "values": _COUNT,
        "queries": _COUNT,
        "haystack": ("noise", "essay", "needles"),
        "key": tuple(DRAW),
        "value": tuple(DRAW),
    },
    "chains": {"hops": _COUNT, "chains": _COUNT},
    # Below 1.2, most of the words have ranks beyond the vocabulary; above 5, the third answer is too rare.
    "frequent_words": {"alpha": Range(float, 1.2, 5)},
}
"""Options by kind of task, as in `tasks.yaml`: choices, or a range of numbers."""


def base_name(name: str) -> str:
    """Return the name of a task without its options."""
    return name.partition("(")[0]


def configure(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a task of `tasks.yaml`, with the options of its name.

    The returned name has only the options that differ from the task's own settings, in the order of `OPTIONS`: equal
    tasks have equal names. The tokens that are reserved for the answer grow with the number of answers.

    Raises:
        ValueError: If the task does not have an option, or a value is impossible.

    Example:
        >>> configure("vt(chains=3, hops=4)")[0]
        'vt(chains=3)'
    """
    base, opened, text = name.partition("(")
    setting = SETTINGS[base]
    if not opened:
        return name, setting
    known = OPTIONS.get(setting["kind"], {})
    given = _read_options(name, text, list(known))
    changed = {}
    for option, allowed in known.items():
        if option in given:
            value = _check_value(name, option, given[option], allowed)
            if value != setting[option]:
                changed[option] = value
    setting = {**setting, **changed}
    answers = 1
    if setting["kind"] == "needles":
        _check_needles(name, setting)
        answers = setting["queries"] * setting["values"]
        setting["varies_depth"] = answers == 1
    elif setting["kind"] == "chains":
        answers = setting["hops"] + 1
    setting["max_new_tokens"] = max(setting["max_new_tokens"], answers * setting.get("tokens_per_answer", 0))
    if not changed:
        return base, setting
    listed = ",".join(f"{option}={str(value).removesuffix('.0')}" for option, value in changed.items())
    return f"{base}({listed})", setting


def _read_options(name: str, text: str, known: list[str]) -> dict[str, Any]:
    """Read ``option=value,..)``, the part of a name after its opening parenthesis."""
    base = base_name(name)
    if not known:
        raise ValueError(f"The task '{base}' has no options: remove those of '{name}'.")
    found: dict[str, Any] = {}
    for part in text.removesuffix(")").split(","):
        option, equals, value = map(str.strip, part.partition("="))
        if not (text.endswith(")") and option and equals and value):
            raise ValueError(f"The options of '{name}' cannot be read: write '{base}({known[0]}=VALUE,..)'.")
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"The task '{base}' has no option '{option}'.{hint} Its options: {', '.join(known)}.")
        found[option] = yaml.safe_load(value)
    return found


def _check_value(name: str, option: str, value: Any, allowed: Range | tuple[str, ...]) -> Any:
    if isinstance(allowed, Range):
        kinds: tuple[type, ...] = (int, float)
        noun = "a number"
        if allowed.kind is int:
            kinds = (int,)
            noun = "an integer"
        if type(value) in kinds and allowed.low <= value <= allowed.high:  # not a bool, which is an int
            return allowed.kind(value)
        remedy = f"{noun} from {allowed.low} to {allowed.high}"
    else:
        if value in allowed:
            return value
        remedy = f"one of {', '.join(allowed)}"
    raise ValueError(f"`{option}` of '{name}' must be {remedy}, got {value!r}.")


def _check_needles(name: str, setting: dict[str, Any]) -> None:
    keys = setting["keys"]
    if setting["queries"] > keys:
        raise ValueError(
            f"'{name}' asks for {setting['queries']} of {keys} keys: set `keys` to {setting['queries']} or more, or"
            f" `queries` to {keys} or less."
        )
    needles = keys * setting["values"]
    if setting["haystack"] == "essay" and needles > len(NEEDLE_DEPTHS):
        raise ValueError(
            f"'{name}' has {needles} needles (`keys` times `values`), but RULER hides them in essays at"
            f" {len(NEEDLE_DEPTHS)} depths: reduce them, or set `haystack` to noise or needles."
        )
