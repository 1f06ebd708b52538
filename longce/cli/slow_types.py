"""On a CPU that is slow in 16-bit types, what only the configs of the package ask for becomes float32.

Settings of the user are kept, with a warning before anything is loaded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.utilities import rank_zero_info

from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.config import is_served
from lightning_modules.models.loading.dtypes import (
    SLOW_WEIGHTS_REMEDY,
    is_slow_on_cpu,
    report_dtype,
    scoring_config,
    stored_dtype,
    warn_of_slow_dtype,
)
from lightning_modules.models.loading.load import load_config
from longce.cli.config_files import CONFIGS, list_options, read_config

_TYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "16": torch.float16, "float16": torch.float16}


def avoid_slow_settings(config: Any, words: Sequence[str]) -> None:
    """Replace 16-bit precision and weights by float32 if a packaged config set them, in the config of a command.

    ``words`` are the arguments of the command line, which tell where a setting comes from.
    """
    if not _runs_on_cpu(config.trainer.get("accelerator")):
        return
    remedies = {"trainer.precision": ("32-true", "`trainer.precision: 32-true`")}
    for name in ("model.dtype", "model.init_args.dtype"):
        remedies[name] = ("float32", SLOW_WEIGHTS_REMEDY)
    for name, (fast, remedy) in remedies.items():
        value = str(config.get(name))
        dtype = _TYPES.get(value.partition("-")[0])
        if dtype is None or not is_slow_on_cpu(dtype):
            continue
        file = _find_packaged_source(name, words)
        if file is not None:
            config[name] = fast
            rank_zero_info(
                f"This CPU is slow in {str(dtype).removeprefix('torch.')}: `{name}` is {fast} instead of the {value} of"
                f" {file}; `--{name} {value}` keeps it."
            )
        else:
            warn_of_slow_dtype("cpu", dtype, remedy)


def _find_packaged_source(name: str, words: Sequence[str]) -> str | None:
    """Return the name of the packaged config that sets an option, or None if the user sets it or it is not set."""
    found = None
    folder = CONFIGS.resolve()
    for option, value in list_options(words):
        if option in (f"--{name}", f"--{name.partition('.')[0]}"):
            found = None
        elif option in ("-c", "--config") and Path(value).is_file() and _sets(read_config(value), name):
            file = Path(value).resolve()
            found = None
            if file.is_relative_to(folder):
                found = str(file.relative_to(folder.parent))
    return found


def _sets(config: dict[str, Any], name: str) -> bool:
    """Return whether a config sets an option, as a nested or as a dotted key."""
    group, _, key = name.partition(".")
    section = config.get(group)
    return name in config or (isinstance(section, dict) and _sets(section, key))


def _runs_on_cpu(accelerator: Any) -> bool:
    if accelerator in (None, "auto"):
        return not (CUDAAccelerator.is_available() or MPSAccelerator.is_available())
    return accelerator == "cpu" or isinstance(accelerator, CPUAccelerator)


def avoid_slow_weights(model: LongContextLM, trainer: Trainer) -> None:
    """Let ``dtype: auto`` mean float32 on a CPU that is slow in the stored type, as in ``longce score``."""
    loading = model.loading
    if loading.dtype != "auto" or trainer.strategy.root_device.type != "cpu":
        return
    if not is_served(loading.pretrained_model_name_or_path):
        stored = load_config(loading)
        model.loading = scoring_config(loading, stored, "cpu")
        if trainer.is_global_zero:
            report_dtype(stored_dtype(stored), stored_dtype(stored, model.loading.dtype))
