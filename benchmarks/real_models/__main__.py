"""Command line of the benchmarks on real models: ``python -m benchmarks.real_models fetch FOLDER``."""

import argparse
import sys
from pathlib import Path

from benchmarks.real_models.fetch import MODELS, fetch


def main() -> None:
    """Run a part of the benchmarks; errors are one line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_models", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    download = parts.add_parser("fetch", help="Download models as GGUF files, without a hub.")
    download.add_argument("folder", type=Path, help="Folder for the files; those that are there are kept.")
    download.add_argument("models", nargs="*", metavar="MODEL", help=f"By default all: {', '.join(MODELS)}.")
    options = parser.parse_args()
    try:
        fetch(options.folder, options.models or list(MODELS))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
