"""Keep what a benchmark printed as JSON, with how it came about, and write `benchmarks/RESULTS.md` from these files.

    python benchmarks/results.py record corpus --title "Scoring a corpus" -- python benchmarks/corpus.py --rounds 3
    python benchmarks/results.py render

``record`` runs a command, shows what it prints, and writes `benchmarks/results/NAME.json`: command, commit, versions of
the libraries, machine, date, hash of the data (``--data PATH``), and the printed text and tables.
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_modules.utilities.files import write_atomically
from lightning_modules.utilities.identity import combined_hash, content_hash
from lightning_modules.visualization import report

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results"
MEASURED = ROOT / "longce" / "plan" / "measured"
REPORT = ROOT / "benchmarks" / "RESULTS.md"
LIBRARIES = ("torch", "transformers", "lightning", "tokenizers", "datasets", "numpy", "longppl")
LOG_LINE = re.compile(r"\[\d{4}-\d\d-\d\d .*\] \[[A-Z]+\]")  # DeepSpeed logs to standard output
INTRODUCTION = (
    "Written by `python benchmarks/results.py render` from the files in `benchmarks/results`: change those, not this"
    " page. `python benchmarks/results.py record` makes them; a few were copied from an earlier report, and say so."
    " Times on a shared machine vary. Ratios within a table are of runs in turn in one process, unless noted otherwise."
)


def record(name: str, command: list[str], *, title: str, data: list[str], remark: str) -> Path:
    """Run a command and write what it printed, and how it came about, to ``benchmarks/results/NAME.json``.

    Raises:
        SystemExit: If the checkout has uncommitted changes, or the command fails.
    """
    if changes := _git("status", "--porcelain", "--untracked-files=no"):
        sys.exit(f"Commit or stash your changes first, so that the result names the code that it is of:\n{changes}")
    started, load = datetime.now(UTC), os.getloadavg()[0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        if process.wait() != 0:
            sys.exit(f"The command failed with exit code {process.returncode}: nothing is recorded.")
    result = {
        "title": title,
        "command": shlex.join(command),
        "commit": read_commit(),
        "date": started.date().isoformat(),
        "seconds": round((datetime.now(UTC) - started).total_seconds()),
        "machine": {**describe_machine(), "load_at_start": round(load, 1)},
        "versions": {"python": platform.python_version(), **{library: version(library) for library in LIBRARIES}},
        "data": combined_hash([content_hash(Path(path)) for path in data]) if data else None,
        "remark": remark,
        "output": parse_output("".join(lines)),
    }
    write_atomically(FOLDER / f"{name}.json", (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    return FOLDER / f"{name}.json"


def read_commit() -> str:
    """Return the commit of the checkout, or "unknown" in a copy without git's folder, as on a rented machine."""
    try:
        return _git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def describe_machine() -> dict[str, Any]:
    """Name the processor, its cores and the GPU, if there is one."""
    import torch

    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    machine = {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count()}
    return machine | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def parse_output(text: str) -> list[dict[str, Any]]:
    """Split printed Markdown into tables, ``{"head": [..], "rows": [[..]]}``, and paragraphs, ``{"text": ..}``."""
    blocks: list[dict[str, Any]] = []
    text = "\n".join(line for line in text.splitlines() if not LOG_LINE.match(line))
    for paragraph in filter(None, (part.strip("\n") for part in text.split("\n\n"))):
        lines = paragraph.splitlines()
        first = next((number for number, line in enumerate(lines) if line.startswith("|")), len(lines))
        if lines[:first]:
            blocks.append({"text": "\n".join(lines[:first])})
        cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[first:]]
        if cells:
            head, _, *rows = cells
            blocks.append({"head": head, "rows": rows})
    return blocks


def list_results() -> list[Path]:
    """Return the files of all results, by name."""
    return sorted([*FOLDER.glob("*.json"), *MEASURED.glob("*.json")], key=lambda path: path.name)


def render(results: Iterable[Path]) -> str:
    """Return the report of all results, ordered by name."""
    blocks: list[report.Block] = [INTRODUCTION]
    for path in sorted(results, key=lambda path: path.name):
        result = json.loads(path.read_text())
        versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        machine = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result["machine"].items())
        data = f" Data: `{result['data'][:16]}`." if result["data"] else ""
        left = " (which has the script)" if has_left(result["command"]) else ""
        blocks += [
            report.Heading(result["title"]),
            f"```bash\n{result['command']}\n```",
            f"{result['date']}, commit `{result['commit'][:10]}`{left}, {machine}, {versions}.{data}",
            *([result["remark"]] if result["remark"] else []),
            *(_block(block) for block in result["output"]),
        ]
    return report.as_markdown("Results", blocks)


def _block(block: dict[str, Any]) -> report.Block:
    if "text" in block:
        return str(block["text"]) if "\n" not in block["text"] else f"```\n{block['text']}\n```"
    width = len(block["head"])
    return report.Table(block["head"], [[*row, *[""] * (width - len(row))] for row in block["rows"]])


def has_left(command: str) -> bool:
    """Return whether the script of a recorded command is no longer in the checkout."""
    program, *arguments = shlex.split(command)
    if program == "longce":
        return arguments[:2] == ["reproduce", "miniature"]
    if program != "python" or arguments[:2] == ["-m", "pytest"]:
        return False
    module = arguments[1].replace(".", "/") if arguments[0] == "-m" else arguments[0].removesuffix(".py")
    return not any((ROOT / file).exists() for file in (f"{module}.py", f"{module}/__main__.py"))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_lines() -> list[str]:
    information = Path("/proc/cpuinfo")
    return information.read_text().splitlines() if information.exists() else []


def main() -> None:
    """Record a result, or write the report of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    recording = commands.add_parser("record", help="run the command after -- and keep what it prints")
    recording.add_argument("name", help="name of the JSON file")
    recording.add_argument("--title", required=True, help="heading in the report")
    recording.add_argument("--data", nargs="*", default=[], help="files and folders the numbers depend on")
    recording.add_argument("--remark", default="", help="a sentence or two under the heading")
    commands.add_parser("render", help=f"write {REPORT.name}")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    if options.action == "record":
        if not command:
            parser.error("give the command to run after --")
        record(options.name, command, title=options.title, data=options.data, remark=options.remark)
    write_atomically(REPORT, render(list_results()).encode())


if __name__ == "__main__":
    main()
