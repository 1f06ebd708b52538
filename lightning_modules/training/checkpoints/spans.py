"""Spans of a training between resumes: from which step each config applies, and which settings it changed."""

import hashlib
import json
import logging
import re
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

_PRESENTATION = re.compile(r"ckpt_path|.*\.(dirpath|\w+_dir)|trainer\.(enable_\w+|log_every_n_steps|logger)")
_CLASS_LEVEL = ("", "trainer", "model")
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
            if reason := _WITHOUT_EFFECT.get(name):
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
            "'%s' has no config: what this resume changes is not known, and the optimizer's settings are those of the"
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
    """Return the settings that differ between two configs, with both values, by dotted name.

    An option that only one of them has is a default of another version of longce, and no change. Keys of your own, such
    as those of ``lora`` or of validation sets, and callbacks are changes.

    Example:
        >>> find_changes({"model": {"gamma": 5, "lora": None}}, {"model": {"gamma": 3, "lora": {"r": 8}}})
        {'model.gamma': (5, 3), 'model.lora': (None, {'r': 8})}
    """
    changed: dict[str, tuple[Any, Any]] = {}
    _compare(_merge_model(before), _merge_model(after), "", changed)
    return changed


def _compare(before: Any, after: Any, name: str, changed: dict[str, tuple[Any, Any]]) -> None:
    """Add what differs in a part of two configs."""
    if before == after or _PRESENTATION.fullmatch(name):
        return
    if _has_objects(before) or _has_objects(after):  # such as callbacks, and none of them
        before, after = (_name_objects(value) for value in (before, after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        changed[name] = (before, after)
        return
    for key in dict.fromkeys((*before, *after)):
        inner = f"{name}.{key}".lstrip(".")
        if key in before and key in after:
            _compare(before[key], after[key], inner, changed)
        elif not (name in _CLASS_LEVEL or name.endswith("init_args")):  # there, it is an option of another version
            value = [part.get(key) for part in (before, after)]
            known = [each.get("class_path", each) if isinstance(each, dict) else each for each in value]
            _compare(known[0], known[1], inner, changed)


def _merge_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Give the model's settings the same names whether or not the config names its class."""
    model = config.get("model")
    if not isinstance(model, dict):
        return dict(config)
    return {**config, "model": {**model, **(model.get("init_args") or {}), "init_args": None}}


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) and "class_path" in item for item in value)


def name_object(item: Any) -> str:
    """Return the class of an object in a config, with its name if it has one: numbers in lists differ between runs."""
    settings = item if isinstance(item, dict) else {}
    parts = settings.get("class_path", "").rpartition(".")[2], (settings.get("init_args") or {}).get("name")
    return ".".join(filter(None, parts))


def _name_objects(value: Any) -> dict[str, Any]:
    """Return objects by their classes and names, numbered where several are equal."""
    named: dict[str, Any] = {}
    for number, item in enumerate(value if isinstance(value, list) else [] if value is None else [value]):
        name = name_object(item) or str(number)
        copies = sum(each == name or each.startswith(f"{name}.copy") for each in named)
        named[f"{name}.copy{copies + 1}" if copies else name] = item
    return named
