"""Training in processes of its own, to which something happens.

`python -m tests.support.faults 20` prints what came of it.

After the number of trials: `from N` for the faults from the N-th on.

The processes are forked from one that has imported everything. What they train on is random but the same in each run;
with dropout, validation by an external evaluator and a checkpoint after each step.
"""

import contextlib
import errno
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import yaml

from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.scoring import scored_model, token_scores
from tests.support.fault_runs import Run, new_run, prepare


@dataclass
class Outcome:
    """What came of one kind of fault."""

    fault: str
    trials: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    seconds: float = 0.0
    message: str = ""

    def row(self) -> str:
        return (
            f"| {self.fault} | {self.trials} | {len(self.wrong)} | {self.lost} | {self.seconds:.1f} | {self.message} |"
        )


HEADER = (
    "| fault | trials | wrong results | batches lost, at most | seconds to the end, at most | last words |\n"
    + 6 * "|---"
    + "|"
)


NAMES = {signal.SIGKILL: "kill -9", signal.SIGTERM: "SIGTERM"}


class Faults:
    """Each method makes one kind of fault happen, then lets training end and compares it with an undisturbed one."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        # Elsewhere: a process that has trained a tokenizer has threads, which those forked from it would wait for.
        process = multiprocessing.get_context("fork").Process(target=prepare, args=(folder,))
        process.start()
        process.join()
        self.config = yaml.safe_load((folder / "config.yaml").read_text())
        self.rng = random.Random(seed)
        self.undisturbed: dict[tuple[int, bool], Run] = {}

    def _undisturbed(self, ranks: int, sharded: bool = False) -> Run:
        kind = (ranks, sharded)
        if kind not in self.undisturbed:
            run = new_run(
                self.folder / f"undisturbed{len(self.undisturbed)}", self.config, ranks=ranks, sharded=sharded
            )
            run.start()
            statuses, _ = run.wait()
            assert not any(statuses), run.log()
            self.undisturbed[kind] = run
        return self.undisturbed[kind]

    def _new_run(self, ranks: int = 1, workers: int = 0, sharded: bool = False) -> Run:
        name = f"run{len(list(self.folder.glob('run*')))}"
        return new_run(self.folder / name, self.config, ranks=ranks, workers=workers, sharded=sharded)

    def _finish(self, outcome: Outcome, run: Run) -> Outcome:
        run.start()
        return self._compare(outcome, run)

    def _compare(self, outcome: Outcome, run: Run) -> Outcome:
        statuses, _ = run.wait()
        if any(statuses):
            outcome.wrong.append(f"could not go on: {run.log()[-2000:]}")
        outcome.wrong += run.differences(self._undisturbed(run.ranks, run.sharded))
        outcome.lost = max(outcome.lost, run.lost())
        return outcome

    def interrupted(
        self, number: int, when: str, trials: int, *, ranks: int = 1, workers: int = 0, sharded: bool = False
    ) -> Outcome:
        """Send a signal to one process, a random while after a moment of `when`; by SIGTERM all end with 0."""
        run = self._new_run(ranks, workers, sharded)
        details = f", {workers} workers" * bool(workers) + f", {ranks} processes" * (ranks > 1) + ", FSDP2" * sharded
        outcome = Outcome(f"{NAMES[number]} in {when}{details}")
        while outcome.trials < trials:
            if when == "writing the token cache":
                shutil.rmtree(run.cache, ignore_errors=True)
            if when == "evaluator scoring":
                shutil.rmtree(run.cache / "token_scores", ignore_errors=True)
            run.start()
            if not run.until(self._moment(when, run)):
                self._compare(outcome, run)  # trained to its end: begin again
                run = self._new_run(ranks, workers, sharded)
                continue
            time.sleep(self.rng.uniform(0, 0.03 if when == "training" else 0.01))
            os.kill(run.processes[self.rng.randrange(ranks)], number)
            statuses, seconds = run.wait()
            outcome.seconds = max(outcome.seconds, seconds)
            outcome.trials += number == signal.SIGTERM or -signal.SIGKILL in statuses
            if number == signal.SIGTERM:
                outcome.message = last_words(run)
                outcome.wrong += [f"exit statuses {statuses}: {run.log()[-2000:]}"] if any(statuses) else []
        return self._finish(outcome, run)

    def _moment(self, what: str, run: Run) -> Callable[[], bool]:
        if what == "training":
            wanted = len(run.records()) + self.rng.randint(1, 4)
            return lambda: len(run.records()) >= wanted
        if what == "checkpointing":
            wanted = len(run.records()) + 2
            return lambda: len(run.records()) >= wanted and any(run.checkpoints.glob(".building-*"))
        if what == "evaluator scoring":
            return lambda: any((run.cache / "token_scores").rglob("*safetensors*"))
        return lambda: any(run.cache.glob(".building-*"))

    def broken(
        self,
        fault: str,
        act: Callable[[Run], None] = lambda run: None,
        *,
        patch: Callable[[int], None] = lambda rank: None,
        ranks: int = 1,
        workers: int = 0,
        status: int | None = None,
    ) -> Outcome:
        """Something fails in the code, or by `act`: all end, and training resumes from the last checkpoint."""
        outcome = Outcome(fault, trials=1)
        run = self._new_run(ranks, workers)
        run.start(patch=patch)
        run.until(lambda: len(run.records()) >= 5)
        if run.alive():
            act(run)
        statuses, outcome.seconds = run.wait()
        outcome.message = last_words(run)
        if status is not None and (status not in statuses or 0 in statuses):
            outcome.wrong.append(f"exit statuses {statuses}: {run.log()[-2000:]}")
        return self._finish(outcome, run)

    def damaged_part(self, kind: str) -> Outcome:
        """A file of the newest divided checkpoint is cut short (another is taken), or changed (which is said)."""
        outcome = Outcome(f"checkpoint of FSDP2: {kind}", trials=1)
        run = self._new_run(2, sharded=True)
        run.start("--trainer.max_steps", "6")
        run.wait()
        part = run.checkpoints / "step-6.ckpt" / "__1_0.distcp"
        if kind == "flipped bit":
            flip_a_bit(part, self.rng)
            run.start()
            statuses, outcome.seconds = run.wait()
            outcome.message = last_words(run)
            outcome.wrong += [] if statuses == [2, 2] else [f"exit statuses {statuses}: {run.log()[-2000:]}"]
            shutil.rmtree(part.parent)
        else:
            os.truncate(part, part.stat().st_size // 2)
        return self._finish(outcome, run)

    def damaged_checkpoint(self, trials: int, kind: str) -> Outcome:
        """The newest checkpoint is cut short, or one of its bits is another."""
        outcome = Outcome(f"checkpoint: {kind}")
        run = self._new_run()
        run.start("--trainer.max_steps", "6")
        run.wait()
        newest = run.checkpoints / "step-6.ckpt"
        whole = newest.read_bytes()
        for _ in range(trials):
            content = bytearray(whole)
            place = self.rng.randrange(len(content))
            if kind == "cut short":
                del content[place:]
            else:
                content[place] ^= 1 << self.rng.randrange(8)
            outcome.trials += 1
            outcome.wrong += unnoticed(newest, bytes(content), whole)
        newest.write_bytes(whole[: len(whole) // 2])
        run.start("--ckpt_path", "runs/longce/run/checkpoints/step-6.ckpt")
        outcome.wrong += [f"went on with half a file: {run.log()}"] if run.wait()[0] == [0] else []
        outcome.message = last_words(run)
        return self._finish(outcome, run)

    def damaged_cache(self, name: str, pattern: str, trials: int) -> Outcome:
        """One bit of one of our files in the cache is another: found, and made anew."""
        outcome = Outcome(f"flipped bit in {name}")
        run = self._new_run()
        for trial in range(trials + 1):
            run.start("--trainer.max_steps", "6")
            statuses, _ = run.wait()
            outcome.wrong += [run.log()[-2000:]] if any(statuses) else []
            outcome.wrong += [line for line in run.differences(self._undisturbed(1)) if "no batch" not in line]
            outcome.message = last_words(run)
            if trial < trials:
                flip_a_bit(self.rng.choice(sorted(run.cache.glob(pattern))), self.rng)
                outcome.trials += 1
                shutil.rmtree(run.folder / "runs")
                (run.folder / "rank0.jsonl").unlink()
        return self._finish(outcome, run)

    def refused(
        self, fault: str, *options: str, patch: Callable[[int], None] = lambda rank: None, status: int = 2
    ) -> Outcome:
        """Something cannot be written: said at the start, or when the first one fails."""
        outcome = Outcome(fault, trials=1)
        run = self._new_run()
        run.start(*options, patch=patch)
        statuses, outcome.seconds = run.wait()
        outcome.message = last_words(run)
        if statuses != [status]:
            outcome.wrong.append(f"exit statuses {statuses}: {run.log()[-2000:]}")
        return self._finish(outcome, run)


def limit_files(size: int, rank: int) -> None:
    """Let writing fail behind so many bytes of a file, as on a full disk."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def no_room_for_scores(rank: int) -> None:
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    token_scores.write_atomically = full


def no_cache(rank: int) -> None:
    os.environ["LONGCE_CACHE"] = "/proc/longce"


def flip_a_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def unnoticed(path: Path, content: bytes, whole: bytes) -> list[str]:
    """Whether a changed file is loaded as something else than the whole one."""
    from lightning_modules.training.checkpoints.io import CheckedCheckpointIO

    path.write_bytes(content)
    os.utime(path, ns=(time.time_ns(), time.time_ns()))
    try:
        loaded = CheckedCheckpointIO().load_checkpoint(path)
    except ValueError:
        return []
    finally:
        path.write_bytes(whole)
    return [] if same(loaded, torch.load(path, weights_only=True)) else ["a changed checkpoint was loaded"]


def same(first: object, second: object) -> bool:
    """Whether two checkpoints hold the same numbers."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return (
            isinstance(second, dict) and first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(same(*pair) for pair in zip(first, second, strict=True))
    return first == second


def last_words(run: Run) -> str:
    """The last message that a user sees."""
    lines = [line for line in run.log().splitlines() if line.strip() and not line.startswith("(Set LONGCE")]
    found = [
        index
        for index, line in enumerate(lines)
        if line.startswith(("longce:", "Stopped at", "Skipping")) or "again" in line
    ]
    return " ".join(lines[found[-1] :][:4])[:700] if found else " ".join(lines[-2:])[:700]


def kill_rank(rank: int, run: Run) -> None:
    os.kill(run.processes[rank], signal.SIGKILL)


def kill_loader(run: Run) -> None:
    """As the system does when memory runs out."""
    tasks = Path(f"/proc/{run.processes[0]}/task").glob("*/children")
    os.kill(min(int(child) for task in tasks for child in task.read_text().split()), signal.SIGKILL)


def evaluator_out_of_memory(rank: int) -> None:
    def score_text(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    scored_model.score_text = score_text


def loss_not_finite(rank: int) -> None:
    """On the last process only."""
    step = LongContextLM.training_step

    def training_step(self, batch, batch_idx):
        loss = step(self, batch, batch_idx)
        if self.global_step == 3 and self.global_rank == self.trainer.world_size - 1:
            self._losses[batch_idx] = loss.detach() * float("nan")
            self._statistics._sums *= float("nan")
        return loss

    LongContextLM.training_step = training_step


def kinds(faults: Faults, trials: int) -> list[Callable[[], Outcome]]:
    """Everything that can happen here; `tests/reliability/test_faults.py` tries those up to the sixth."""
    nowhere = ("--trainer.callbacks.dirpath", "/proc/longce")
    logs = ("--trainer.logger.init_args.save_dir", "/proc/longce", "--trainer.callbacks.dirpath", "checkpoints")
    export = ("--trainer.callbacks+", "callbacks.HuggingFaceExport", "--trainer.callbacks.output_dir", "/proc/longce")
    kill, stop = (partial(faults.interrupted, number) for number in (signal.SIGKILL, signal.SIGTERM))
    return [
        lambda: kill("training", trials, workers=2),
        lambda: kill("checkpointing", trials),
        lambda: stop("evaluator scoring", trials),
        lambda: faults.damaged_checkpoint(10 * trials, "flipped bit"),
        lambda: faults.broken("evaluator out of memory", patch=evaluator_out_of_memory, status=1),
        lambda: faults.broken("NaN in one of 2 processes", patch=loss_not_finite, ranks=2, status=2),
        lambda: faults.refused("folder that cannot be written to", *nowhere),
        lambda: kill("training", trials),
        lambda: kill("evaluator scoring", trials),
        lambda: kill("writing the token cache", trials),
        lambda: stop("training", trials),
        lambda: stop("training", trials, ranks=2),
        lambda: faults.refused("full disk: checkpoints", patch=partial(limit_files, 100_000)),
        lambda: faults.refused("full disk: token cache", patch=partial(limit_files, 2_000)),
        lambda: faults.refused("full disk: token scores", patch=no_room_for_scores, status=0),
        lambda: faults.refused("cache that cannot be written to", patch=no_cache),
        lambda: faults.refused("logs that cannot be written to", *logs),
        lambda: faults.refused("export that cannot be written to", *export),
        lambda: faults.damaged_checkpoint(10 * trials, "cut short"),
        lambda: faults.damaged_cache("token scores", "token_scores/*/*.safetensors", trials),
        lambda: faults.damaged_cache("token cache", "*/*.bin", trials),
        lambda: faults.broken("NaN", patch=loss_not_finite, status=2),
        lambda: faults.broken("kill -9 of a loader process", kill_loader, workers=2, status=1),
        *(
            partial(faults.broken, f"kill -9 of process {rank} of 2", partial(kill_rank, rank), ranks=2)
            for rank in (0, 1)
        ),
        lambda: kill("checkpointing", max(1, trials // 4), ranks=2, sharded=True),
        lambda: faults.damaged_part("cut short"),
        lambda: faults.damaged_part("flipped bit"),
    ]


def table(folder: Path, trials: int, chosen: slice) -> list[Outcome]:
    """Make them happen; prints as it goes."""
    sys.stdout.write(HEADER + "\n")
    outcomes = []
    for kind in kinds(Faults(folder), trials)[chosen]:
        outcomes.append(kind())
        sys.stdout.write(outcomes[-1].row() + "\n")
        sys.stdout.writelines(f"    {wrong}\n" for wrong in outcomes[-1].wrong)
        sys.stdout.flush()
    return outcomes


class Evil:
    """Creates the folder ``marker`` when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (os.mkdir, (self.marker,))


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(KeyboardInterrupt):
        first = int(sys.argv[3]) if sys.argv[2:3] == ["from"] else 0
        outcomes = table(Path(name), int(sys.argv[1]), slice(first, None))
        sys.exit(any(outcome.wrong for outcome in outcomes))
