"""`longce reproduce TABLE` as a user runs it: tiny models under the real code path."""

import json
import math
import multiprocessing
import operator
import os
import signal

import pytest

from benchmarks.reproduction.tables import measuring as tables_measuring
from benchmarks.reproduction.tables import ours as tables_ours
from benchmarks.reproduction.tables.results import read_results
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.records import summarize
from lightning_modules.scoring.score import score
from lightning_modules.scoring.scored_model import ScoredModel
from lightning_modules.tasks.evaluation.answers import ANSWERS_FILE, read_answers
from lightning_modules.utilities.statistics import score_interval
from longce.cli.main import main
from tests.conftest import make_text, tiny_model
from tests.support.answers import write_evaluation

LENGTHS = {"context_length": 48, "stride": 16}
ALPHA, BETA = 0.5, -6.0  # random models find no key tokens at 2 and -2


@pytest.fixture(autouse=True)
def _thresholds(monkeypatch):
    monkeypatch.setattr(tables_measuring, "THRESHOLDS", ((ALPHA, BETA),))
    monkeypatch.setattr(tables_ours, "DEFAULT", tables_measuring.threshold_name(ALPHA, BETA))


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A test split in which the second and third document are long enough."""
    lines = [json.dumps({"id": f"r{words}", "report": make_text(words, seed=words)}) for words in (10, 60, 70, 80)]
    file = tmp_path_factory.mktemp("reports") / "test.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture(scope="module")
def third_dir(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("third")
    tiny_model("mistral", len(tokenizer), seed=5).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def reproduce(reports, model_dir, tmp_path):
    """Runs the command on two documents of 100 to 150 tokens; returns its exit status."""

    def run(table, *options, output="one", **settings):
        values = {"documents": 2, "min_tokens": 100, "max_tokens": 150, "dtype": "float32", **LENGTHS} | settings
        words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        words += ["--data.path", str(reports), "--data.tokenizer", str(model_dir), "--output", str(tmp_path / output)]
        try:
            main(["reproduce", table, *options, *words])
        except SystemExit as stopped:
            return stopped.code
        return 0

    return run


def table(folder, name="table5"):
    return json.loads((folder / f"{name}.json").read_text())["cells"]


def by_hand(folder, model, evaluator, reports):
    """LongPPL and perplexity of each document by `longce score`."""
    tokenizer = load_tokenizer(str(model))
    files = []
    for line in reports.read_text().splitlines()[1:3]:
        text = encode_document(json.loads(line)["report"], tokenizer, max_tokens=150)["text"][0]
        files.append(folder / f"{len(files)}.txt")
        files[-1].write_text(text)
    return score([str(file) for file in files], str(model), str(evaluator), alpha=ALPHA, beta=BETA, **LENGTHS)


def mean(records, name, weight):
    """Of documents, weighted."""
    weights = [getattr(record.sums, weight) for record in records]
    values = [getattr(record.sums, name) for record in records]
    return sum(map(operator.mul, values, weights)) / sum(weights)


def test_numbers_are_those_of_longce_score(reproduce, tmp_path, model_dir, evaluator_dir, reports, capsys):
    options = ["--models", f"mine={model_dir}", "--evaluators", f"Llama-3.1-8B={evaluator_dir}"]
    assert reproduce("table5", *options) == 0
    assert "| Mixtral-8x7B-32k | 2.08 / | 2.50 / | 1.74 / | 3.67 / |" in capsys.readouterr().out
    assert reproduce("table5-package", *options) == 0
    expected = by_hand(tmp_path, model_dir, evaluator_dir, reports)
    total = summarize(expected)
    assert total.key_tokens > 5
    cells = table(tmp_path / "one")["mine"]
    longppl = mean(expected, "longppl", "key_tokens")
    assert cells["Llama-3.1-8B"]["ours"] == pytest.approx(longppl, rel=1e-6)
    assert cells["PPL"]["ours"] == pytest.approx(mean(expected, "perplexity", "tokens"), rel=1e-6)
    cells = table(tmp_path / "one", "table5-package")["mine"]
    assert cells["Llama-3.1-8B"]["ours"] == pytest.approx(total.longppl, rel=1e-6)
    assert cells["PPL"]["ours"] == pytest.approx(total.perplexity, rel=1e-6)


@pytest.mark.slow
def test_two_machines_a_broken_model_and_a_second_try(
    reproduce, tmp_path, model_dir, third_dir, evaluator_dir, monkeypatch
):
    evaluator = ["--evaluators", f"E={evaluator_dir}"]
    broken = tmp_path / "broken"
    broken.mkdir()
    assert reproduce("table5", "--models", f"broken={broken}", f"M={model_dir}", *evaluator, output="one") == 1
    assert reproduce("table5", "--models", f"N={third_dir}", *evaluator, output="two") == 0
    assert reproduce("table5", "--merge", str(tmp_path / "two"), output="one") == 1
    cells = table(tmp_path / "one")
    assert cells["N"] == table(tmp_path / "two")["N"]
    assert cells["M"]["PPL"]["ours"] > 1
    assert "broken" not in cells
    (failure,) = json.loads((tmp_path / "one" / "table5.json").read_text())["failed"]
    assert failure.startswith(f"broken by E: ValueError: The model '{broken}'")
    for file in third_dir.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    loaded = []
    original = ScoredModel.log_likelihood
    monkeypatch.setattr(
        ScoredModel, "log_likelihood", lambda self, row: (loaded.append(self.name), original(self, row))[1]
    )
    assert reproduce("table5", "--models", f"broken={broken}", f"M={model_dir}", *evaluator, output="one") == 0
    assert set(loaded) == {str(broken)}  # M is not measured again
    assert table(tmp_path / "one")["broken"]["PPL"]["ours"] == cells["N"]["PPL"]["ours"]


def killed_at_the_third_pass(reproduce, options):
    passes = []
    original = ScoredModel.log_likelihood

    def log_likelihood(self, row):
        passes.append(row)
        if len(passes) == 3:  # one model is done, the other in the middle
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, row)

    ScoredModel.log_likelihood = log_likelihood
    reproduce("table5", *options)


def test_after_a_kill_it_goes_on_with_the_next_model(
    reproduce, tmp_path, model_dir, third_dir, evaluator_dir, monkeypatch
):
    options = ["--models", f"M={model_dir}", f"N={third_dir}", "--evaluators", f"E={evaluator_dir}"]
    process = multiprocessing.get_context("fork").Process(target=killed_at_the_third_pass, args=(reproduce, options))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert set(read_results([tmp_path / "one"])) == {("M", "E")}
    scored = []
    original = ScoredModel.log_likelihood
    monkeypatch.setattr(
        ScoredModel, "log_likelihood", lambda self, row: (scored.append(self.name), original(self, row))[1]
    )
    monkeypatch.setattr("lightning_modules.scoring.scored_model.score_text", None)  # what the evaluator said is on disk
    assert reproduce("table5", *options) == 0
    assert scored == [str(third_dir)] * 2
    assert set(read_results([tmp_path / "one"])) == {("M", "E"), ("N", "E")}


def test_training_tables_print_commands_or_scores(reproduce, tmp_path, capsys):
    assert reproduce("table10") == 0
    assert capsys.readouterr().out.count("longce fit") == 2
    (tmp_path / "scores.csv").write_text("model,MMLU\nA-CE-200,41.25\n")
    assert reproduce("table10", "--scores", str(tmp_path / "scores.csv")) == 0
    assert "| +CE (baseline) | 40.8 / 41.2 |" in capsys.readouterr().out


def test_scores_of_evaluate_have_intervals(reproduce, tmp_path, capsys):
    intervals = []
    for name, right in (("A-CE-200", 20), ("A-LongCE-200", 30)):
        answers = {("longeval_lines", 4096): [1] * right + [0] * (50 - right)}
        write_evaluation(tmp_path / name, answers, texts=50, model=name)
        low, high = score_interval([1] * right + [0] * (50 - right), range(50))
        intervals.append((100 * low, 100 * high))
    scores = [str(tmp_path / name) for name in ("A-CE-200", "A-LongCE-200")]
    assert reproduce("table3", "--scores", *scores) == 0
    (low, high), (other_low, other_high) = intervals
    assert f"| 24.0 / 40.0 [{low:.2f}, {high:.2f}] |" in capsys.readouterr().out
    cells = table(tmp_path / "one", "table3")
    assert cells["A (PG-19, EABF): LongCE"]["LongEval 200"]["interval"] == pytest.approx([other_low, other_high])
    gain = cells["A (PG-19, EABF): Gain"]["LongEval 200"]
    assert gain["ours"] == 20.0
    below = math.hypot(60 - other_low, high - 40)
    above = math.hypot(other_high - 60, 40 - low)
    assert gain["interval"] == pytest.approx([20 - below, 20 + above])


@pytest.mark.slow
def test_table_9_is_measured_by_generation_and_teacher_forcing(reproduce, model_dir, evaluator_dir, tmp_path, capsys):
    models = ["--models", f"M={model_dir}", f"broken={tmp_path / 'nothing'}"]
    assert reproduce("table9", *models, max_tokens=2100, documents=5) == 1
    text = capsys.readouterr().out
    assert "Not measured: broken: " in text
    cells = table(tmp_path / "one", "table9")
    found = [vars(answer) for answer in read_answers(tmp_path / "one" / "longeval" / "M" / ANSWERS_FILE)]
    assert len(found) == 5
    nll, tokens = (sum(one[f"answer_{name}"] for one in found) for name in ("nll", "tokens"))
    cell = cells["M: PPL (answer tokens)"]["2k"]
    assert cell["ours"] == pytest.approx(math.exp(nll / tokens))
    assert cell["interval"][0] < cell["ours"] < cell["interval"][1]
    written = read_answers(tmp_path / "one" / "longeval_generated" / "M" / ANSWERS_FILE)
    assert {one.setting.mode for one in written} == {"generate"}
    assert [one.right_answers for one in written] == [one["right_answers"] for one in found]  # the same questions
    for row, scores in (
        ("M: LongEval accuracy (teacher-forced)", [one["score"] for one in found]),
        ("M: LongEval accuracy", [one.score for one in written]),
    ):
        accuracy = cells[row]["2k"]
        assert accuracy["ours"] == 100 * sum(scores) / 5
        assert accuracy["interval"][1] - accuracy["interval"][0] > 30
    assert cells["Yi-6B-200k: LongEval accuracy"]["2k"] == {"paper": 100.0, "ours": None}
    assert reproduce("table9", *models[:2], max_tokens=2100, documents=4) == 0  # of the 5 that have an answer
    cells = table(tmp_path / "one", "table9")
    first = [one for one in found if one["index"] < 4]
    nll, tokens = (sum(one[f"answer_{name}"] for one in first) for name in ("nll", "tokens"))
    assert cells["M: PPL (answer tokens)"]["2k"]["ours"] == pytest.approx(math.exp(nll / tokens))
    assert reproduce("table9", "--merge", str(tmp_path / "one"), output="two") == 0
    assert table(tmp_path / "two", "table9") == cells, "the models that another machine has measured"
    capsys.readouterr()
    assert reproduce("table9", *models[:2], max_tokens=150) == 2
    assert "`max_tokens` = 150 is below the shortest length, 2048" in capsys.readouterr().err


def test_bad_input_is_refused_before_any_model_is_loaded(
    reproduce, tmp_path, model_dir, evaluator_dir, monkeypatch, capsys
):
    one = ["--models", f"M={model_dir}", "--evaluators", f"E={evaluator_dir}"]
    assert reproduce("table5", *one) == 0
    monkeypatch.setattr("lightning_modules.scoring.scored_model.load_scorer", None)
    refusals = [
        ("'table13'", ("table13",), {}),
        ("'Mistrol'", ("table5", "--models", "Mistrol"), {}),
        ("`stride`", ("table5", *one), {"stride": 32}),
        ("the model of 'M'", ("table5", "--models", f"M={evaluator_dir}", *one[2:]), {}),
        ("the evaluator of 'M'", ("table5", *one[:2], "--evaluators", f"E={model_dir}"), {}),
        ("9", ("table5", *one), {"documents": 9}),
        ("nowhere", ("table5", "--merge", str(tmp_path / "nowhere")), {}),
        ("no models to train", ("table5", "--run"), {}),
    ]
    capsys.readouterr()
    for expected, arguments, settings in refusals:
        assert reproduce(*arguments, **settings) == 2, expected
        assert expected in capsys.readouterr().err
