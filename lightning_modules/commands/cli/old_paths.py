"""Names from before modules and configs moved: they keep working, with a warning that gives the new one."""

import re
import warnings
from pathlib import Path

_MODULES = {
    "lightning_modules.context_extension": "lightning_modules.models.context_extension.methods",
    "lightning_modules.context_ladder": "lightning_modules.scoring.context_lengths",
    "lightning_modules.sequence_parallelism": "lightning_modules.training.sequence_parallel",
    "lightning_modules.sharding": "lightning_modules.training.fsdp",
}
_OLD = re.compile(rf"\b(?<!\.)({'|'.join(map(re.escape, _MODULES))})(?=\.\w)")
_CONFIGS = {
    "quickstart.yaml": "quickstart/longce.yaml",
    "quickstart_base.yaml": "quickstart/base.yaml",
    "quickstart_evaluator.yaml": "quickstart/evaluator.yaml",
}


def rename_old_paths(text: str) -> str:
    """Replace class paths of modules that have moved, in a config or a word of the command line."""
    for old in sorted(set(_OLD.findall(text))):
        warnings.warn(
            f"The module `{old}` is now `{_MODULES[old]}`: change the class path.", FutureWarning, stacklevel=2
        )
    return _OLD.sub(lambda match: _MODULES[match[1]], text)


def find_moved_config(path: Path) -> Path | None:
    """Return where a config of this repository is now, if it has moved to a folder of ``configs``."""
    if path.parent.name != "configs":
        return None
    moved = path.parent / _CONFIGS.get(path.name, "")
    return moved if moved.is_file() else next(path.parent.glob(f"*/{path.name}"), None)
