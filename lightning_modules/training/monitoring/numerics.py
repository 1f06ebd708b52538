"""Number formats and attention of a run's evaluations, stored next to them."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.provenance import Numerics
from lightning_modules.training.checkpoints.resume import is_remote, run_folder
from lightning_modules.utilities.files import undamaged, write_atomically

NUMERICS_FILE = "numerics.json"
"""File in the folder of a run, or of its evaluation, with the numerics of each evaluation by optimizer step."""


def find_numerics(trainer: Trainer, module: LightningModule) -> Numerics:
    """Return the numerics of a module's log-likelihoods, from its loaded weights."""
    model: Any = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    weights = (model or module).parameters()
    dtype = ", ".join(sorted({str(weight.dtype).removeprefix("torch.") for weight in weights}))
    precision = str(trainer.precision)
    loading = vars(module).get("loading")
    if precision == "bf16-mixed" and isinstance(loading, ModelConfig) and loading.residual_dtype != "bfloat16":
        precision += f", {loading.residual_dtype} residual stream"
    attention = "" if model is None else str(model.config._attn_implementation)
    return Numerics(dtype, precision, attention.removeprefix("document_") or "unknown attention")


def read_numerics(folder: Path) -> dict[int, Numerics]:
    """Return the numerics of the evaluations in a folder, by optimizer step."""
    path = folder / NUMERICS_FILE
    if not path.is_file():
        return {}
    with undamaged(path):
        return {int(step): Numerics.read(values) for step, values in json.loads(path.read_bytes()).items()}


class NumericsRecord(Callback):
    """Stores the numerics of each evaluation in the folder of its logs."""

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = run_folder(trainer)
        named = bool(trainer.loggers) and None not in (trainer.loggers[0].name, trainer.loggers[0].version)
        dry_run = trainer.sanity_checking or getattr(trainer, "fast_dev_run", False)
        if not trainer.is_global_zero or dry_run or not named or is_remote(folder):
            return
        numerics = read_numerics(folder) | {trainer.global_step: find_numerics(trainer, pl_module)}
        content = {step: each._asdict() for step, each in sorted(numerics.items())}
        write_atomically(folder / NUMERICS_FILE, (json.dumps(content, indent=1) + "\n").encode())

    on_test_end = on_validation_end
