"""List and run the commands of the tables of trained models: plan, fit, export and evaluate."""

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reproduction.tables.published import Table, published
from benchmarks.reproduction.tables.results import reason
from benchmarks.reproduction.tables.scores import STEPS, without_steps

CONFIGS = Path(__file__).parents[3] / "configs"

_SHORT = ("--tasks", "short")
_LONGBENCH = ("--tasks", "longbench", "--max_length", "32000")
_DOMAINS = (
    "Single-Document QA",
    "Multi-Document QA",
    "Summarization",
    "Few-shot Learning",
    "Code Completion",
    "Synthetic Tasks",
)
EVALUATIONS = {
    **dict.fromkeys(("LongBench", *_DOMAINS), _LONGBENCH),
    "LongEval": ("--tasks", "longeval", "--lengths", "31000", "--samples", "50"),
    "RULER": ("--tasks", "ruler_synthetic", "--lengths", "32000", "--samples", "50"),
    **dict.fromkeys(("MMLU", "ARC-C", "RACE", "BBH", "TruthfulQA", "CommonsenseQA"), _SHORT),
}
"""Words of ``longce evaluate`` for the benchmarks of the tables."""


@dataclass(frozen=True)
class Step:
    """A ``longce`` command, and the path that exists once it is done."""

    words: tuple[str, ...]
    done: Path

    def __str__(self) -> str:
        return shlex.join(("longce", *self.words))


@dataclass(frozen=True)
class Run:
    """A training run of the paper.

    Attributes:
        name: Such as ``A-LongCE``.
        steps: Steps at which its weights are measured.
        output: Folder of the run and its exports.
        options: Further options of ``longce fit``, which override others.
    """

    name: str
    steps: tuple[int, ...]
    output: Path
    options: tuple[str, ...] = ()

    def settings(self) -> tuple[str, ...]:
        """Return the configs and options of `fit` and `plan`."""
        entry = published()["runs"][self.name]
        # A 7B model with its gradients and AdamW needs 125 GiB without sharding, more than the paper's cards have.
        layers = ("base", *(f"experiments/{name}" for name in entry["configs"]), "strategies/fsdp")
        words = [word for layer in layers for word in ("-c", f"configs/{layer}.yaml")]
        words += [word for key, value in entry.get("options", {}).items() for word in (f"--{key}", str(value))]
        return (*words, *self.options)

    def fit(self) -> Step:
        """Return the command that trains, or resumes, the run in its folder."""
        logger = {"save_dir": str(self.output), "name": "runs", "version": self.name}
        words = [word for key, value in logger.items() for word in (f"--trainer.logger.init_args.{key}", value)]
        # One run serves all steps: after the warm-up the learning rate is constant.
        return Step(("fit", *self.settings(), *words, "--ckpt_path", "last"), self.weights(max(self.steps)))

    def plan(self) -> str:
        """Return the command that predicts time and memory."""
        return shlex.join(("longce", "plan", *self.settings(), "--gpu", "A100-80", "--gpus", "8"))

    def exports(self) -> list[Step]:
        """Return the commands that export the models after some steps."""
        steps = [(self.weights(step), self.output / "models" / f"{self.name}-{step}") for step in self.steps]
        return [Step(("export", str(weights), str(folder)), folder / "config.json") for weights, folder in steps]

    def evaluations(self, table: Table) -> list[Step]:
        """Return the commands that evaluate the exported models on the benchmarks of a table."""
        steps = []
        for step in self.steps:
            name = f"{self.name}-{step}"
            for kind, words in evaluations(table).items():
                folder = self.output / "scores" / name / kind
                command = ("evaluate", "--model", str(self.output / "models" / name), *words, "--output", str(folder))
                steps.append(Step(command, folder / "report.html"))
        return steps

    def weights(self, step: int) -> Path:
        """Return the path of the weights that `fit` writes at a step."""
        return self.output / "runs" / self.name / "checkpoints" / f"weights-{step}.ckpt"


def evaluations(table: Table) -> dict[str, tuple[str, ...]]:
    """Return the words of ``longce evaluate`` for the benchmarks of a table, by the name of the folder of scores."""
    if table.evaluation:
        return {table.name: table.evaluation}
    return {words[1]: words for words in (EVALUATIONS[benchmark] for benchmark in benchmarks(table))}


def table_runs(table: Table, output: Path, options: Sequence[str] = ()) -> list[Run]:
    """Return the runs of a table in its order, each with the steps that the table reports."""
    columns = {steps for _, steps in map(without_steps, table.columns) if steps is not None}
    steps: dict[str, set[int]] = {}
    for word in table.runs.values():
        name, _, step = word.rpartition("-")
        if step.isdigit() and int(step) in STEPS:
            steps.setdefault(name, set()).add(int(step))
        else:
            steps.setdefault(word, set()).update(columns)
    return [Run(name, tuple(sorted(reported)), output, tuple(options)) for name, reported in steps.items()]


def script(runs: Sequence[Run], table: Table) -> str:
    """Format all commands as a shell script, which skips finished ones when it is started again."""
    lines = [f"# {table.name}: {table.title}", "# Start it in the checkout. Finished steps are skipped.", "set -e"]
    for run in runs:
        lines += ["", f"# {run.name}. Time and memory: {run.plan()}"]
        steps = (run.fit(), *run.exports(), *run.evaluations(table))
        lines += [f"[ -e {shlex.quote(str(step.done))} ] || {step}" for step in steps]
    scores = shlex.quote(str(runs[0].output / "scores"))
    folders = " ".join(f"{scores}/*/{kind}" for kind in evaluations(table))
    lines += ["", "# The table from these scores."]
    if not table.evaluation:
        lines += [
            "# Those of other programs are read from files with the columns model (such as",
            f"# {runs[0].name}-{runs[0].steps[-1]}) and {', '.join(benchmarks(table))}.",
        ]
    lines.append(f"longce reproduce {table.name} --output {shlex.quote(str(runs[0].output))} --scores {folders}")
    return "\n".join(lines) + "\n"


def benchmarks(table: Table) -> list[str]:
    """Return the benchmarks of a table of trained models."""
    return sorted({without_steps(column)[0] for column in table.columns} & set(EVALUATIONS))


def carry_out(runs: Sequence[Run], table: Table, call: Callable[[Sequence[str]], None] | None = None) -> list[str]:
    """Run all unfinished commands, each in its own process.

    Args:
        runs: The runs.
        table: Its benchmarks are evaluated.
        call: Runs ``longce`` with these words; raises if that fails.

    Returns:
        One line per failed run; the other runs are done.
    """
    failed = []
    for run in runs:
        for step in (run.fit(), *run.exports(), *run.evaluations(table)):
            if step.done.exists():
                continue
            sys.stdout.write(f"$ {step}\n")
            sys.stdout.flush()
            try:
                (call or _call)(step.words)
            except (OSError, subprocess.CalledProcessError) as error:
                failed.append(f"{run.name}: {reason(error)}")
                break
    return failed


def _call(words: Sequence[str]) -> None:
    # A module, because Lightning starts the processes of further GPUs by the name of the first one's program.
    subprocess.run([sys.executable, "-m", "longce", *words], check=True, cwd=CONFIGS.parent)
