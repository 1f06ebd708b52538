"""Check whether long training leaks memory, open files, threads or processes, minute by minute.

    python benchmarks/soak.py --minutes 30

One process runs ``longce fit`` and ``longce validate`` over and over, in sequences of 256 tokens: with LongCE, a loader
process, an evaluation every 50 steps whose evaluator is loaded and scores each time, checkpoints and TensorBoard.
Another process samples it every two seconds. The table has the largest values of each minute; memory is resident
memory without that of the loader. After each training Python collects garbage, because cycles keep files open.

Growth is the slope of a line through the samples after the first third, in which a process reaches its size. A run is
flat if memory grows by less than 2 MB per 1000 steps, and the fewest open files, threads and processes are no
more in the last third than in the second: the fewest, because many samples catch a file that is open briefly.
"""

import argparse
import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from statistics import linear_regression

BOUND = 2.0
"""Megabytes of resident memory per 1000 steps that count as flat."""

MINIMUM = 120.0
"""Seconds of training that say something."""

CONFIGS = Path(__file__).parent.parent / "configs"
OVERLAY = """\
data: {sequence_length: 256, batch_size: 2, num_workers: 1}
trainer:
  val_check_interval: 50
  logger: {class_path: lightning.pytorch.loggers.TensorBoardLogger, init_args: {save_dir: soak, name: run}}
  callbacks+:
    - class_path: callbacks.StepCheckpoint
      init_args: {every_n_train_steps: 10, monitor: step, mode: max, save_top_k: 2, save_last: link}
"""
SILENT = ("--trainer.enable_progress_bar", "false")


@dataclass(frozen=True)
class Sample:
    """Resources of a process after some seconds."""

    seconds: float
    steps: int
    megabytes: float
    files: int
    threads: int
    children: int


def train(folder: Path, steps: int) -> None:
    """Make models, then train and validate until this process is stopped, counting its steps in a file."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from lightning_modules.commands.cli.main import main

    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ["LONGCE_CACHE"] = "cache"
    short = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "1", "--data.train_documents", "256"]
    main(["quickstart", *short, *SILENT])
    logging.disable(logging.INFO)
    Path("overlay.yaml").write_text(OVERLAY)
    configs = ["-c", f"{CONFIGS}/base.yaml", "-c", f"{CONFIGS}/quickstart/longce.yaml", "-c", "overlay.yaml"]
    done = count(1)
    register_optimizer_step_post_hook(lambda *_: Path("steps").write_text(f"{next(done)}"))
    for version in map("round{}".format, count()):
        named = ("--trainer.logger.init_args.version", version)
        main(["fit", *configs, *named, "--trainer.max_steps", str(steps), *SILENT])
        main(["validate", *configs, "--ckpt_path", f"soak/run/{version}/checkpoints/last.ckpt", *SILENT])
        shutil.rmtree("soak")
        shutil.rmtree("cache/token_scores")
        gc.collect()


def sample(process: int, folder: Path, begin: float) -> Sample:
    """Read the resources of a process from Linux."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    children = [Path(f"/proc/{process}/task/{task}/children") for task in os.listdir(f"/proc/{process}/task")]
    steps = folder / "steps"
    return Sample(
        seconds=time.monotonic() - begin,
        steps=int(steps.read_text() or 0) if steps.exists() else 0,
        megabytes=int(status["VmRSS"].split()[0]) / 1024,
        files=len(os.listdir(f"/proc/{process}/fd")),
        threads=int(status["Threads"]),
        children=sum(len(path.read_text().split()) for path in children if path.exists()),
    )


def watch(folder: Path, options: argparse.Namespace) -> Iterator[Sample]:
    """Yield samples of a training process until its time is over."""
    command = [sys.executable, __file__, "--train", str(folder), "--steps", str(options.steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < 60 * options.minutes:
            time.sleep(options.every)
            if process.poll() is not None:
                sys.exit(f"The training has ended:\n{(folder / 'log').read_text()[-3000:]}")
            if (found := sample_if_there(process.pid, folder, begin)) is not None:
                yield found
    finally:
        process.kill()
        process.wait()


def sample_if_there(process: int, folder: Path, begin: float) -> Sample | None:
    """Return a sample, or None if the process, a thread or a file ended meanwhile."""
    try:
        return sample(process, folder, begin)
    except (OSError, KeyError):
        return None


def print_minutes(samples: Iterator[Sample]) -> list[Sample]:
    """Print a line for each minute as it ends."""
    print("| minute | steps | resident MB | open files | threads | processes |\n|---|---|---|---|---|---|", flush=True)
    kept = []
    for minute, group in groupby(samples, lambda sample: int(sample.seconds // 60)):
        found = list(group)
        maximum = [max(getattr(sample, name) for sample in found) for name in ("files", "threads", "children")]
        memory = max(sample.megabytes for sample in found)
        print(
            f"| {minute + 1} | {found[-1].steps} | {memory:.0f} | " + " | ".join(map(str, maximum)) + " |", flush=True
        )
        kept += found
    return kept


def verdict(samples: list[Sample]) -> str:
    """Describe what has grown after the first third of the time."""
    trained = [sample for sample in samples if sample.steps]
    if not trained or trained[-1].seconds - trained[0].seconds < MINIMUM:
        return "Too short to say anything."
    later = trained[len(trained) // 3 :]
    slope = 1000 * linear_regression([s.steps for s in later], [s.megabytes for s in later]).slope
    middle = len(later) // 2
    more = [
        name
        for name in ("files", "threads", "children")
        if min(getattr(s, name) for s in later[middle:]) > min(getattr(s, name) for s in later[:middle])
    ]
    flat = slope < BOUND and not more
    growth = f"{slope:+.2f} MB per 1000 steps (bound {BOUND:g})"
    return (
        f"{'Flat' if flat else 'NOT FLAT'}: resident memory {growth}; more at the end: {', '.join(more) or 'nothing'}."
    )


def main() -> None:
    """Print the table and the verdict; exits with 1 if something grows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--steps", type=int, default=1000, help="of one training")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two samples")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = verdict(print_minutes(watch(Path(folder), options)))
    print(found)
    if found.startswith("NOT"):
        sys.exit(1)


if __name__ == "__main__":
    main()
