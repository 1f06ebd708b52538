"""Identity of a stored model: a hash of weights, config, tokenizer, chat templates and code."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode, snapshot_download
from transformers import PreTrainedTokenizerFast

from lightning_modules.models.loading.adapters import find_adapters
from lightning_modules.models.loading.config import ModelConfig, is_gguf, is_served, local_or_hub
from lightning_modules.models.loading.dtypes import scoring_config, stored_dtype
from lightning_modules.models.loading.file_checks import check_index
from lightning_modules.models.loading.load import choose_attention, load_config
from lightning_modules.models.loading.provenance import SERVED, Provenance
from lightning_modules.models.served.scorer import connect
from lightning_modules.models.tokenization.tokenizer import tokenizer_hash
from lightning_modules.utilities.identity import combined_hash, content_hash

_LOADED_SUFFIXES = {".safetensors", ".bin", ".json", ".jinja", ".model", ".tiktoken", ".txt", ".vocab"}
_UNUSED_FILES = {
    *("optimizer.bin", "scheduler.bin", "training_args.bin", "trainer_state.json", "log.txt", "requirements.txt"),
    *("all_results.json", "eval_results.json", "test_results.json", "train_results.json"),
}
"""Files that training leaves in a model's folder. One that is missing here invalidates caches, but never more."""

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")


def describe_model(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    device: torch.device | str = "cpu",
    identity: str | None = None,
) -> Provenance:
    """Return the provenance of a model on a device, without loading its weights; ``identity`` is used if it is known.

    Settings that change log-likelihoods but not the files are added to the identity: a changed config, quantization,
    and a context extension.
    """
    # The tokenizer may differ from the model's own, so it is identified separately.
    identity = identity or model_identity(config)
    tokens = tokenizer_hash(tokenizer)
    for name in ("model_config", "quantization"):
        settings = getattr(config, name)
        if settings:
            identity += f" with {name} {json.dumps(settings, sort_keys=True, default=str)}"
    if config.context_extension is not None:
        identity += f" with {describe_extension(config.context_extension)}"
    if is_served(config.pretrained_model_name_or_path):
        return Provenance(identity, tokens, SERVED, SERVED, SERVED)
    stored = load_config(config)
    config = scoring_config(config, stored, device)
    dtype = str(stored_dtype(stored, config.dtype)).removeprefix("torch.")
    attention = choose_attention(config, stored, device=device)
    if config.compile:
        attention += ", compiled layers"  # which round less often, in half precision visibly
    return Provenance(identity, tokens, dtype, attention)


def describe_extension(settings: Mapping[str, Any]) -> str:
    """Return a context extension in one line, such as ``yarn(original_length=8192, target_length=16384)``."""
    options = ", ".join(f"{name}={value}" for name, value in sorted(settings.items()) if name != "method")
    return f"{settings.get('method')}({options})"


def model_identity(config: ModelConfig) -> str:
    """Compute a text that identifies weights, config, tokenizer and code, without loading them.

    All bytes are hashed, once for each file (`lightning_modules.utilities.identity`). A model on the hub is downloaded
    first, and has the same identity as a local copy. The repository's code is included if it runs, but not code that a
    config loads from another repository. The identity of a served model comes from its server, which is also probed.
    """
    if is_served(config.pretrained_model_name_or_path):
        scorer = connect(config)
        scorer.verify()
        return scorer.identity
    name = str(config.pretrained_model_name_or_path)
    with_code = config.trust_remote_code
    if is_gguf(name):
        # Hash the file itself, because a later version of the conversion may write different files.
        return f"sha256:{content_hash(Path(local_or_hub(name, 'model')))}"
    folder = Path(local_or_hub(name, "model"))
    if not folder.is_dir():
        folder = _download_snapshot(name, config.revision, with_code)
    own = content_hash(folder, _find_loaded_files(folder, with_code))
    adapters = find_adapters(name)
    if adapters is None:
        return f"sha256:{own}"
    # Adapters depend on the whole folder of their base, and do not change it.
    base = replace(config, pretrained_model_name_or_path=adapters.base, revision=adapters.revision)
    return f"sha256:{combined_hash([own, model_identity(base)])}"


def check_same_model(identity: str, config: ModelConfig) -> None:
    """Raise a ``ValueError`` if a model has changed since its identity was computed; call it after loading."""
    if model_identity(config) != identity:
        raise ValueError(
            f"The model '{config.pretrained_model_name_or_path}' changed after the start of this run, so results would"
            " be stored for the wrong version. Start again when no other process writes to it."
        )


def hub_commit(name: str, revision: str | None = None, *, fetched: bool = False) -> str:
    """Return the commit of a model on the hub, or of the cached version if offline or ``fetched``."""
    with _model_named(name, revision):
        if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
            return revision
        local = fetched or is_offline_mode()
        # The folder of a snapshot has the name of its commit. Without a network, it is the one in the cache.
        folder = snapshot_download(name, revision=revision, allow_patterns=["config.json"], local_files_only=local)
        return Path(folder).name


@contextmanager
def _model_named(name: str, revision: str | None) -> Iterator[None]:
    """Name the model in errors of the hub."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"The model '{name}' (revision {revision or 'main'}) cannot be identified: {reason.rstrip('.')}."
            f" Download it where there is a network (`hf download {name}`), or give a local folder or another hub id."
        ) from error


def _download_snapshot(name: str, revision: str | None, with_code: bool) -> Path:
    """Download all files that may be loaded; files downloaded later would change the identity."""
    fetch = partial(snapshot_download, name, revision=hub_commit(name, revision))
    others = ["*/*", "pytorch_model*", "consolidated*", *_UNUSED_FILES]  # in folders, or in other formats
    with _model_named(name, revision):
        if is_offline_mode():
            return Path(fetch(allow_patterns=[], local_files_only=True))  # whatever is in the cache
        # Two steps, because many repositories have the same weights as pickles, which transformers reads only without
        # safetensors.
        folder = Path(fetch(allow_patterns=[f"*{ending}" for ending in _LOADED_SUFFIXES], ignore_patterns=others))
        patterns = ["additional_chat_templates/*"]
        if not any((folder / weights).exists() for weights in _SAFETENSORS):
            patterns.append("pytorch_model*")
        if with_code:
            patterns.append("*.py")
        return Path(fetch(allow_patterns=patterns))


def _find_loaded_files(folder: Path, with_code: bool) -> list[Path]:
    """Return the files in a model's folder that can affect its results."""
    check_index(folder)
    candidates = [*folder.iterdir(), *folder.glob("additional_chat_templates/*"), *folder.glob("base/config.json")]
    files = {file for file in candidates if file.suffix in _LOADED_SUFFIXES and file.name not in _UNUSED_FILES}
    if any((folder / name).exists() for name in _SAFETENSORS):  # transformers then ignores these
        files -= set(folder.glob("pytorch_model*.bin*"))
    if with_code:
        files.update(folder.rglob("*.py"))
    return sorted(files)
