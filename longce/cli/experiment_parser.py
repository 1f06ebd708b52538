"""Parser of the configs and options of an experiment, and its help."""

import pydoc
import textwrap
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from longce.cli.errors import ConciseParser, import_choices, list_classes

_MOST_USED = """\
most used:
  -c CONFIG                                 YAML file; a later one overrides an earlier one, an option overrides both
  --model.pretrained_model_name_or_path ID  hub id or local folder
  --model.objective NAME                    loss, listed below
  --model.context_length K --model.stride D short context, in tokens
  --data NAME --data.sequence_length N      corpus, listed below
  --trainer.max_steps N --trainer.devices N
  --ckpt_path RUN                           resume
  --print_config                            show all settings and exit"""


class ExperimentParser(ConciseParser, LightningArgumentParser):
    """Parser of the configs and options of an experiment."""

    @override
    def format_help(self, *arguments: Any) -> str:
        """List what most users need, and the classes to choose from, before all options."""
        if self.usage is None:  # the help of a class
            return super().format_help(*arguments)
        usage, description, options = super().format_help(*arguments).split("\n\n", 2)
        sections = [usage, description, _MOST_USED]
        for heading, module in import_choices().items():
            lines = [heading]
            for name in list_classes(module):
                kind = getattr(module, name)
                if isinstance(kind, type):  # and not a function
                    lines.append(f"  {name:<25}{_shorten(kind.__doc__)}")
            sections.append("\n".join(lines))
        more = "`--data.help datamodules.NAME` and `--model.objective.help NAME` list the settings of a class."
        return "\n\n".join([*sections, more, options])


def _shorten(docstring: str | None) -> str:
    """Return the start of a docstring's first line."""
    line = pydoc.splitdoc(docstring or "")[0].partition(" (")[0].rstrip(".")
    return textwrap.shorten(line, 93, placeholder=" ..")
