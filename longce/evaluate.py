"""``longce evaluate``: evaluate any Hugging Face model on long-context tasks and tasks of lm-evaluation-harness."""

import os
from typing import Any

import torch

from lightning_modules.models.loading.config import is_served
from lightning_modules.models.loading.identity import check_same_model, describe_model, model_identity
from lightning_modules.models.loading.load import check_model, load_scorer
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring.config import tokenizer_name
from lightning_modules.scoring.score import find_device
from lightning_modules.tasks.evaluation.config import EvaluationConfig
from lightning_modules.tasks.evaluation.evaluation import Evaluation
from lightning_modules.tasks.harness import split_tasks
from lightning_modules.utilities.files import writable_folder
from lightning_modules.utilities.locks import exclusive


def evaluate(model: str, output: str, **options: Any) -> str:
    """Evaluate a model on tasks, write a report, and return its tables.

    Answers that are already in the folder are reused: name the same folder to resume after an interruption, or to add
    tasks, lengths or questions. Several processes (``torchrun``, or RANK and WORLD_SIZE in the environment) split the
    questions of one folder, each with its own copy of the model. Arguments are the fields of `EvaluationConfig`.
    """
    config = EvaluationConfig(model, output, **options)
    rank, processes = _read_rank()
    ours, theirs = split_tasks(config.tasks)
    config.check_used(ours, theirs)
    if is_served(model) and (theirs or config.mode == "generate"):
        raise ValueError(
            f"'{model}' is a server, which scores given answers but does not generate its own: set `mode` to"
            " 'teacher_forced' or 'key_tokens' and choose longce's tasks, or name a hub id or a local folder."
        )
    writable_folder(config.output_folder, remedy="Choose another folder with `--output`.")
    device = find_device(_choose_device(config.device))
    loading = config.loading(
        model, revision=config.revision, server=config.server, context_extension=config.context_extension
    )
    tokenizer_path = tokenizer_name(model, config.tokenizer, "`--tokenizer`")
    model_config = check_model(loading)
    own_revision = config.revision if config.tokenizer is None else None
    tokenizer = load_tokenizer(tokenizer_path, revision=own_revision, trust_remote_code=config.trust_remote_code)
    identity = model_identity(loading)
    provenance = describe_model(loading, tokenizer, device=device, identity=identity)
    runs: list[Any] = []
    if ours or not theirs:
        runs.append(Evaluation(config, ours, tokenizer, provenance))
    if theirs:
        from lightning_modules.tasks.harness.evaluation import HarnessEvaluation

        assert model_config is not None, "not a served model"
        positions = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
        runs.append(HarnessEvaluation(config, theirs, tokenizer, provenance, max_length=config.max_length or positions))
    if any(run.missing(rank, processes) for run in runs):
        backbone = load_scorer(loading, device)
        for run in runs:
            run.ask(backbone, rank, processes)
        check_same_model(identity, loading)
    with exclusive(config.output_folder / "report"):  # one by one: the last process reads the results of all
        return "\n\n".join(run.report() for run in runs)


def _read_rank() -> tuple[int, int]:
    """Return the rank and the number of processes that torchrun or a cluster has set."""
    words = [os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))]
    try:
        rank, processes = (int(word) for word in words)
    except ValueError:
        rank = 0
        processes = 0
    if not 0 <= rank < processes:
        raise ValueError(f"RANK must be 0 or more and below WORLD_SIZE, got {words[0]!r} and {words[1]!r}.")
    return rank, processes


def _choose_device(device: str) -> str:
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "auto" and local is not None and torch.cuda.is_available() else device
