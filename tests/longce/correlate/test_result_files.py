import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reproduction.tables.scores import benchmarks, read_scores
from lightning_modules.scoring.records import write_records
from lightning_modules.tasks.evaluation.answers import ANSWERS_FILE, Setting, write_answers
from lightning_modules.tasks.harness.results import SETS
from lightning_modules.tasks.questions.registry import GROUPS
from longce.correlate.joining import join
from longce.correlate.result_files import is_perplexity, read_results
from tests.support.answers import make_answers, write_evaluation, write_harness
from tests.support.records import EVALUATOR, MODEL, make_record


def numbers(entry):
    return {name: value.number for name, value in entry.values.items()}


def main_names(entry):
    return [name for name, value in entry.values.items() if value.is_main]


@pytest.mark.parametrize(
    "name", ["ppl", "longppl_soft", "LongPPL [evaluator=a]", "word_perplexity", "key_bits_per_byte"]
)
def test_a_perplexity_is_known_by_its_name(name):
    assert is_perplexity(name)


@pytest.mark.parametrize("name", ["applied_math", "Apple", "LongBench"])
def test_a_score_is_not_a_perplexity(name):
    assert not is_perplexity(name)


@pytest.fixture
def evaluation(tmp_path):
    """Of RULER's tasks at two lengths, the first one better than the others, and of LongEval at one."""
    scores = {(task, length): [mean] for task in GROUPS["ruler"] for length, mean in ((4096, 0.8), (8192, 0.4))}
    scores[GROUPS["ruler"][0], 4096] = scores[GROUPS["ruler"][0], 8192] = [1.0]
    scores["longeval_lines", 4096] = [0.3]
    answers = [
        replace(answer, answer_nll=math.log(2.5), answer_tokens=1, other_nll=math.inf, other_tokens=1)
        for answer in make_answers(scores, model="org/M", mode="generate", seed=3)
    ]
    write_answers(tmp_path / "evaluation.parquet", answers)
    return str(tmp_path / "evaluation.parquet")


@pytest.fixture
def harness_result(tmp_path):
    """LongBench, with a standard error, a metric that is filtered, a group, and the harness's word for no value."""
    metrics = {name: {"alias": name, "score,none": 0.25, "score_stderr,none": 0.1} for name in SETS["longbench"].tasks}
    metrics["longbench_qasper"] |= {"score,none": 0.5, "em,strict": 0.5, "em_stderr,strict": "N/A"}
    metrics["all"] = {"acc,none": 0.5}
    file = tmp_path / "results_2026-11-28.json"
    return write_harness(file, metrics, groups=["all"], model="org/M", tasks=["longbench"], num_fewshot=0, limit=5)


def test_records_of_score(tmp_path):
    """Several models in one file; perplexity does not depend on the evaluator."""
    file = tmp_path / "scores.parquet"
    models = [MODEL, MODEL._replace(name="hub/N", identity="sha256:n")]
    records = [make_record("a.txt", 2.0, 3.5, key_tokens=count, model=models[0]) for count in (5, 0)]
    write_records(file, [*records, make_record("a.txt", 2.0, 5.0, key_tokens=0, model=models[1])])
    entry, other = read_results([str(file)])
    assert (entry.model, other.model) == ("hub/M", "hub/N")
    assert (entry.provenance, entry.numerics) == (MODEL.provenance, MODEL.numerics)
    assert (entry.values["longppl"].number, entry.values["perplexity"].number) == pytest.approx((2.0, 3.5))
    assert math.isnan(other.values["longppl"].number)
    assert entry.values["longppl"].settings["evaluator"] == "hub/E"
    assert "evaluator" not in entry.values["perplexity"].settings
    assert "longppl_soft" not in entry.values, "its sums are unknown"
    sums = records[0].sums._replace(soft_weight=2.0, soft_nll=2 * math.log(7))
    soft = [each._replace(sums=sums) for each in records]
    write_records(file, soft)
    (weighted,) = read_results([str(file)])
    assert weighted.values["longppl_soft"].number == pytest.approx(7)
    assert entry.values["longppl"].settings.keys() - weighted.values["longppl_soft"].settings.keys() == {
        "alpha",
        "beta",
        "key_token_rule",
    }
    write_records(file, records)
    (renamed,) = read_results([f"other={file}"])
    assert renamed.model == "other"


def test_an_evaluator_may_be_given_by_several_paths(tmp_path):
    for number, name in enumerate(["models/E", "./models/E", "other/E"]):
        identity = EVALUATOR.identity if name != "other/E" else "sha256:e"
        evaluator = EVALUATOR._replace(name=name, identity=identity)
        model = MODEL._replace(name=f"m{number}", identity=f"sha256:{number}")
        record = make_record("a.txt", 2.0, 3.5, model=model, evaluator=evaluator)
        write_records(tmp_path / f"{number}.parquet", [record])
    files = [str(tmp_path / f"{number}.parquet") for number in range(3)]
    assert "longppl" in join(read_results(files[:2])).names("metrics")
    metrics = join(read_results(files)).names("metrics")
    assert {"longppl [evaluator=models/E]", "longppl [evaluator=other/E]"} <= set(metrics)
    assert "longppl" not in metrics


def test_results_of_evaluate(evaluation):
    (entry,) = read_results([evaluation])
    assert entry.model == "org/M"
    assert entry.values["RULER"].number == pytest.approx((100 + 12 * 60) / 13)
    assert entry.values["LongEval"].number == entry.values["LongEval 4k"].number == 30.0
    assert entry.values["vt"].number == 60.0
    assert entry.values["vt 8192"].number == 40.0
    assert entry.values["average"].number == pytest.approx((100 + 12 * 80 + 30) / 14)
    assert entry.values["answer_perplexity"].number == pytest.approx(2.5)
    assert "other_perplexity" not in entry.values, "infinite"
    assert set(main_names(entry)) == {"RULER", "LongEval"}
    told = {"by": "evaluate", **Setting("generate", seed=3)._asdict()}
    told |= {"dtype": "float32", "precision": "none", "attention": "sdpa"}
    assert entry.values["RULER"].settings == entry.values["vt"].settings == told | {"lengths": [4096, 8192]}
    assert entry.values["LongEval"].settings == told | {"lengths": [4096]}
    assert entry.values["vt 4096"].settings == told


def test_folders_of_several_models_are_read(tmp_path):
    for name in ("a", "b"):
        write_evaluation(tmp_path / "runs" / name, {("vt", 64): [1.0]}, model=name)
    assert [entry.model for entry in read_results([str(tmp_path / "runs")])] == ["a", "b"]


def test_answers_of_several_steps_are_entries_and_unanswered_questions_are_refused(tmp_path):
    answers = [
        *make_answers({("vt", 64): [1.0]}, model="", step=1),
        *make_answers({("vt", 64): [0.0]}, model="", step=2),
    ]
    write_answers(tmp_path / "a.parquet", answers)
    with pytest.raises(ValueError, match="does not name its model"):
        read_results([str(tmp_path / "a.parquet")])
    assert [entry.values["vt"].number for entry in read_results([f"run={tmp_path / 'a.parquet'}"])] == [100.0, 0.0]
    write_answers(tmp_path / "a.parquet", make_answers({("vt", 64): [1.0, math.nan]}))
    with pytest.raises(ValueError, match=r"1 questions in '.*a.parquet' have no answer"):
        read_results([str(tmp_path / "a.parquet")])


def test_results_of_the_harness(harness_result):
    (entry,) = read_results([harness_result])
    values = numbers(entry)
    assert (values["Single-Document QA"], values["LongBench"]) == pytest.approx((100 / 3, 25 + 100 / 72))
    assert (values["longbench_qasper/score"], values["longbench_qasper/em,strict"], values["all/acc"]) == (0.5,) * 3
    assert not [name for name in values if "stderr" in name]
    assert main_names(entry) == list(SETS["longbench"].scores)
    assert entry.values["LongBench"].settings == {"by": "harness", "num_fewshot": 0, "limit": 5}


def test_results_of_the_harness_without_sets_have_those_that_are_complete(tmp_path):
    """As of its own command."""
    metrics = {"race": {"acc,none": 0.5}, "arc_challenge": {"acc_norm,none": 0.25}}
    (entry,) = read_results([write_harness(tmp_path / "results_1.json", metrics, model="M")])
    assert numbers(entry) == {"race/acc": 0.5, "arc_challenge/acc_norm": 0.25, "RACE": 50.0}
    (ours,) = read_results([write_harness(tmp_path / "results_1.json", metrics, tasks=["race", "arc_challenge"])])
    assert "RACE" not in ours.values, "it was not asked for"
    assert entry.provenance is None
    assert main_names(entry) == list(entry.values), "no task hides another one"
    metrics["plain"] = {"alias": "a group without numbers"}
    file = write_harness(tmp_path / "results_3.json", metrics, groups=["plain"], model="M", shots=3)
    (other,) = read_results([file])
    assert numbers(other) == numbers(entry)
    shots = [each.values["race/acc"].settings["num_fewshot"] for each in (other, entry)]
    assert shots == [3, 0]


def test_tables_read_them_too(evaluation, harness_result, tmp_path):
    (entry,) = read_results([harness_result])
    in_sets = {name: number for name, number in numbers(entry).items() if name in benchmarks()}
    assert {"LongBench", "Summarization"} <= in_sets.keys()
    expected = dict(in_sets)
    expected |= {"RULER": pytest.approx(820 / 13), "LongEval": 30.0, "LongEval 4k": 30.0}
    assert read_scores([evaluation, harness_result]) == {"org/M": expected}
    assert read_scores([f"A-CE-50={harness_result}"]) == {"A-CE-50": in_sets}
    run = tmp_path / "B-CE-100"
    run.mkdir()
    content = json.loads(Path(harness_result).read_text())
    Path(harness_result).write_text(json.dumps(content | {"model_name": str(run)}))
    assert set(read_scores([harness_result])) == {"B-CE-100"}
    (tmp_path / "evaluation.parquet").rename(tmp_path / ANSWERS_FILE)
    with pytest.raises(ValueError, match="has 2 models: rename them in the file instead of by 'A='"):
        read_scores([f"A={tmp_path}"])


def test_the_table_of_the_documentation_serves_both_commands(tmp_path):
    (tmp_path / "more.csv").write_text("model,longppl,perplexity,RULER\nQwen/Qwen2-7B,4.1,6.5,80.5\nM,5,,\n")
    first, second = read_results([str(tmp_path)])  # of a folder all files
    assert numbers(first) == {"longppl": 4.1, "perplexity": 6.5, "RULER": 80.5}
    assert numbers(second) == {"longppl": 5.0}
    assert read_scores([str(tmp_path / "more.csv")]) == {"Qwen2-7B-128k": {"RULER": 80.5}}


def test_a_folder_of_an_evaluation_is_read_for_its_results_alone(evaluation, harness_result, tmp_path):
    (tmp_path / "questions.json").write_text("[]")
    (tmp_path / "evaluation.parquet").rename(tmp_path / ANSWERS_FILE)
    ours, theirs = read_results([f"A={tmp_path}"])
    assert (ours.model, theirs.model) == ("A", "A")
    assert "vt" in ours.values
    assert "LongBench" in theirs.values


BAD_FILES = [
    ("a.txt", "", "a.txt"),
    ("a.json", "[]", "a.json"),
    ("a.json", "{", "a.json"),
    ("a.json", '{"m": {"RULER": 3}}', "a key is missing"),
    ("a.json", '{"results": {"vt": 3}, "n-shot": {}, "n-samples": {}}', "a.json"),
    ("a.parquet", "", "a.parquet"),
    ("a.csv", "name\n", "'model'"),
    ("a.csv", "model,x\n", "a.csv"),
    ("a.csv", "model,x,x\na,1,2\n", "no column twice"),
    ("a.csv", "model,x\na,1,7\n", "a.csv:2"),
    ("a.csv", "model,x\na,y\n", "'x' must be a number"),
    ("a.csv", "model,x\na,1\n ,2\n", "a.csv:3"),
]


@pytest.mark.parametrize(("name", "content", "named"), BAD_FILES)
def test_bad_files_are_refused(tmp_path, monkeypatch, name, content, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(named)):
        read_results([name])


def test_scores_of_evaluate_keep_their_intervals(tmp_path):
    tasks = [*GROUPS["ruler"], "longeval_lines"]
    scores = {
        (task, length): [1] * right + [0] * (20 - right) for task in tasks for length, right in ((4096, 10), (8192, 6))
    }
    (entry,) = read_results([str(write_evaluation(tmp_path, scores))])
    values = numbers(entry)
    intervals = {name: value.interval for name, value in entry.values.items()}
    assert (values["vt 4096"], values["vt 8192"]) == (50.0, 30.0)
    ends = [[abs(end - values[name]) for end in intervals[name]] for name in ("vt 4096", "vt 8192")]
    assert min(map(min, ends)) > 10
    assert intervals["LongEval 8k"] == intervals["vt 8192"]
    below, above = (math.hypot(*sides) / 2 for sides in zip(*ends, strict=True))
    assert intervals["LongEval"] == pytest.approx((40 - below, 40 + above))
    assert intervals["RULER"] == pytest.approx((40 - below / math.sqrt(13), 40 + above / math.sqrt(13)))
