"""``longce harness``: tasks of lm-evaluation-harness, asked of a model, a result file for each."""

import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from lightning_modules.models.checks import check_weight_files
from lightning_modules.models.identity import model_identity
from lightning_modules.models.loading import DType, load_backbone, load_config
from lightning_modules.models.probe import check_scoring
from lightning_modules.models.tokenization.chat_templates import check_chat_template
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring.score import find_device
from lightning_modules.tasks.harness import Truncation, check_installed
from lightning_modules.tasks.harness.results import Results, write_json
from lightning_modules.utilities.files import writable_folder

log = logging.getLogger(__name__)


def harness(
    model: str,
    tasks: Sequence[str],
    output: str,
    *,
    include_path: str | None = None,
    num_fewshot: NonNegativeInt | None = None,
    limit: PositiveFloat | None = None,
    lengths: Sequence[int] = (4096,),
    max_length: PositiveInt | None = None,
    truncation: Truncation = "middle",
    chat_template: bool = False,
    batch_tokens: PositiveInt = 16_384,
    log_samples: bool = False,
    dtype: DType = "auto",
    attn_implementation: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Ask tasks of lm-evaluation-harness of a model; a task that is done is not asked again.

    Of a task file of one's own that has changed meanwhile, the results are refused. Data and files that it names are
    not looked at: after a change of those, give another folder.

    Args:
        model: Hub id or local folder.
        tasks: Names of tasks or groups of the harness, task files (YAML; they may run code of their folder), and sets:
            ``short`` (MMLU, ARC-C, RACE, BBH, TruthfulQA, CommonsenseQA), ``longbench`` (its 16 English tasks) and
            ``ruler``.
        output: Folder of the results.
        include_path: Folder of further task files, which win over those of the harness.
        num_fewshot: Examples in each prompt, for tasks that take any; by default as each task says.
        limit: Questions to ask of each task, or below 1 their share; all by default.
        lengths: Of RULER's prompts, in tokens; a single one with `limit`.
        max_length: Tokens that the model may read and generate together; by default those of its config.
        truncation: Where prompts that are too long lose tokens: in the ``middle``, as LongBench does, or at the
            ``left``, as the harness does.
        chat_template: Whether prompts are turns of the tokenizer's chat template.
        batch_tokens: Tokens of a pass that scores, padding included.
        log_samples: Keep questions and answers.
        dtype: Of the weights; ``auto`` keeps the stored one.
        attn_implementation: As in transformers; ``auto`` is flash attention where it is installed.
        device: Such as ``cuda:0`` or ``cpu``; ``auto`` is the first GPU, if there is one.
        trust_remote_code: Run code from the model's repository; off unless you trust it.

    Returns:
        ``tasks`` and ``groups`` with their metrics, ``scores`` of sets in percent, ``model`` and ``settings``; as
        ``results.json`` has it.

    Raises:
        ValueError: If the extra `eval` is not installed, a task is unknown or lacks its data, the model or a number
            cannot be used, or results there are of other settings; before the model is loaded, where it can be known.
    """
    check_installed()
    from lightning_modules.tasks.harness.tasks import TaskLoader

    if (limit is not None and not limit > 0) or min(lengths, default=0) < 1:
        raise ValueError(f"`limit` must be above 0 and `lengths` 1 or more, got {limit} and {list(lengths)}.")
    if limit is not None and len(lengths) > 1:
        raise ValueError("`limit` would ask questions of the first of `lengths` only: give one length at a time.")
    folder = writable_folder(Path(output).expanduser(), remedy="Name another one by `--output`.")
    place = find_device(device)
    config = load_config(model, trust_remote_code=trust_remote_code)
    check_weight_files(model)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    if chat_template:
        check_chat_template(tokenizer)
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    settings = {
        "model": model_identity(model, trust_remote_code=trust_remote_code),
        "num_fewshot": num_fewshot,
        "limit": limit,
        "lengths": list(lengths),
        "max_length": max_length or positions,
        "truncation": truncation,
        "chat_template": chat_template,
        "dtype": dtype,
        "lm_eval": version("lm_eval"),
    }
    results = Results(folder, settings)
    loader = TaskLoader(tasks, include_path=include_path, lengths=lengths, tokenizer=model, num_fewshot=num_fewshot)
    files = {name: loader.task_file(name) for name in loader.names}
    pending = {name: loader.load(name) for name in loader.names if results.finished(name, files[name]) is None}
    for name, loaded in pending.items():
        for part in loaded.tasks:
            files[part] = loader.task_file(part) or files[name]
            results.task(part, files[part])  # refuses other settings now
    if pending:
        from lightning_modules.tasks.harness.model import HarnessModel

        loading: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
        backbone = load_backbone(model, device=place, trust_remote_code=trust_remote_code, **loading)
        backbone = backbone.to(place).eval().requires_grad_(False)
        with torch.no_grad():
            check_scoring(backbone)
        asked = HarnessModel(
            backbone,
            tokenizer,
            max_length=max_length,
            truncation=truncation,
            batch_tokens=batch_tokens,
        )
        _carry_out(asked, pending, files, results, limit=limit, chat_template=chat_template, log_samples=log_samples)
    result = _collect(model, tasks, loader.names, results)
    write_json(folder / "results.json", result)
    return result


def _carry_out(
    model: Any, pending: dict[str, Any], files: dict[str, str | None], results: Results, **options: Any
) -> None:
    from lightning_modules.tasks.harness.evaluation import aggregate, evaluate_task

    for number, (name, loaded) in enumerate(pending.items()):
        for part, task in loaded.tasks.items():
            if results.task(part, files[part]) is None:
                log.info("Task %s (%d of %d): %s", name, number + 1, len(pending), part)
                result = evaluate_task(model, part, task, bootstrap_iters=1000, **options)
                results.write_task(part, result, files[part])
        known = {part: results.task(part) or {} for part in loaded.tasks}
        groups = aggregate(loaded.groups, known)
        results.write_finished(name, {"tasks": list(loaded.tasks), "groups": groups}, files[name])


def _collect(model: str, words: Sequence[str], names: Sequence[str], results: Results) -> dict[str, Any]:
    """All that is asked for and known, and the scores of sets."""
    from lightning_modules.tasks.harness.evaluation import scores
    from lightning_modules.tasks.harness.tasks import task_sets

    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for name in names:
        found = results.finished(name) or {"tasks": [], "groups": {}}
        groups |= found["groups"]
        tasks |= {part: results.task(part) for part in found["tasks"]}
    metrics = {**{name: entry["metrics"] for name, entry in tasks.items()}, **groups}
    sets = task_sets(results.settings["lengths"])
    known = {key: value for word in words if word in sets for key, value in scores(sets[word], metrics).items()}
    return {"model": model, "scores": known, "tasks": tasks, "groups": groups, "settings": results.settings}
