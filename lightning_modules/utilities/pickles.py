"""Look into the pickles of a sharded checkpoint before torch loads them, and explain what torch refused to load."""

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from typing_extensions import override

_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath"},
}
"""Classes in an index, by module."""


def fault(folder: Path) -> str | None:
    """Return why a folder of torch's sharded strategies must not be loaded, as the end of a sentence, or None.

    Three parts of it are pickled: the index, which `torch.distributed.checkpoint` unpickles without restrictions;
    values that are not tensors, which it loads without ``weights_only``; and Lightning's state of the run. Here the
    index may name the classes of an index only, and the others are read with ``weights_only``: nothing else is run.
    """
    try:
        with (folder / ".metadata").open("rb") as stream:
            index = _IndexUnpickler(stream).load()
        for entry, place in (index.storage_data or {}).items():
            if isinstance(index.state_dict_metadata[entry.fqn], BytesStorageMetadata):
                torch.load(io.BytesIO(_stored(folder, place)), map_location="cpu", weights_only=True)
        if (folder / "meta.pt").is_file():
            torch.load(folder / "meta.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged pickle anything
        return f"is damaged, or holds more than weights ({_reason(error)})"
    return None


def refused_pickle(error: BaseException) -> str:
    """Return why torch did not load a file with ``weights_only``, as the end of a sentence.

    Torch's own message advises to load the file without, which runs what is in it.
    """
    reason = _reason(error)
    if named := re.search(r"GLOBAL (\S+)", reason):
        return f"holds code and must not be loaded: it would run `{named[1]}`"
    if isinstance(error, pickle.UnpicklingError):
        return f"is torn, or holds more than weights and must not be loaded ({reason})"
    return f"cannot be loaded ({reason})"


def _reason(error: BaseException) -> str:
    """Return the first line of what an error began with: torch puts its advice around it."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return next(iter(str(error).strip().splitlines()), "") or repr(error)


class _IndexUnpickler(pickle.Unpickler):
    """Makes objects of the classes of an index, and no others."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _stored(folder: Path, place: Any) -> bytes:
    path = folder / place.relative_path
    if path.resolve().parent != folder.resolve():
        raise ValueError(f"its index points to '{place.relative_path}', outside of it")
    with path.open("rb") as stream:
        stream.seek(place.offset)
        return stream.read(place.length)
