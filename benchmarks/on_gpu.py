"""Check and time scoring and training on one GPU in about ten minutes, without weights, data or network.

First correctness against float32 on the CPU (`benchmarks/gpu/checks.py`) and the tests marked ``gpu``. Then the speed
of matrix products and attention, seconds, tokens/s, peak memory and MFU of passes and training steps of random models
with the sizes of Llama-3.1-8B and Llama-2-7B, whole or with fewer layers, and a profile of a LongCE step.

    python -m benchmarks.on_gpu --plan                   # predicted time and memory of each row, without a GPU
    python -m benchmarks.on_gpu                          # writes longce/plan/measured/gpu_<card>.json after each row
    python -m benchmarks.on_gpu --device cpu --output /tmp/rehearsal.json

A second call continues with the rows that the file lacks, or that failed. `longce plan` reads the file. Features that
this version or machine lacks (an option, FlashAttention) are reported as not available.
"""

import argparse
import contextlib
import gc
import json
import platform
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from benchmarks.gpu.cases import CASES, Sizes, predict, predict_seconds
from benchmarks.gpu.checks import NotAvailableError, evaluator_check, resume_check, step_checks
from benchmarks.gpu.timing import measure_rates, profile_step, time_case
from benchmarks.results import read_commit
from lightning_modules.utilities.files import write_atomically
from lightning_modules.utilities.identity import combined_hash, content_hash
from longce.plan.hardware import GPU, GPUS, RESULTS, Range
from longce.plan.memory import GIB

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "lightning", "peft", "torchmetrics")
TINY = Sizes(tokens=512, context_length=64, stride=16, rounds=1)
RATES, PROFILE, PROFILED = "rates of products and attention", "profile of a LongCE step", "8 layers, bf16: LongCE"
DONE = {"passed", "seconds", "tflops", "largest"}
"""A row with none of these is tried again by the next call."""


class Job(NamedTuple):
    """One row of the results."""

    name: str
    run: Callable[[], dict[str, Any]]
    seconds: Range  # that it may take
    gib: float | None = None


def jobs(sizes: Sizes, device: str, gpu: GPU) -> Iterator[Job]:
    """Yield all rows: correctness, rates, times, and a profile."""
    for name, check in step_checks(device):
        yield Job(name, check, Range(1.0, 2.0))
    for kind, same in (("the model's tokenizer", True), ("another tokenizer", False)):
        yield Job(f"evaluator with {kind}", partial(evaluator_check, device, same_tokenizer=same), Range(3.0, 10.0))
    yield Job("killed and resumed", partial(resume_check, device), Range(20.0, 45.0))
    yield Job("tests marked gpu", run_gpu_tests, Range(10.0, 60.0))
    yield Job(RATES, partial(measure_rates, sizes, device), Range(2.0, 5.0))
    for case in CASES.values():
        seconds, gib = predict_seconds(case, sizes, device, gpu), predict(case, sizes, device)[1] / GIB
        yield Job(case.name, partial(time_case, case, sizes, device, gpu.tflops), seconds, gib)
        if case.name == PROFILED:
            yield Job(PROFILE, partial(profile_step, case, sizes, device), seconds, gib)


def print_plan() -> None:
    """Print the predicted time and memory of each row on an H200."""
    total = Range(0.0, 0.0)
    print("| row | seconds, with building and warm-up | GiB |\n|---|---|---|")
    for job in jobs(Sizes(), "cuda", GPUS["H200"]):
        print(f"| {job.name} | {job.seconds.low:.0f} to {job.seconds.high:.0f} | {job.gib or 1:.0f} |")
        total = Range(total.low + job.seconds.low, total.high + job.seconds.high)
    print(f"\nAll rows: {total.low / 60:.1f} to {total.high / 60:.1f} minutes.")


def run_gpu_tests() -> dict[str, Any]:
    """Run the tests that need a GPU, and return pytest's summary."""
    if not (ROOT / "tests" / "gpu").is_dir():
        raise NotAvailableError("tests/gpu does not exist")
    if find_spec("pytest") is None:
        raise NotAvailableError("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    summary = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    return {"passed": done.returncode == 0, "summary": "".join(summary)[:200]}


def run_job(job: Job) -> dict[str, Any]:
    """Run a job; one that fails, or that needs what does not exist here, must not stop the others."""
    started = time.perf_counter()
    try:
        with warnings.catch_warnings(action="ignore"):
            row = job.run()
    except NotAvailableError as error:
        row = {"not_available": str(error)[:300]}
    except Exception as error:
        row = {"failed": f"{type(error).__name__}: {error}"[:1000]}
    gc.collect()
    torch.cuda.empty_cache()
    return {**row, "wall_seconds": round(time.perf_counter() - started, 1)}


def describe_run(gpu: GPU, device: str) -> dict[str, Any]:
    """Return what the results depend on, and how they came about, as `benchmarks/results.py` reports it."""
    sources = sorted(
        file for folder in ("longce", "lightning_modules", "benchmarks") for file in (ROOT / folder).rglob("*.py")
    )
    card, driver = platform.machine(), None
    if device == "cuda":
        card = torch.cuda.get_device_name()
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    commit = read_commit()
    versions = {"python": platform.python_version(), **{library: version(library) for library in LIBRARIES}}
    date = datetime.now(UTC).date().isoformat()
    return {
        "title": f"One GPU: {card}",
        "command": shlex.join(["python", "-m", "benchmarks.on_gpu", *sys.argv[1:]]),
        "gpu": gpu.name,
        "peak_tflops": gpu.tflops,
        "source": f"{card}, {date}, torch {versions['torch']}, commit {commit[:10]}",
        "commit": commit,
        "code": combined_hash([content_hash(file) for file in sources]),
        "date": date,
        "machine": {"card": card, "driver": driver},
        "versions": versions,
        "data": None,
        "remark": "Random models and tokens. MFU leaves out recomputation.",
    }


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write_results(path: Path, run: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    """Replace the file by all rows so far, as data and as tables."""
    columns = ("seconds", "tokens_per_second", "peak_gib", "planned_gib", "mfu", "mfu_of_reachable")
    times = [[name, *(f"{row[key]:.3g}" for key in columns)] for name, row in rows.items() if "seconds" in row]
    others = [[name, summarize(row)] for name, row in rows.items() if "seconds" not in row]
    for name in ("8B, bf16", "16 layers of 7B, bf16", "8 layers, bf16", "8 layers, fp32 + autocast"):
        ce, longce = (rows.get(f"{name}: {kind}", {}).get("seconds") for kind in ("CE", "LongCE"))
        if ce and longce:
            others.append([f"LongCE over CE: {name}", f"{longce / ce - 1:+.0%} (paper: +79%, Llama-2-7B)"])
    tables = [{"head": ["check", "result"], "rows": others}, {"head": ["", *columns], "rows": times}]
    content = {**run, "rates": rows.get(RATES, {}).get("tflops", {}), "rows": rows, "output": tables}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def summarize(row: dict[str, Any]) -> str:
    """Return a row on one line."""
    verdict = {True: "passed, ", False: "FAILED, ", None: ""}[row.get("passed")]
    numbers = {name: value for name, value in row.items() if name not in ("passed", "flops", "autocast", "plain")}
    return verdict + ", ".join(
        f"{name.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
        for name, value in numbers.items()
    )


def read_rows(path: Path, run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows that an earlier call completed with the same code, versions and card."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    if any(earlier[key] != run[key] for key in ("code", "versions", "machine")):
        return {}
    return {name: row for name, row in earlier["rows"].items() if DONE & set(row)}


def find_card(device: str) -> GPU:
    """Return the known GPU of this machine, or one with its name that is counted at the reachable rate of an H200."""
    if device == "cpu":
        return GPU("CPU", 0.1, 1.0)
    name = torch.cuda.get_device_name()
    for known in sorted(GPUS, key=len, reverse=True):
        if all(re.search(rf"{part}(?![0-9])", name.replace(" ", "")) for part in known.split("-")):
            return GPUS[known]
    return GPU(name, GPUS["H200"].tflops, torch.cuda.mem_get_info()[1] / GIB)


def main() -> None:
    """Run what is missing, and exit with 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu rehearses with tiny sizes")
    parser.add_argument("--output", type=Path, help="JSON file (longce/plan/measured/gpu_<card>.json)")
    parser.add_argument("--minutes", type=float, default=9.5, help="leave out rows that may not end in this time")
    parser.add_argument("--only", default="", help="regular expression for the names of the rows to run")
    parser.add_argument("--plan", action="store_true", help="print predicted times and memory on an H200, and stop")
    options = parser.parse_args()
    if options.plan:
        print_plan()
        return
    started = time.monotonic()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    gpu = find_card(options.device)
    path = options.output or RESULTS / f"gpu_{gpu.name.lower()}.json"
    run = describe_run(gpu, options.device)
    rows = read_rows(path, run)
    print(run["source"], f"\nResults: {path}, which has {len(rows)} rows.")
    for job in jobs(Sizes() if options.device == "cuda" else TINY, options.device, gpu):
        if job.name in rows or not re.search(options.only, job.name):
            continue
        if time.monotonic() - started + job.seconds.high > 60 * options.minutes:
            print(f"{job.name}: left out, because it may take {job.seconds.high:.0f} s", flush=True)
            continue
        rows[job.name] = run_job(job)
        write_results(path, run, rows)
        print(f"{job.name}: {summarize(rows[job.name])}", flush=True)
    sys.exit(any(row.get("passed") is False or "failed" in row for row in rows.values()))


if __name__ == "__main__":
    main()
