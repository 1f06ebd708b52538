"""What DeepSpeed writes as a checkpoint, and unpickles with all that the pickle asks for."""

import pickle
from pathlib import Path
from typing import Any

import torch

from lightning_modules.checkpoint_io import damage
from lightning_modules.checkpoint_pickles import refused_pickle


def is_zero_checkpoint(folder: Path) -> bool:
    """Whether DeepSpeed wrote a folder to its end: the file that names its newest subfolder comes last."""
    return (folder / "latest").is_file()


def check_zero_checkpoint(path: str | Path) -> None:
    """Read the checkpoint as DeepSpeed will, but without running any code that it may hold.

    DeepSpeed loads with ``weights_only=False``, which the loss scaler in its files needs. Here nothing is allowed but
    weights and that, so that a checkpoint that passes holds no other code. Tensors stay on disk.

    Args:
        path: A folder.

    Raises:
        ValueError: If it is no checkpoint of DeepSpeed, a file in it is torn or damaged, or would run code.
    """
    folder = Path(path)
    if not is_zero_checkpoint(folder):
        raise ValueError(
            f"`ckpt_path` '{path}' is no checkpoint of DeepSpeed: go on with the strategy that wrote it, or name"
            " another."
        )
    files = sorted((folder / (folder / "latest").read_text().strip()).glob("*.pt"))
    if not files:
        raise ValueError(
            f"`ckpt_path` '{path}' is incomplete: its folder of weights is empty or gone. Name another one."
        )
    for file in files:
        if (problem := damage(file)) is not None:
            raise ValueError(f"`ckpt_path` '{path}': {file.name} {problem}. Name another one.")
        try:
            with torch.serialization.safe_globals(_harmless()):
                torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ValueError(
                f"`ckpt_path` '{path}': {file.name} {refused_pickle(error)}. DeepSpeed would run what is in it."
                " Name a checkpoint that `longce fit` wrote."
            ) from error


def _harmless() -> list[Any]:
    """What DeepSpeed puts into its files, none of which does anything but hold numbers."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]
