"""Tasks whose wordings and numbers are in `tasks.yaml`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from lightning_modules.tasks.questions.haystacks import Essays
from lightning_modules.tasks.questions.task import Draft, FittedTask, Request

_FILE = Path(__file__).with_name("tasks.yaml")

SETTINGS: dict[str, dict[str, Any]] = {
    name: setting
    for name, setting in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
    if not name.startswith(".")
}
"""Settings of each task; names that begin with a period are shared settings."""


class WordedTask(FittedTask):
    """A task of `tasks.yaml`, whose comments say where it comes from and how it differs from the original.

    ``kinds`` has the function that draws a question, for each ``kind`` of task. The order of its random draws decides
    what a question is, so a change of it changes all results.
    """

    def __init__(self, name: str, essays: Essays, kinds: Mapping[str, "Kind"]) -> None:
        self.name = name
        self.setting = SETTINGS[name]
        self.essays = essays
        self.max_new_tokens = self.setting["max_new_tokens"]
        self.varies_depth = self.setting["varies_depth"]
        self._draw = kinds[self.setting["kind"]]

    @override
    def draft(self, asked: Request) -> Draft:
        return self._draw(self, asked, self.setting)


Kind = Callable[[WordedTask, Request, Mapping[str, Any]], Draft]
"""Draws a question, given its task and settings."""
