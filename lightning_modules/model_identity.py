"""Identity of a stored model by all that decides its output: weights, config, tokenizer, chat templates and code."""

import hashlib
import logging
import os
from pathlib import Path

from huggingface_hub import is_offline_mode, resolve_revision, try_to_load_from_cache
from huggingface_hub.errors import RevisionResolutionError

from lightning_modules.tokenization import local_or_hub
from lightning_modules.utilities.identity import combined_hash, content_hash, file_hashes

_LOADED = {".safetensors", ".bin", ".json", ".jinja", ".model", ".tiktoken", ".txt", ".vocab"}
_NOT_LOADED = {
    *("optimizer.bin", "scheduler.bin", "training_args.bin", "trainer_state.json", "log.txt", "requirements.txt"),
    *("all_results.json", "eval_results.json", "test_results.json", "train_results.json"),
}
"""Files that training leaves beside a model. A file that is missing here costs a cached result, not a wrong one."""

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")

_log = logging.getLogger(__name__)


def model_identity(
    pretrained_model_name_or_path: str, revision: str | None = None, *, trust_remote_code: bool = False
) -> str:
    """Compute a text that is equal for equal weights, config, tokenizer and code, without loading them.

    All bytes are hashed, once for each file (`lightning_modules.utilities.identity`). Code that a config fetches from
    the repository of another model is not covered.

    Args:
        pretrained_model_name_or_path: Hub id or local folder.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Whether the model's own code runs; only then it is part of the identity.

    Returns:
        For a folder ``sha256:`` and a hash of the files that are loaded, wherever they are. For a hub id
        ``id@commit``; files that were changed in the hub's cache on this machine add their hash.

    Raises:
        ValueError: If the model cannot be found, has no stored weights, or a file cannot be read.
    """
    folder = Path(local_or_hub(pretrained_model_name_or_path, "model"))
    if folder.is_dir():
        return f"sha256:{content_hash(folder, _loaded_files(folder, trust_remote_code))}"
    commit = hub_commit(pretrained_model_name_or_path, revision)
    code = " with its code" if trust_remote_code else ""
    edits = _edits(pretrained_model_name_or_path, commit, trust_remote_code)
    return f"{pretrained_model_name_or_path}@{commit}{code}{edits}"


def check_same_model(
    identity: str, pretrained_model_name_or_path: str, revision: str | None = None, *, trust_remote_code: bool = False
) -> None:
    """Refuse a model that is no longer the one of `identity`; call it after loading, other arguments as there.

    Raises:
        ValueError: If it changed in between: results would be stored as those of the earlier version.
    """
    if model_identity(pretrained_model_name_or_path, revision, trust_remote_code=trust_remote_code) != identity:
        raise ValueError(
            f"The model '{pretrained_model_name_or_path}' changed after this run had begun, and results would be stored"
            " as those of the earlier version. Start again when nothing writes to it."
        )


def hub_commit(name: str, revision: str | None = None, *, fetched: bool = False) -> str:
    """Look up the commit of a model on the hub; where the hub cannot be reached, the one that was fetched last.

    Args:
        name: Hub id.
        revision: Branch, tag or commit.
        fetched: Do not ask the hub.

    Raises:
        ValueError: If there is no such model or revision, or the hub cannot be reached and it was never fetched.
    """
    try:
        local = fetched or is_offline_mode()
        return resolve_revision(name, revision=revision, local_files_only=local).resolved
    except (OSError, ValueError, RevisionResolutionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"The model '{name}' (revision {revision or 'main'}) cannot be identified: {reason.rstrip('.')}. Give a"
            " local folder with weights, or a hub id that exists and that this machine can reach or has in its cache."
        ) from error


def _loaded_files(folder: Path, with_code: bool) -> list[Path]:
    """The files of a model's folder that may decide what the model computes."""
    found = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    files = {file for file in found if file.suffix in _LOADED and file.name not in _NOT_LOADED}
    if any((folder / name).exists() for name in _SAFETENSORS):  # transformers then ignores these
        files -= set(folder.glob("pytorch_model*"))
    return sorted(files.union(folder.rglob("*.py") if with_code else ()))


def _edits(name: str, commit: str, with_code: bool) -> str:
    """A hash of the files in the hub's cache that are not those of the commit; an empty text if there are none.

    The cache names each file by its content, so that a changed or damaged one shows.
    """
    config = try_to_load_from_cache(name, "config.json", revision=commit)
    if not isinstance(config, str):
        return ""
    snapshot = Path(config).parent
    files = _loaded_files(snapshot, with_code)
    hashes = dict(zip(files, file_hashes(files), strict=True))
    edited = {
        file.relative_to(snapshot).as_posix(): content
        for file, content in hashes.items()
        if not file.is_symlink() or Path(os.readlink(file)).name not in (content, _git_hash(file))
    }
    if not edited:
        return ""
    _log.warning(
        "%s of '%s' in %s are not those of commit %s: they were changed or damaged on this machine. Results are"
        " identified by what is there. Delete the folder to fetch the files again.",
        *(", ".join(edited), name, snapshot, commit),
    )
    return f" with files {combined_hash(edited)}"


def _git_hash(file: Path) -> str:
    """The name that git gives a file's content; files of more than 10 MB are named by SHA-256 on the hub."""
    size = file.stat().st_size
    content = file.read_bytes() if size <= 10 << 20 else b""
    return hashlib.sha1(b"blob %d\0" % size + content, usedforsecurity=False).hexdigest()
