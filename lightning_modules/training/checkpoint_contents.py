"""Contents that a checkpoint has beside Lightning's own, and what must agree when it is loaded."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from transformers import PreTrainedModel

from lightning_modules.models.adapters import same_frozen, trained_state
from lightning_modules.training.checkpoints.io import RUN_ID
from lightning_modules.training.export import TrainingFacts
from lightning_modules.training.export.checkpoint import (
    FINGERPRINT,
    KEY,
    check_resumable,
    check_same_model,
    check_same_weights,
    stored,
)
from lightning_modules.training.export.facts import made_tokenizer
from lightning_modules.training.fsdp import saves_parts

TRAINED = "trained_weights"
"""Key of the names of the weights in a checkpoint that leaves out frozen weights under adapters."""


def add_contents(
    checkpoint: dict[str, Any],
    module: LightningModule,
    model: PreTrainedModel,
    facts: TrainingFacts,
    *,
    run_id: str | None,
    fingerprint: str | None,
) -> None:
    """Add what resuming and exporting need, and leave out frozen weights under adapters: for a 7B model 27 GB.

    Args:
        checkpoint: As Lightning is about to write it.
        module: The module that is trained.
        model: Its Hugging Face model, without the wrapper of peft.
        facts: Of the training.
        run_id: Of the run.
        fingerprint: Hash of the frozen weights, if they are left out.
    """
    if run_id is not None:
        checkpoint[RUN_ID] = run_id
    # For `longce export`.
    checkpoint[KEY] = stored(model, facts, made_tokenizer(getattr(module.trainer, "datamodule", None)))
    if fingerprint is not None:
        checkpoint[TRAINED] = [name for name, part in module.named_parameters() if part.requires_grad]
        checkpoint[FINGERPRINT] = fingerprint
        if not saves_parts(module.trainer.strategy):
            checkpoint["state_dict"] = trained_state(module, checkpoint["state_dict"])


def check_contents(
    checkpoint: Mapping[str, Any],
    module: LightningModule,
    model: PreTrainedModel,
    loading: Mapping[str, Any],
    *,
    resumes: bool,
    fingerprint: str | None,
) -> None:
    """Check that a checkpoint's weights are those of this model, before they are loaded.

    Args:
        checkpoint: As Lightning has read it.
        module: The module that they are loaded into.
        model: Its Hugging Face model, without the wrapper of peft.
        loading: How that was loaded.
        resumes: Whether training resumes from it.
        fingerprint: Hash of the frozen weights, if checkpoints leave them out.

    Raises:
        ValueError: If weights are missing or of another shape, or frozen weights are others.
    """
    if KEY in checkpoint:
        check_same_model(checkpoint[KEY], model, loading)
    if resumes:
        check_resumable(checkpoint)
    if fingerprint is None:
        check_same_weights(checkpoint.get("state_dict"), module.state_dict())
        return
    # Strategies that shard the model have taken the weights out already.
    found = checkpoint.get("state_dict", checkpoint.get(TRAINED, ()))
    trained = {name: part for name, part in module.named_parameters() if part.requires_grad}
    if missing := trained.keys() - set(found):
        raise ValueError(
            f"The checkpoint lacks {len(missing)} of the weights that `model.lora` trains ({min(missing)}, ..):"
            " give the `lora` of the run that wrote it."
        )
    if "state_dict" in checkpoint:
        check_same_weights({name: found[name] for name in trained}, trained)
    if not same_frozen(checkpoint.get(FINGERPRINT), fingerprint):
        raise ValueError(
            "The checkpoint's adapters were trained on other weights than those of"
            f" '{loading['pretrained_model_name_or_path']}' (or on the same in another `dtype`): give the"
            " model, revision and dtype of that run."
        )
