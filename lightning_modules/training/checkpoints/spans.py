"""Spans of a training between resumes: from which step each config applies, and which settings it changed."""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_modules.training.checkpoints.io import describe_checkpoint, load_without_tensors
from lightning_modules.utilities.files import undamaged, write_atomically

SPANS_FILE = "spans.json"
"""File in the folder of a resumed run with its spans."""

CONFIG_FILE = "config.yaml"

CONFIG_KEY = "longce_config"
"""Key in a checkpoint for the config (YAML) and the spans (JSON) of the training that wrote it."""

log = logging.getLogger(__name__)

_NOT_COMPUTED = ("ckpt_path", "trainer.logger")
"""Settings for the start and the logs of a run, which do not affect its results; URLs may contain passwords."""
_PRESENTATION = re.compile(r".*\.(dirpath|\w+_dir)|trainer\.(enable_\w+|log_every_n_steps)")
_CLASSES = ("model.optimizer.class_path", "model.lr_scheduler.class_path")
_WITHOUT_EFFECT = {
    "seed_everything": "the random states are those of the checkpoint",
    "model.pretrained_model_name_or_path": "the weights are those of the checkpoint",
    "model.revision": "the weights are those of the checkpoint",
}


class Span(NamedTuple):
    """A part of a training from an optimizer step on, with one config.

    ``config`` is the name of its file, or empty if it is in the folder of another run, and ``digest`` the SHA-256 of
    its text. ``changed`` has the values before and after for each setting that the config changed, by dotted name.
    """

    step: int
    config: str
    changed: dict[str, tuple[Any, Any]]
    digest: str = ""

    def describe(self) -> list[str]:
        """Return a line for each changed setting, with its effect."""
        lines = []
        for name, (before, after) in self.changed.items():
            effect = "it takes effect"
            reason = _WITHOUT_EFFECT.get(name)
            if reason:
                effect = f"it has no effect, because {reason}"
            elif name.startswith("trainer.callbacks."):
                effect = "it takes effect unless the callback restores it from the checkpoint, as `EarlyStopping` does"
            lines.append(f"Resumed at step {self.step}: `{name}` is {after} instead of {before}; {effect}.")
        return lines


def resumed_spans(checkpoint: Path | None, config: str) -> list[Span]:
    """Return the spans of a training with this config (YAML) that resumes from a checkpoint, or starts without one.

    The checkpoint has the earlier config and spans, so that all processes find the same.

    Raises:
        ValueError: If the checkpoint has the state of another optimizer or schedule.
    """
    digest = hashlib.sha256(config.encode()).hexdigest()
    if checkpoint is None:
        return [Span(0, CONFIG_FILE, {}, digest)]
    step = int(describe_checkpoint(checkpoint).step)
    text, spans = _read_earlier(checkpoint)
    # Spans that began at this step or later were stopped before they had a checkpoint, or are given up.
    earlier = [span for span in spans if span.step < step]
    if text is None or not earlier:
        log.warning(
            "'%s' has no config: the changes of this resume are unknown, and the optimizer's settings come from the"
            " checkpoint.",
            checkpoint,
        )
        return [Span(step, CONFIG_FILE, {}, digest)]
    changed = find_changes(yaml.safe_load(text), yaml.safe_load(config))
    for name in _CLASSES:
        if name in changed:
            before, after = changed[name]
            raise ValueError(
                f"`{name.removesuffix('.class_path')}` is {after}, but '{checkpoint}' has the state of {before}:"
                " restore it, or start a new training from the weights (`longce export`)."
            )
    return [*earlier, Span(step, "", changed, digest)]


def _read_earlier(checkpoint: Path) -> tuple[str | None, list[Span]]:
    """Return the config and the spans of the training that wrote a checkpoint; None if no command wrote it."""
    try:
        stored = load_without_tensors(checkpoint).get(CONFIG_KEY)
    except Exception:  # damaged, which is reported when it is loaded
        stored = None
    return (None, []) if stored is None else (str(stored["config"]), _parse_spans(stored["spans"]))


def read_spans(folder: Path) -> list[Span]:
    """Return the spans of the run in a folder."""
    path = folder / SPANS_FILE
    if not path.is_file():
        return [Span(0, CONFIG_FILE, {})]
    with undamaged(path):
        return _parse_spans(path.read_bytes())


def _parse_spans(text: str | bytes) -> list[Span]:
    return [Span(int(step), str(config), {**changed}, *rest) for step, config, changed, *rest in json.loads(text)]


def write_spans(folder: Path, spans: Sequence[Span], config: str) -> None:
    """Write the spans of a resumed run; ``config`` is the name of the last one's config."""
    names = {hashlib.sha256(path.read_bytes()).hexdigest(): path.name for path in folder.glob("*.yaml")}
    # Those of another folder have no file here.
    earlier = [span._replace(config=names.get(span.digest, "")) for span in spans[:-1]]
    spans = [*earlier, spans[-1]._replace(config=config)]
    if len(spans) > 1:
        write_atomically(folder / SPANS_FILE, (json.dumps(spans, indent=1) + "\n").encode())


def describe_for_checkpoint(config: str) -> str:
    """Return a config (YAML) without its loggers, whose addresses may have passwords."""
    values = yaml.safe_load(config)
    if isinstance(values.get("trainer"), dict):
        values["trainer"].pop("logger", None)
    return yaml.safe_dump(values, sort_keys=False)


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two configs, with both values, by dotted name; null is a missing value.

    Example:
        >>> find_changes({"model": {"gamma": 5, "lora": None}}, {"model": {"gamma": 3, "lora": {"r": 8}}})
        {'model.gamma': (5, 3), 'model.lora.r': (None, 8)}
    """
    old = flatten_config(before)
    new = flatten_config(after)
    changed: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) == new.get(name) or _PRESENTATION.fullmatch(name):
            continue
        # A name such as `auto` in place of a class: the members of the class are reported.
        if (name not in old and _has_members(name, old)) or (name not in new and _has_members(name, new)):
            continue
        changed[name] = (old.get(name), new.get(name))
    return changed


def _has_members(name: str, flat: Mapping[str, Any]) -> bool:
    return any(other.startswith(f"{name}.") for other in flat)


def flatten_config(value: Any, name: str = "") -> dict[str, Any]:
    """Return the settings of a config that are not null by dotted names, without where a run starts and logs.

    Objects in lists have the names of their classes, with their own ``name`` if they have one, and a number if there
    are several of them: places in a list differ between runs.

    Example:
        >>> flatten_config({"a": {"b": 1, "c": None}, "d": [{"e": [2, 3]}]})
        {'a.b': 1, 'd.0.e': '[2, 3]'}
        >>> flatten_config({"model": {"class_path": "mine.Model", "init_args": {"stride": 16}}})
        {'model.class_path': 'mine.Model', 'model.stride': 16}
    """
    if value is None or name in _NOT_COMPUTED:
        return {}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = _name_items(value)
    if not isinstance(value, dict):
        return {name: value if isinstance(value, bool | int | float) else str(value)}
    if name == "model":  # the same names whether or not the config names a class
        value = value | (value.get("init_args") or {})
        value.pop("init_args", None)
    flat: dict[str, Any] = {}
    for key, part in value.items():
        flat |= flatten_config(part, f"{name}.{key}".lstrip("."))
    return flat


def _name_items(items: Sequence[Any]) -> dict[str, Any]:
    """Return the items of a list by their names."""
    named: dict[str, Any] = {}
    copies: Counter[str] = Counter()
    for number, item in enumerate(items):
        settings = item if isinstance(item, dict) else {}
        class_name = settings.get("class_path", "").rpartition(".")[2]
        own_name = (settings.get("init_args") or {}).get("name")
        name = ".".join(filter(None, (class_name, own_name))) or str(number)
        copies[name] += 1
        named[name if copies[name] == 1 else f"{name}.{copies[name]}"] = item
    return named
