"""Upload of an export to the Hugging Face hub."""

import logging
from pathlib import Path

from huggingface_hub import HfApi, get_token, is_offline_mode

from lightning_modules.export.options import ExportOptions

log = logging.getLogger(__name__)


def check_upload(options: ExportOptions) -> None:
    """Raise a ``ValueError`` if an upload is requested, but the hub or a token is not available."""
    if options.push_to_hub is None:
        return
    if is_offline_mode() or get_token() is None:
        raise ValueError(
            "`push_to_hub` needs the hub and a token with write access: unset HF_HUB_OFFLINE, and run `hf auth login`"
            " or set HF_TOKEN; or upload later."
        )


def upload_export(folder: Path, options: ExportOptions) -> None:
    """Upload the files of an export to `ExportOptions.push_to_hub`, if set; create the repository if it is missing.

    Raises:
        ValueError: If the upload fails; the folder is unchanged, and the message has the command to repeat it.
    """
    repository = options.push_to_hub
    if repository is None:
        return
    api, message = HfApi(), "Upload an export of longce"
    replaced = ["model*.safetensors*", "adapter_*"]  # transformers would load those of an earlier export
    try:
        url = api.create_repo(repository, private=options.private, exist_ok=True)
        exposed = options.private and not api.model_info(repository).private
        if not exposed:
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message, delete_patterns=replaced)
    except Exception as error:  # of the network, the hub, or its client
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"The export in '{folder}' is complete, but was not uploaded to '{repository}': {reason}. To repeat it:"
            f" hf upload {repository} {folder}{' --private' if options.private else ''}"
            f" --delete '{replaced[0]}' --delete '{replaced[1]}'"
        ) from error
    if exposed:
        raise ValueError(
            f"The export in '{folder}' is complete, but was not uploaded, because '{repository}' is public: use another"
            " repository, or set `private: false`."
        )
    log.info("Uploaded to %s.", url)
