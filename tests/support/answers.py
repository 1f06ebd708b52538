"""Answers that no model has given, and results of lm-evaluation-harness."""

import json

from lightning_modules.scoring.records import Source
from lightning_modules.tasks.evaluation.answers import ANSWERS_FILE, Answer, Setting, write_answers


def make_answers(scores, *, texts=20, model="hub/M", numerics=("float32", "sdpa", "none"), step=0, **setting):
    """Answers by task and length, each a list of scores: of so many texts, with the answer at other depths."""
    source = Source(model, f"sha256:{'c' * 64}", "t", *numerics)
    return [
        Answer(
            task,
            length,
            asked_depth=index // texts / 2,
            index=index % texts,
            score=score,
            right_answers=("a",),
            prediction="b",
            prompt_tokens=9,
            model=source,
            setting=Setting(**setting),
            step=step,
        )
        for (task, length), of_cell in scores.items()
        for index, score in enumerate(of_cell)
    ]


def write_evaluation(folder, scores, **about):
    """A folder of `longce evaluate`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_answers(folder / ANSWERS_FILE, make_answers(scores, **about))
    return folder


def write_harness(file, metrics, *, groups=(), model="hub/M", shots=0, **config):
    """A result in the schema of lm-evaluation-harness, of metrics by task and by group."""
    tasks = [name for name in metrics if name not in groups]
    content = {
        "results": metrics,
        "groups": {name: metrics[name] for name in groups if len(metrics[name]) > 1},
        "n-shot": dict.fromkeys(tasks, shots),
        "n-samples": {task: {"original": 9, "effective": 9} for task in tasks},
        "config": {"model": "longce", "model_args": {"pretrained": model}, **config},
        "model_name": model,
    }
    file.write_text(json.dumps(content))
    return str(file)
