"""Identity of a stored model by all that decides its output: weights, config, tokenizer, chat templates and code."""

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode, resolve_revision, snapshot_download
from huggingface_hub.errors import RevisionResolutionError

from lightning_modules.models.config import ModelConfig
from lightning_modules.models.tokenization.tokenizer import local_or_hub
from lightning_modules.utilities.identity import content_hash

_LOADED = {".safetensors", ".bin", ".json", ".jinja", ".model", ".tiktoken", ".txt", ".vocab"}
_NOT_LOADED = {
    *("optimizer.bin", "scheduler.bin", "training_args.bin", "trainer_state.json", "log.txt", "requirements.txt"),
    *("all_results.json", "eval_results.json", "test_results.json", "train_results.json"),
}
"""Files that training leaves beside a model. A file that is missing here costs a cached result, not a wrong one."""

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")


def model_identity(config: ModelConfig) -> str:
    """Compute a text that is equal for equal weights, config, tokenizer and code, without loading them.

    All bytes are hashed, once for each file (`lightning_modules.utilities.identity`). A model on the hub is fetched
    first, and is the same as a local copy of it. Its own code is part of the identity if it runs; code that a config
    fetches from the repository of another model is not covered.

    Raises:
        ValueError: If the model cannot be found, or a file cannot be read.
    """
    name, with_code = str(config.pretrained_model_name_or_path), config.trust_remote_code
    folder = Path(local_or_hub(name, "model"))
    if not folder.is_dir():
        folder = _fetched_snapshot(name, config.revision, with_code)
    return f"sha256:{content_hash(folder, _loaded_files(folder, with_code))}"


def check_same_model(identity: str, config: ModelConfig) -> None:
    """Raise a ``ValueError`` for a model whose identity has changed since; call it after loading."""
    if model_identity(config) != identity:
        raise ValueError(
            f"The model '{config.pretrained_model_name_or_path}' changed after this run had begun, and results would be"
            " stored as those of the earlier version. Start again when nothing writes to it."
        )


def hub_commit(name: str, revision: str | None = None, *, fetched: bool = False) -> str:
    """Look up the commit of a model on the hub; where it cannot be reached, or ``fetched``, the one fetched last.

    Raises:
        ValueError: If the model or revision does not exist, or the hub cannot be reached and it was never fetched.
    """
    try:
        local = fetched or is_offline_mode()
        return resolve_revision(name, revision=revision, local_files_only=local).resolved
    except (OSError, ValueError, RevisionResolutionError) as error:
        raise ValueError(_unidentified(name, revision, error)) from error


def _unidentified(name: str, revision: str | None, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    return (
        f"The model '{name}' (revision {revision or 'main'}) cannot be identified: {reason.rstrip('.')}. Give a"
        " local folder with weights, or a hub id that exists and that this machine can reach or has in its cache."
    )


def _fetched_snapshot(name: str, revision: str | None, with_code: bool) -> Path:
    """Fetch all files that may be loaded. Those that were fetched later would make it another model."""
    fetch = partial(snapshot_download, name, revision=hub_commit(name, revision))
    others = ["*/*", "pytorch_model*", "consolidated*", *_NOT_LOADED]  # in folders, or in other formats
    try:
        if is_offline_mode():
            return Path(fetch(allow_patterns=[], local_files_only=True))  # as it is, complete or not
        folder = Path(fetch(allow_patterns=[f"*{ending}" for ending in _LOADED], ignore_patterns=others))
        named = [file.relative_to(folder).as_posix() for file in _named_weights(folder)]
        pickles = [] if any((folder / weights).exists() for weights in _SAFETENSORS) else ["pytorch_model*"]
        code = ["*.py"] if with_code else []
        return Path(fetch(allow_patterns=["additional_chat_templates/*", *named, *pickles, *code]))
    except (OSError, ValueError) as error:
        raise ValueError(_unidentified(name, revision, error)) from error


def _loaded_files(folder: Path, with_code: bool) -> list[Path]:
    """The files of a model's folder that may decide what the model computes."""
    found = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    files = {file for file in found if file.suffix in _LOADED and file.name not in _NOT_LOADED}
    if any((folder / name).exists() for name in _SAFETENSORS):  # transformers then ignores these
        files -= set(folder.glob("pytorch_model*"))
    files |= {file for file in _named_weights(folder) if file.is_file()}
    return sorted(files.union(folder.rglob("*.py") if with_code else ()))


def _named_weights(folder: Path) -> set[Path]:
    """The weight files that the config or an index names; they may be in folders below."""
    named = _json_object(folder / "config.json").get("transformers_weights")
    index = named if isinstance(named, str) and named.endswith(".index.json") else _SAFETENSORS[1]
    shards = _json_object(folder / index).get("weight_map")
    names = [named, *(shards.values() if isinstance(shards, dict) else ())]
    return {folder / name for name in names if isinstance(name, str)}


def _json_object(file: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if it cannot be read, which loading the model reports."""
    with suppress(OSError, ValueError):
        content = json.loads(file.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}
