"""Our results are read by lm-evaluation-harness's own functions, and have the fields of its own files."""

import json
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import (
    get_file_task_name,
    get_latest_filename,
    get_results_filenames,
    get_sample_results_filenames,
)
from transformers import AutoModelForCausalLM

from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from longce.cli.main import main
from longce.evaluate import evaluate

NAMES = ["both", "answer", "rolling"]


def read_latest(folder):
    names = get_results_filenames([str(path) for path in folder.iterdir()])
    with open(get_latest_filename(names)) as file:
        return json.load(file)


@pytest.mark.slow
def test_files_have_the_fields_of_the_harness(model_dir, task_dir, tmp_path):
    options = {"include_path": str(task_dir), "limit": 5, "log_samples": True, "dtype": "float32"}
    evaluate(str(model_dir), str(tmp_path / "ours"), tasks=NAMES, **options)
    tokenizer = load_tokenizer(str(model_dir))
    tokenizer.add_special_tokens({"pad_token": "</s>"})
    lm = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(model_dir), tokenizer=tokenizer, max_length=4096)
    manager = TaskManager(include_path=str(task_dir), include_defaults=False)
    tracker = EvaluationTracker(output_path=str(tmp_path / "theirs"))
    tracker.general_config_tracker.log_experiment_args("hf", f"pretrained={model_dir}", None, None, False)
    result = simple_evaluate(lm, tasks=NAMES, task_manager=manager, limit=5)
    samples = result.pop("samples")
    tracker.save_results_aggregated(result, samples)
    for name, of_task in samples.items():
        tracker.save_results_samples(name, of_task)
    (folder,) = (tmp_path / "theirs").iterdir()
    ours, theirs = read_latest(tmp_path / "ours"), read_latest(folder)
    for name in ("results", "groups", "configs", "versions", "n-shot", "higher_is_better", "n-samples"):
        assert ours[name].keys() <= theirs[name].keys(), name
    assert theirs["results"].keys() == ours["results"].keys()
    assert theirs["n-samples"] == ours["n-samples"]
    assert theirs["group_subtasks"] == ours["group_subtasks"]
    assert theirs["results"]["choice"].keys() == ours["results"]["choice"].keys()
    files = get_sample_results_filenames([str(path) for path in (tmp_path / "ours").iterdir()])
    assert {get_file_task_name(file.rpartition("/")[2]) for file in files} == {"choice", "letter", "answer", "rolling"}
    for file in files:
        name = get_file_task_name(file.rpartition("/")[2])
        (other,) = folder.glob(f"samples_{name}_*.jsonl")
        mine, their = (json.loads(path.read_text().splitlines()[0]) for path in (Path(file), other))
        assert mine.keys() == their.keys()
        assert mine["arguments"] == their["arguments"]
        assert [type(value) for value in mine["resps"][0]] == [type(value) for value in their["resps"][0]]


def test_options_have_the_names_of_the_harness(model_dir, task_dir, tmp_path):
    tokenizer = load_tokenizer(str(model_dir))
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role[0] }} {{ m.content }}]{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(tmp_path / "model")
    words = ["evaluate", "--model", tmp_path / "model", "--include_path", task_dir, "--limit", 2, "--log_samples"]
    words += ["--apply_chat_template", "--system_instruction", "Be brief.", "--num_fewshot", 2, "--tasks", "answer"]
    words += ["--gen_kwargs", "temperature=0.9,top_k=20,seed=3,max_gen_toks=5", "--output"]

    def ask(folder, *more):
        main([*map(str, [*words, tmp_path / folder]), *more])
        return next((tmp_path / folder).glob("samples_answer_*.jsonl"))

    file = ask("turns")
    assert ask("turns", "--fewshot_as_multiturn", "true") == file  # the default: not asked again
    turns, single = (
        json.loads(path.read_text().splitlines()[0])["arguments"]["gen_args_0"]
        for path in (file, ask("single", "--fewshot_as_multiturn", "false"))
    )
    assert turns["arg_0"].startswith("[s Be brief.")
    assert turns["arg_0"].count("[u ") == 3
    assert single["arg_0"].count("[u ") == 1
    found = read_latest(tmp_path / "turns")
    assert found["system_instruction"] == "Be brief."
    assert found["fewshot_as_multiturn"]
    given = {"temperature": 0.9, "top_k": 20, "seed": 3, "max_gen_toks": 5, "do_sample": True}
    assert found["config"]["gen_kwargs"] == given
    assert turns["arg_1"] == {"until": ["a", "."], **given}  # in place of the task's `do_sample: false`
    assert found["chat_template"] == tokenizer.chat_template
