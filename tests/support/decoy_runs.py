"""Run commands one after the other in one process, as the console script does: ``decoy_runs.py COMMANDS.json``.

A script, so that ``sys.path[0]`` is not the working directory. An argument ``--lookups FILE`` writes
the top-level modules that were looked for in vain: what decoys should be named.
"""

import json
import sys
from pathlib import Path


class Lookups:
    """Notes what nobody finds."""

    def __init__(self, path):
        self.path = path

    def find_spec(self, name, path, target=None):
        if path is None:
            with self.path.open("a") as stream:
                stream.write(f"{name}\n")


if __name__ == "__main__":
    if "--lookups" in sys.argv:
        sys.meta_path.append(Lookups(Path(sys.argv[sys.argv.index("--lookups") + 1])))
    sys.path[0] = str(Path(__file__).parents[2])  # not `tests`, which has folders with the names of the packages
    from longce.cli.main import main

    failed = []
    for words in json.loads(Path(sys.argv[1]).read_text()):
        sys.stderr.write(f"\n$ longce {' '.join(words)}\n")
        sys.argv = ["longce", *words]
        try:
            main(words)
        except SystemExit as stopped:
            failed += [words] if stopped.code else []
    sys.exit(f"failed: {failed}" if failed else 0)
