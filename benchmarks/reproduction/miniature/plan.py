"""All runs of a reproduction, in the order in which they can be made, and what was measured of them."""

from dataclasses import dataclass, replace

from benchmarks.reproduction.miniature.measure import Masks, Tokens, token_metrics
from benchmarks.reproduction.miniature.settings import Length, Miniature, Windows
from benchmarks.reproduction.miniature.training import Laboratory, Measurement, ObjectiveName, Run

_EVALUATOR_SEED = 900


@dataclass(frozen=True)
class SeedPlan:
    """The runs of one base seed.

    Attributes:
        base: Trained on short rows.
        start: The base under the RoPE base of fine-tuning.
        family: By name; differ in local quality and range.
        extensions: By name; the family's models of the shortest rows under other RoPE bases.
        objectives: By objective and seed of the rows.
        windows: LongCE by its K and d, on the rows of the first of those seeds.
    """

    base: Run
    start: Run
    family: dict[str, Run]
    extensions: dict[str, Run]
    objectives: dict[tuple[ObjectiveName, int], Run]
    windows: dict[Windows, Run]

    @property
    def runs(self) -> list[Run]:
        """All, parents first."""
        groups = (self.family, self.extensions, self.objectives, self.windows)
        return [self.base, self.start, *(run for group in groups for run in group.values())]


@dataclass(frozen=True)
class Plan:
    """The runs of all base seeds, and of the evaluator that judges them.

    Attributes:
        evaluator: It began with random weights of its own.
        seeds: By base seed.
    """

    evaluator: Run
    seeds: tuple[SeedPlan, ...]

    @property
    def runs(self) -> list[Run]:
        """All, parents first."""
        assert self.evaluator.parent is not None
        return [self.evaluator.parent, self.evaluator, *(run for seed in self.seeds for run in seed.runs)]


@dataclass(frozen=True)
class Results:
    """Everything measured, as the experiments look it up.

    Attributes:
        laboratory: Where the runs are.
        plan: Which there are.
    """

    laboratory: Laboratory
    plan: Plan

    @property
    def settings(self) -> Miniature:
        """The declared experiments."""
        return self.laboratory.settings

    @property
    def masks(self) -> Masks:
        """What each token of the documents is."""
        return self.laboratory.examination.masks

    @property
    def evaluate(self) -> Tokens:
        """The evaluator's likelihoods."""
        return self.laboratory.tokens(self.plan.evaluator)

    def last(self, run: Run) -> Measurement:
        """What was found of the finished model."""
        return self.laboratory.measurements(run)[-1]

    def metrics(self, run: Run, step: int | None = None) -> dict[str, float]:
        """`token_metrics` of a model."""
        return token_metrics(self.laboratory.tokens(run, step), self.judge, self.masks, self.settings)


def make_plan(settings: Miniature, seeds: int) -> Plan:
    """What is to be made.

    Args:
        settings: The declared experiments.
        seeds: Base models, each of random weights of its own, which all experiments begin with.

    Raises:
        ValueError: If there is no base seed.
    """
    if seeds < 1:
        raise ValueError(f"`seeds` is the number of base models and must be 1 or more, got {seeds}.")
    base, training = settings.base, settings.evaluator
    judge = Run("evaluator/base", _EVALUATOR_SEED, base, base.rope_theta)
    evaluator = Run("evaluator/final", _EVALUATOR_SEED + 1, training, training.rope_theta, judge)
    return Plan(evaluator, tuple(_seed_plan(settings, seed) for seed in range(seeds)))


def _seed_plan(settings: Miniature, seed: int) -> SeedPlan:
    base = Run(f"seed{seed}/base", seed, settings.base, settings.base.rope_theta)
    family = _family(settings, base, seed)
    return SeedPlan(
        base=base,
        start=_extended(base, f"seed{seed}/start", settings.fine_tuning.rope_theta),
        family=family,
        extensions=_extensions(settings, family),
        objectives={
            (objective, rows): _objective(settings, base, seed, rows, objective)
            for rows in settings.objectives.seeds
            for objective in ("CE", "LongCE")
        },
        windows={
            windows: _objective(settings, base, seed, settings.objectives.seeds[0], "LongCE", windows)
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
    settings: Miniature, base: Run, seed: int, rows_seed: int, objective: ObjectiveName, windows: Windows | None = None
) -> Run:
    objectives = settings.objectives
    last = max(*objectives.steps, *objectives.cross_entropy_steps, 1)
    steps = objectives.steps if objective == "LongCE" else (*objectives.steps, *objectives.cross_entropy_steps)
    training = replace(settings.fine_tuning, steps=max(steps))
    name = f"seed{seed}/{objective}-rows{rows_seed}"
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
        # Of as many rows for both objectives: the order in which they come depends on how many there are.
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
