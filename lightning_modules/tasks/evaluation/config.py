"""Settings of `longce evaluate`; importable without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from lightning_modules.models.config import DType

Mode = Literal["generate", "teacher_forced"]
"""Whether the model writes its answer, or is given the right one token by token, which takes a single pass."""

Depths = int | Sequence[float] | None
"""Depths of answers: a number of evenly spaced ones, a list of them, or drawn by each task (None)."""

Truncation = Literal["middle", "left"]
"""Where long prompts lose tokens: LongBench keeps both ends, lm-evaluation-harness the last ones."""


_OURS = ("depths", "haystack", "squad", "hotpot", "nq_open", "documents", "seed", "add_special_tokens")
_THEIRS = ("include_path", "num_fewshot", "limit", "max_length", "truncation", "batch_tokens", "log_samples")
"""Options of one kind of tasks alone. `lengths`, `samples` and `mode` are ours too; callbacks have other defaults."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which questions a model is asked, and how: long-context tasks, and tasks of lm-evaluation-harness.

    Args:
        tasks: Names of tasks or groups (``ruler``, ``longeval``, ``lost_in_the_middle``, ..), import paths of your own
            task classes, and for lm-evaluation-harness names of its tasks and groups, task files (YAML; they may run
            code of their folder), and the sets ``short`` (MMLU, ARC-C, RACE, BBH, TruthfulQA, CommonsenseQA) and
            ``longbench`` (its 16 English tasks).
        lengths: Tokens of prompt and answer together.
        samples: Questions per task and length, and per depth if depths are given.
        depths: How many evenly spaced depths of the answers, or which ones, from 0 (front) to 1 (end); by default each
            task draws them.
        mode: ``generate``: the model writes its answer; ``teacher_forced``: it is given the right answer token by
            token, which takes a single pass and gives perplexities as well.
        haystack: Folder of text files to hide needles in; synthetic prose by default.
        squad: Local file of SQuAD, for ``qa_1``.
        hotpot: Local file of HotpotQA, for ``qa_2``.
        nq_open: Local file for ``multi_document_qa``, as *Lost in the Middle* publishes them; synthetic by default.
        documents: Passages of ``multi_document_qa``; by default as many as the length allows.
        seed: Seed of all that is random in the questions.
        chat_template: Whether prompts are turns of the tokenizer's chat template.
        add_special_tokens: Whether the tokenizer adds its special tokens where there is no chat template.
        include_path: Folder of further task files, which win over those of the harness.
        num_fewshot: Examples in each prompt of the harness; by default as each task specifies.
        limit: Questions to ask of each task of the harness, or below 1 their fraction; all by default.
        max_length: Tokens that the model may read and generate in the harness; by default those of its config.
        truncation: Where long prompts of the harness lose tokens: in the ``middle``, as in LongBench, or at the
            ``left``, as in the harness.
        batch_tokens: Tokens of a forward pass that scores continuations, padding included.
        log_samples: Keep questions and answers of the harness.

    Raises:
        ValueError: If there are no tasks or no lengths, or the mode is unknown.
    """

    tasks: Sequence[str] = ("ruler_synthetic",)
    lengths: Sequence[PositiveInt] = (4096,)
    samples: PositiveInt = 20
    depths: Depths = None
    mode: Mode = "generate"
    haystack: str | None = None
    squad: str | None = None
    hotpot: str | None = None
    nq_open: str | None = None
    documents: PositiveInt | None = None
    seed: int = 0
    chat_template: bool = False
    add_special_tokens: bool = True
    include_path: str | None = None
    num_fewshot: NonNegativeInt | None = None
    limit: PositiveFloat | None = None
    max_length: PositiveInt | None = None
    truncation: Truncation = "middle"
    batch_tokens: PositiveInt = 16_384
    log_samples: bool = False

    def __post_init__(self) -> None:
        for name in ("tasks", "lengths"):
            if isinstance(value := getattr(self, name), str) or not value:
                raise ValueError(f"`{name}` must be a list of one or more, got {value!r}.")
        if self.mode not in get_args(Mode):
            raise ValueError(f"`mode` must be one of {', '.join(get_args(Mode))}, got '{self.mode}'.")

    def check_used(self, ours: Sequence[str], theirs: Sequence[str]) -> None:
        """Refuse options that none of the named tasks reads, ours or those of lm-evaluation-harness."""
        defaults = {field.name: field.default for field in fields(self)}
        for tasks, kind, names in (
            (ours, "longce's tasks", _OURS),
            (theirs, "tasks of lm-evaluation-harness", _THEIRS),
        ):
            unused = [f"`{name}`" for name in names if not tasks and getattr(self, name) != defaults[name]]
            if unused:
                raise ValueError(
                    f"{', '.join(unused)}: only {kind} have this option, and `tasks` names {', '.join(self.tasks)}."
                    " Leave it out."
                )


@dataclass(frozen=True)
class EvaluationConfig(TaskConfig):
    """Settings of `longce evaluate`.

    Args:
        model: Hub id or local folder.
        output: Folder for the results and for the report; results there are not measured again.
        dtype: Type of the weights; ``auto`` keeps the stored one.
        attn_implementation: As in transformers; ``auto`` is flash attention where it is installed.
        device: Such as ``cuda:0`` or ``cpu``; ``auto`` is the GPU of this process, if there is one.
        trust_remote_code: Run code from the model's repository; off unless you trust it.
    """

    model: str
    output: str
    dtype: DType = "auto"
    attn_implementation: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    @property
    def output_folder(self) -> Path:
        """Folder for the results, with the home folder written out."""
        return Path(self.output).expanduser()
