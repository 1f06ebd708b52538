"""Export of a GGUF file to a folder that transformers loads."""

import json
import shutil
from pathlib import Path

from lightning_modules.export.model import check_replaceable, export_folder
from lightning_modules.export.options import ExportOptions
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.gguf.conversion import model_folder
from lightning_modules.models.loading.identity import model_identity


def export_gguf(file: str, folder: Path, options: ExportOptions) -> Path:
    """Write the model and the tokenizer of a GGUF file to a folder, and return the folder.

    Raises:
        ValueError: If the file or the folder cannot be used, or an option is set.
    """
    if options != ExportOptions():
        raise ValueError(f"'{file}' is a GGUF file, which is exported without options: remove them.")
    check_replaceable(folder)
    converted = model_folder(file)
    facts = {"gguf": Path(file).name, "identity": model_identity(ModelConfig(file))}
    with export_folder(folder, json.dumps(facts)) as building:
        shutil.copytree(converted, building, dirs_exist_ok=True)
    return folder
