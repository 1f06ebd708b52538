"""Results in the files and the schema of lm-evaluation-harness, so that its tools and leaderboards read them."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_modules.tasks.evaluation.config import EvaluationConfig
from lightning_modules.tasks.evaluation.summary import Summary
from lightning_modules.utilities.files import write_json
from lightning_modules.utilities.identity import package_version

SOURCE = "longce"

Parts = Mapping[str, Mapping[str, Any]]
"""Tables of the schema, such as ``results`` and ``configs``, each by task."""


def write_results(
    config: EvaluationConfig, runs: Sequence[Parts], *, chat_template: str | None, seconds: float
) -> Path:
    """Write ``results_TIME.json``, in place of the file of an earlier call, and return its path."""
    merged: dict[str, Any] = {}
    for run in runs:
        for name, by_task in run.items():
            merged.setdefault(name, {}).update(by_task)
    template = chat_template if config.chat_template else None
    arguments = {"pretrained": config.model, "dtype": config.dtype}
    about = {
        "config": {"model": SOURCE, "model_args": arguments, "limit": config.limit, "gen_kwargs": config.generation},
        "date": datetime.now().timestamp(),
        "transformers_version": package_version("transformers"),
        # The harness is an optional extra.
        **({"lm_eval_version": package_version("lm_eval")} if find_spec("lm_eval") else {}),
        "max_length": config.max_length,
        "model_source": SOURCE,
        "model_name": config.model,
        "model_name_sanitized": sanitize_name(config.model),
        "system_instruction": config.system_instruction,
        "system_instruction_sha": _hash_text(config.system_instruction),
        "fewshot_as_multiturn": config.as_multiturn,
        "chat_template": template,
        "chat_template_sha": _hash_text(template),
        "total_evaluation_time_seconds": str(seconds),
    }
    path = _find_earlier(config.output_folder) or config.output_folder / f"results_{date_id()}.json"
    write_json(path, {**merged, **about})
    return path


def convert_summary(summary: Summary, settings: Mapping[str, Any]) -> Parts:
    """Return longce's scores in the schema: a metric from 0 to 1 for each length, as in the harness's RULER."""
    parts: dict[str, dict[str, Any]] = {name: {} for name in ("results", "configs", "versions", "n-shot", "n-samples")}
    parts |= {"higher_is_better": {}, "group_subtasks": {}}
    for (task, length), score in summary.scores.items():
        entry = parts["results"].setdefault(task, {"name": task, "alias": task, "sample_len": 0})
        entry[f"{length},none"] = score.mean / 100
        entry["sample_len"] += score.questions
        parts["higher_is_better"].setdefault(task, {})[str(length)] = True
    for task, entry in parts["results"].items():
        parts["configs"][task] = {"task": task, "metadata": dict(settings)}
        parts["versions"][task] = package_version("longce")
        parts["n-shot"][task] = 0
        parts["n-samples"][task] = dict.fromkeys(("original", "effective"), entry["sample_len"])
    return parts


def sanitize_name(name: str) -> str:
    """Return a model's name as the harness names folders."""
    return re.sub(r"[\"<>:/|\\?*\[\]]+", "__", name)


def _find_earlier(folder: Path) -> Path | None:
    for path in sorted(folder.glob("results_*.json"), reverse=True):
        with suppress(ValueError, AttributeError):
            if json.loads(path.read_bytes()).get("model_source") == SOURCE:
                return path
    return None


def date_id() -> str:
    """Return the time as the harness writes it in names of files."""
    return datetime.now().isoformat().replace(":", "-")


def _hash_text(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()
