"""List all runs of a reproduction in the order in which they can be made, and look up their measurements."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, get_args

from benchmarks.reproduction.miniature.measure import Masks, Tokens, token_metrics
from benchmarks.reproduction.miniature.settings import Length, Miniature, Windows
from benchmarks.reproduction.miniature.training import Laboratory, Measurement, ObjectiveName, Run

_EVALUATOR_SEED = 900
OBJECTIVES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)


@dataclass(frozen=True)
class SeedPlan:
    """The runs of one base seed.

    Attributes:
        base: Trained on short sequences.
        start: The base model with the RoPE base of fine-tuning.
        family: Models that differ in local quality and range, by name.
        extensions: The family's models of the shortest sequences with other RoPE bases, by name.
        objectives: Runs by objective and data seed.
        windows: LongCE runs by K and d, on the data of the first of those seeds.
    """

    base: Run
    start: Run
    family: dict[str, Run]
    extensions: dict[str, Run]
    objectives: dict[tuple[ObjectiveName, int], Run]
    windows: dict[Windows, Run]

    @property
    def runs(self) -> list[Run]:
        """Return all runs, parents first."""
        groups = (self.family, self.extensions, self.objectives, self.windows)
        return [self.base, self.start, *(run for group in groups for run in group.values())]


@dataclass(frozen=True)
class Plan:
    """The runs of all base seeds and of the evaluator.

    Attributes:
        evaluator: Trained from its own random weights.
        tuning: Runs that decide the learning rates, by objective and rate.
        seeds: Runs by base seed.
    """

    evaluator: Run
    tuning: dict[tuple[ObjectiveName, float], Run]
    seeds: tuple[SeedPlan, ...]

    @property
    def runs(self) -> list[Run]:
        """Return all runs, parents first."""
        assert self.evaluator.parent is not None
        first, *others = (run for seed in self.seeds for run in seed.runs)
        return [self.evaluator.parent, self.evaluator, first, *self.tuning.values(), *others]


@dataclass(frozen=True)
class Results:
    """Everything measured, for the experiments.

    Attributes:
        laboratory: Where the runs are stored.
        plan: The runs.
    """

    laboratory: Laboratory
    plan: Plan

    @property
    def settings(self) -> Miniature:
        """The declared experiments."""
        return self.laboratory.settings

    @property
    def masks(self) -> Masks:
        """Kinds of the tokens of the documents."""
        return self.laboratory.examination.masks

    @property
    def evaluator(self) -> Tokens:
        """Likelihoods of the tokens under the evaluator."""
        return self.laboratory.tokens(self.plan.evaluator)

    def last(self, run: Run) -> Measurement:
        """Return the last measurement of a run."""
        return self.laboratory.measurements(run)[-1]

    def metrics(self, run: Run, step: int | None = None) -> dict[str, float]:
        """Return the `token_metrics` of a model."""
        return token_metrics(self.laboratory.tokens(run, step), self.evaluator, self.masks, self.settings)


def tuning_runs(settings: Miniature) -> dict[tuple[ObjectiveName, float], Run]:
    """Return the runs that decide the learning rates of the objectives, by objective and rate."""
    base, seed = _base(settings, 0), settings.objectives.tuning_seed
    return {
        (objective, rate): _objective(settings, base, 0, seed, objective, rate, tuning=True)
        for objective in OBJECTIVES
        for rate in settings.objectives.learning_rates
    }


def make_plan(settings: Miniature, seeds: int, learning_rates: Mapping[ObjectiveName, float] | None = None) -> Plan:
    """Return the plan.

    Args:
        settings: The declared experiments.
        seeds: Base models that all experiments start from, each with its own random weights.
        learning_rates: Rates of the objectives; by default those of ``fine_tuning``.

    Raises:
        ValueError: If ``seeds`` is below 1.
    """
    if seeds < 1:
        raise ValueError(f"`seeds` is the number of base models and must be 1 or more, got {seeds}.")
    base, training = settings.base, settings.evaluator
    evaluator_base = Run("evaluator/base", _EVALUATOR_SEED, base, base.rope_theta)
    evaluator = Run("evaluator/final", _EVALUATOR_SEED + 1, training, training.rope_theta, evaluator_base)
    rates = learning_rates or dict.fromkeys(OBJECTIVES, settings.fine_tuning.lr)
    return Plan(evaluator, tuning_runs(settings), tuple(_seed_plan(settings, seed, rates) for seed in range(seeds)))


def tuned_accuracies(laboratory: Laboratory, plan: Plan) -> list[dict[str, Any]]:
    """Return the accuracy of each tuning run."""
    return [
        {"objective": objective, "learning rate": rate, "accuracy": laboratory.measurements(run)[-1].accuracy}
        for (objective, rate), run in plan.tuning.items()
    ]


def best_rates(laboratory: Laboratory, plan: Plan) -> dict[ObjectiveName, float]:
    """Return the most accurate learning rate of each objective."""
    found = sorted(tuned_accuracies(laboratory, plan), key=itemgetter("accuracy"))
    return {each["objective"]: each["learning rate"] for each in found}


def _base(settings: Miniature, seed: int) -> Run:
    return Run(f"seed{seed}/base", seed, settings.base, settings.base.rope_theta)


def _seed_plan(settings: Miniature, seed: int, rates: Mapping[ObjectiveName, float]) -> SeedPlan:
    base = _base(settings, seed)
    family = _family(settings, base, seed)
    return SeedPlan(
        base=base,
        start=_extended(base, f"seed{seed}/start", settings.fine_tuning.rope_theta),
        family=family,
        extensions=_extensions(settings, family),
        objectives={
            (objective, rows): _objective(settings, base, seed, rows, objective, rates[objective])
            for rows in settings.objectives.seeds
            for objective in OBJECTIVES
        },
        windows={
            windows: _objective(
                settings, base, seed, settings.objectives.seeds[0], "LongCE", rates["LongCE"], windows=windows
            )
            for windows in settings.windows
        },
    )


def _family(settings: Miniature, base: Run, seed: int) -> dict[str, Run]:
    runs = {}
    for share in settings.family.second_dialect:
        for length in settings.family.lengths:
            training = replace(
                settings.fine_tuning,
                sequence_length=length.sequence_length,
                rope_theta=length.rope_theta,
                batch_size=_rows_per_step(settings, length),
                second_dialect=share,
            )
            name = f"dialect {1 - share:g}, rows {length.sequence_length}"
            path = f"seed{seed}/family/dialect{1 - share:g}-rows{length.sequence_length}"
            runs[name] = Run(path, 100 + seed, training, length.rope_theta, base)
    return runs


def _extensions(settings: Miniature, family: dict[str, Run]) -> dict[str, Run]:
    runs = {}
    for name, run in family.items():
        if run.training is not None and run.training.sequence_length == settings.shortest.sequence_length:
            for theta in settings.family.extensions:
                runs[f"{name}, theta {theta:g}"] = _extended(run, f"{run.name}-theta{theta:g}", theta)
    return runs


def _extended(run: Run, name: str, theta: float) -> Run:
    return Run(name, run.seed, None, theta, run)


def _objective(
    settings: Miniature,
    base: Run,
    seed: int,
    rows_seed: int,
    objective: ObjectiveName,
    rate: float,
    *,
    windows: Windows | None = None,
    tuning: bool = False,
) -> Run:
    objectives = settings.objectives
    last = max(*objectives.steps, *objectives.cross_entropy_steps, 1)
    longer = objectives.cross_entropy_steps if objective == "CE" and not tuning else ()
    steps = (*objectives.steps, *longer)
    training = replace(settings.fine_tuning, steps=max(steps), lr=rate)
    name = f"tuning/{objective}-lr{rate:g}" if tuning else f"seed{seed}/{objective}-rows{rows_seed}"
    if windows is not None:
        name += f"-K{windows.context_length}-d{windows.stride}"
    return Run(
        name,
        200 + 10 * seed + rows_seed,
        training,
        training.rope_theta,
        base,
        objective,
        windows or Windows(settings.context_length, settings.stride),
        measured_at=steps,
        reported_at=max(objectives.steps),
        # The same number of sequences for both objectives, because their order depends on it.
        rows=last * training.batch_size,
    )


def _rows_per_step(settings: Miniature, length: Length) -> int:
    tokens = settings.fine_tuning.batch_size * settings.fine_tuning.sequence_length
    if tokens % length.sequence_length:
        raise ValueError(
            f"Steps of {tokens} tokens are no whole number of rows of {length.sequence_length}: choose lengths of the"
            " family that divide `batch_size * sequence_length` of `fine_tuning`."
        )
    return tokens // length.sequence_length
