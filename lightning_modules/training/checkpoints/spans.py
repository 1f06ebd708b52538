"""Spans of a training between resumes: from which step each config applies, and which settings it changed."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_modules.training.checkpoints.io import describe_checkpoint
from lightning_modules.training.monitoring.identity import flatten_config
from lightning_modules.utilities.bounded_yaml import load_yaml
from lightning_modules.utilities.files import write_atomically

SPANS_FILE = "spans.json"
"""File in the folder of a resumed run with its spans."""

CONFIG_FILE = "config.yaml"

_RESUMED = re.compile(r"config-resumed-at-step-(\d+)(?:-(\d+))?\.yaml")
_PRESENTATION = re.compile(r"ckpt_path|.*\.(dirpath|\w+_dir)|trainer\.(enable_\w+|log_every_n_steps)")
_CLASSES = ("model.optimizer.class_path", "model.lr_scheduler.class_path")
_WITHOUT_EFFECT = {
    "seed_everything": "the random states are those of the checkpoint",
    "model.pretrained_model_name_or_path": "the weights are those of the checkpoint",
    "model.revision": "the weights are those of the checkpoint",
}


class Span(NamedTuple):
    """A part of a training from an optimizer step on, with one config.

    ``config`` is the name of its file, or empty if it is in the folder of an earlier run. ``changed`` has the values
    before and after for each setting that the config changed, by dotted name.
    """

    step: int
    config: str
    changed: dict[str, tuple[Any, Any]]

    def describe(self) -> list[str]:
        """Return a line for each changed setting, with its effect."""
        lines = []
        for name, (before, after) in self.changed.items():
            reason = _WITHOUT_EFFECT.get(name)
            effect = f"it has no effect, because {reason}" if reason else "it takes effect"
            lines.append(f"Resumed at step {self.step}: `{name}` is {after} instead of {before}; {effect}.")
        return lines


def resumed_spans(checkpoint: Path | None, config: str) -> list[Span]:
    """Return the spans of a training with this config (YAML) that resumes from a checkpoint, or starts without one.

    Raises:
        ValueError: If the checkpoint has the state of another optimizer or schedule.
    """
    if checkpoint is None:
        return [Span(0, CONFIG_FILE, {})]
    step = int(describe_checkpoint(checkpoint).step)
    folders = (checkpoint.parent, checkpoint.parent.parent)
    folder = next((path for path in folders if (path / CONFIG_FILE).is_file()), None)
    # Spans that began at this step or later were stopped before they had a checkpoint, or are given up.
    earlier = [span for span in read_spans(folder) if span.step < step] if folder is not None else []
    if folder is None or not earlier or not (folder / earlier[-1].config).is_file():
        return [Span(step, CONFIG_FILE, {})]
    changed = find_changes(load_yaml((folder / earlier[-1].config).read_text()), load_yaml(config))
    for name in _CLASSES:
        if name in changed:
            before, after = changed[name]
            raise ValueError(
                f"`{name.removesuffix('.class_path')}` is {after}, but '{checkpoint}' has the state of {before}:"
                " restore it, or start a new training from the weights (`longce export`)."
            )
    return [*earlier, Span(step, "", changed)]


def read_spans(folder: Path) -> list[Span]:
    """Return the spans of the run in a folder; those of older versions are found by the names of their configs."""
    path = folder / SPANS_FILE
    if not path.is_file():
        return _find_older_spans(folder)
    try:
        return [Span(int(step), str(config), {**changed}) for step, config, changed in json.loads(path.read_bytes())]
    except (ValueError, TypeError) as error:
        raise ValueError(f"'{path}' is damaged ({error}): restore it from a backup, or delete it.") from error


def write_spans(folder: Path, spans: Sequence[Span], config: str) -> None:
    """Write the spans of a resumed run; ``config`` is the name of the last one's config."""
    spans = [*spans[:-1], spans[-1]._replace(config=config)]
    if len(spans) > 1:
        write_atomically(folder / SPANS_FILE, (json.dumps(spans, indent=1) + "\n").encode())


def _find_older_spans(folder: Path) -> list[Span]:
    found = [_RESUMED.fullmatch(path.name) for path in folder.glob("config-resumed-*.yaml")]
    starts = sorted((int(match[1]), int(match[2] or 1), match[0]) for match in found if match is not None)
    spans = [Span(0, CONFIG_FILE, {})]
    for step, _, name in starts:
        spans = [span for span in spans if span.step < step] or spans[:1]
        before, after = (load_yaml((folder / each).read_text()) for each in (spans[-1].config, name))
        spans.append(Span(step, name, find_changes(before, after)))
    return spans


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two configs, with both values, by dotted name.

    A setting that only one of them has is a default of another version of longce, and no change, unless it is a part of
    a setting that the other has as null, or a callback.

    Example:
        >>> find_changes({"model": {"gamma": 5, "lora": None}}, {"model": {"gamma": 3, "lora": {"r": 8}}})
        {'model.gamma': (5, 3), 'model.lora': (None, {'r': 8})}
    """
    old, new = (flatten_config(_mark_null(config)) for config in (before, after))
    changed: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys((*old, *new)):
        first, second = old.get(name), new.get(name)
        if _PRESENTATION.fullmatch(name) or first == second:
            continue
        if name in old and name in new:
            changed[name] = (_unmark(first), _unmark(second))
        elif _NULL in (first, second):
            values = [_look_up(config, name) for config in (before, after)]
            if isinstance(values[0], dict) or isinstance(values[1], dict):
                changed[name] = (values[0], values[1])
        elif re.fullmatch(r"trainer\.callbacks\.[^.]+\.class_path", name):
            changed[name.removesuffix(".class_path")] = (first, second)
    return changed


_NULL = "null"


def _mark_null(value: Any) -> Any:
    """Replace null by a text, which `flatten_config` does not drop."""
    if isinstance(value, dict):
        return {key: _mark_null(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_mark_null(part) for part in value]
    return _NULL if value is None else value


def _unmark(value: Any) -> Any:
    return None if value == _NULL else value


def _look_up(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of a dotted name; the arguments of a model's class have names without ``init_args``."""
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value[part] if part in value else (value.get("init_args") or {}).get(part)
    return value
