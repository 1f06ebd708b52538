"""``longce evaluate``: long-context tasks for any Hugging Face model."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.checks import check_weight_files
from lightning_modules.models.identity import model_identity
from lightning_modules.models.loading import DType, load_backbone, load_config
from lightning_modules.models.probe import check_scoring
from lightning_modules.models.tokenization.tokenizer import load_tokenizer, tokenizer_hash
from lightning_modules.scoring.score import find_device
from lightning_modules.tasks.evaluation.questions import (
    Depths,
    Key,
    first_of_each,
    make_questions,
    question_keys,
    warn_of_unknown_tokens,
)
from lightning_modules.tasks.evaluation.report import as_text, write_report
from lightning_modules.tasks.evaluation.runs import Mode, check_mode, put_questions
from lightning_modules.tasks.evaluation.store import ResultStore
from lightning_modules.tasks.evaluation.summary import summarise
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.tasks.questions.task import Task
from lightning_modules.utilities.identity import content_hash
from lightning_modules.utilities.locks import exclusive

QUESTIONS_AT_ONCE = 256
TOKENS_AT_ONCE = 2**21
"""Questions whose texts are in memory, and their tokens: the model waits while they are made."""


def evaluate(
    model: str,
    output: str,
    *,
    tasks: Sequence[str] = ("ruler_synthetic",),
    lengths: Sequence[int] = (4096,),
    samples: int = 20,
    depths: Depths = None,
    mode: Mode = "generate",
    haystack: str | None = None,
    squad: str | None = None,
    hotpot: str | None = None,
    nq_open: str | None = None,
    documents: int | None = None,
    seed: int = 0,
    chat_template: bool = False,
    add_special_tokens: bool = True,
    dtype: DType = "auto",
    attn_implementation: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> str:
    """Scores of a model on long-context tasks, by task, length and depth of the answer.

    What was put before to the same model in the same way is not put again: after an interruption, or for more tasks,
    lengths or questions, name the same folder. Several processes (``torchrun``, or RANK and WORLD_SIZE in the
    environment) share the questions of one folder, each with a model of its own.

    Args:
        model: Hub id or local folder.
        output: Folder for the results and for the report.
        tasks: Names of tasks or groups of tasks (``ruler``, ``longeval``, ``lost_in_the_middle``, ..), or import paths
            of tasks of your own.
        lengths: Tokens of prompt and answer together.
        samples: Questions of each task and length, and of each depth if depths are asked for.
        depths: How many evenly spaced depths, or which ones, from 0 (front) to 1 (end), answers stand at; by default
            each task draws them.
        mode: ``generate``: the model writes its answer; ``teacher_forced``: it is given the right one token by token,
            which takes a single pass and gives perplexities, too.
        haystack: Folder of text files to hide needles in; made-up prose by default.
        squad: Local file of SQuAD, for ``qa_1``.
        hotpot: Local file of HotpotQA, for ``qa_2``.
        nq_open: Local file for ``multi_document_qa``, as *Lost in the Middle* publishes them; made-up lives by default.
        documents: Passages of ``multi_document_qa``; by default as many as the length allows.
        seed: Of all that is random in the questions.
        chat_template: Whether the prompt is the user's turn of the tokenizer's chat template.
        add_special_tokens: Whether the tokenizer adds its own where there is no chat template.
        dtype: Of the weights; ``auto`` keeps the stored one.
        attn_implementation: As in transformers; ``auto`` is flash attention where it is installed.
        device: Such as ``cuda:0`` or ``cpu``; ``auto`` is the GPU of this process, if there is one.
        trust_remote_code: Run code from the model's repository; off unless you trust it.

    Returns:
        The scores as a table.

    Raises:
        ValueError: If a task, a file, a model or a number cannot be used, or the folder holds results of other
            settings; before the model is loaded, where that can be known.
    """
    check_mode(mode)
    rank, processes = _process()
    sources = {"haystack": haystack, "squad": squad, "hotpot": hotpot, "nq_open": nq_open}
    found = find_tasks(tasks, **sources, documents=documents)
    keys = question_keys(found, lengths, samples, depths)
    place = find_device(_own_device(device))
    load_config(model, trust_remote_code=trust_remote_code)
    check_weight_files(model)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    prompter = Prompter(tokenizer, chat_template=chat_template, add_special_tokens=add_special_tokens)
    warn_of_unknown_tokens(make_questions(first_of_each(keys), found, prompter, seed), prompter)
    settings = {
        "model": model,
        "identity": model_identity(model, trust_remote_code=trust_remote_code),
        "tokenizer": tokenizer_hash(tokenizer),
        "mode": mode,
        "seed": seed,
        "chat_template": chat_template,
        "add_special_tokens": add_special_tokens,
        "dtype": dtype,
        "documents": documents,
        **{name: None if path is None else _described(Path(path)) for name, path in sources.items()},
    }
    store = ResultStore(Path(output).expanduser(), settings)
    run = _Run(store, found, keys, prompter, mode, seed)
    with exclusive(own := store.path(rank, processes)):
        missing = run.missing(rank, processes)
        if missing:
            loading: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
            backbone = load_backbone(model, device=place, trust_remote_code=trust_remote_code, **loading)
            run.put(_ready(backbone, place), missing, own)
    return run.report(settings)


class _Run:
    """The questions of an evaluation, of which some have results."""

    def __init__(
        self, store: ResultStore, tasks: Sequence[Task], keys: Sequence[Key], prompter: Prompter, mode: Mode, seed: int
    ) -> None:
        self.store, self.tasks, self.keys = store, tasks, keys
        self.prompter, self.mode, self.seed = prompter, mode, seed

    def missing(self, rank: int = 0, processes: int = 1) -> list[Key]:
        """This process's share of all questions, less those that have a result, whoever found it."""
        known = {result.key for result in self.store.read()}
        return [key for key in self.keys[rank::processes] if key not in known]

    def put(self, backbone: Backbone, keys: Sequence[Key], own: Path) -> None:
        """Put questions, and keep each result as soon as it is there."""
        backbone.check_length(max(key.length for key in keys))
        with tqdm(total=len(keys), desc="tasks", unit="question", disable=None) as bar:
            for part in _parts(keys):
                bar.set_postfix_str(f"{part[0].task}, {part[0].length} tokens")
                questions = make_questions(part, self.tasks, self.prompter, self.seed)

                def keep(results: list[Any]) -> None:
                    self.store.append(own, results)
                    bar.update(len(results))

                put_questions(backbone, self.prompter, questions, self.mode, done=keep)

    def report(self, settings: dict[str, Any]) -> str:
        """Write the report of all results that there are, and give their table."""
        known = {result.key: result for result in self.store.read()}
        results = [known[key] for key in self.keys if key in known]
        missing = len(self.keys) - len(results)
        write_report(self.store.folder, results, settings, missing)
        return f"{as_text(summarise(results), missing)}\nReport: {self.store.folder / 'report.html'}"


def _parts(keys: Sequence[Key]) -> Iterator[list[Key]]:
    """Questions of one task and length together, not too many."""
    for _, group in groupby(keys, key=lambda key: (key.task, key.length)):
        cell = list(group)
        size = max(1, min(QUESTIONS_AT_ONCE, TOKENS_AT_ONCE // cell[0].length))
        yield from (cell[first : first + size] for first in range(0, len(cell), size))


def _described(path: Path) -> str:
    """Hash of the texts that the questions are made of: by other texts these would be other questions."""
    files = list(path.glob("*.txt")) if path.is_dir() else None
    return f"sha256:{content_hash(path, files)}"


def _ready(backbone: Backbone, place: torch.device) -> Backbone:
    backbone = backbone.eval().requires_grad_(False).to(place)
    check_scoring(backbone)
    return backbone


def _process() -> tuple[int, int]:
    """Which of how many processes this is, as torchrun and clusters say it."""
    words = [os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))]
    try:
        rank, processes = (int(word) for word in words)
    except ValueError:
        rank, processes = 0, 0
    if not 0 <= rank < processes:
        raise ValueError(f"RANK must be a number from 0 and below WORLD_SIZE, got {words[0]!r} and {words[1]!r}.")
    return rank, processes


def _own_device(device: str) -> str:
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "auto" and local is not None and torch.cuda.is_available() else device
