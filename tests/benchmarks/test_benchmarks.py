"""The benchmarks run: at sizes that say nothing about speed."""

import importlib.util
import logging
import random
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from benchmarks import book_weights, token_weights
from datamodules.packing.sequences import collate_examples
from lightning_modules.batch import IGNORE_INDEX
from tests.conftest import make_text

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch, capsys):
    def run(name, *options):
        is_package = (FOLDER / name).is_dir()
        file = FOLDER / name / "__main__.py" if is_package else FOLDER / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        spec.loader.exec_module(module)
        if name == "against_authors":
            monkeypatch.setitem(module.SHAPES, "S", {**module.SHAPES["S"], "hidden_size": 64, "num_hidden_layers": 1})
        module.main()
        return [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]

    # Benchmarks quiet the loggers of their process; here other tests have that process.
    names = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")
    levels = {name: logging.getLogger(name).level for name in names}
    verbosity = transformers.logging.get_verbosity()
    yield run
    logging.disable(logging.NOTSET)
    transformers.logging.set_verbosity(verbosity)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
def test_against_the_authors(run):
    sizes = ("--lengths", 96, 160, "--vocabularies", 200, "--context_length", 32, "--stride", 16, "--rounds", 1)
    table = run("against_authors", *sizes, "--floor")
    rows = [line for line in table if line[0].startswith("S V=200") and len(line) > 1]
    assert len(rows) == 2 * 6
    for row in rows:
        if row[1].startswith("score"):
            agreement, keys = row[-1].rsplit(", key tokens ", 1)
            assert float(agreement.rpartition(" ")[2]) < 1e-5
            theirs, ours = map(int, keys.split(" / "))
            assert theirs == ours > 3
        elif ": our " not in row[1]:
            assert float(row[-1].rpartition(" ")[2]) < 1e-5
    assert any("memory ~ n^" in line[0] for line in table)
    assert sum("floor" in line[0] and "measured" in line[0] for line in table) == 2 * 4


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("other", [False, True])
def test_against_the_authors_with_a_real_model(run, model_dir, evaluator_dir, tmp_path, other):
    (tmp_path / "text.txt").write_text(make_text(80))
    files = ("--model", model_dir, "--text", tmp_path / "text.txt", *(("--evaluator", evaluator_dir) if other else ()))
    sizes = ("--lengths", 100, "--context_length", 32, "--stride", 16, "--rounds", 1, "--alpha", 0.05, "--beta", -20)
    table = run("against_authors", *files, *sizes, "--sides", "baseline", "ours", "--floor")
    scored, alone, step = (line for line in table if line[0].startswith("model0 V=") and len(line) > 1)
    for row in (scored, alone):
        agreement, keys = row[-1].rsplit(", key tokens ", 1)
        assert float(agreement.rpartition(" ")[2]) < 1e-5
        theirs, ours = map(int, keys.split(" / "))
        assert theirs == ours > 3
    assert float(step[-1].rpartition(" ")[2]) < 1e-5
    assert sum("floor" in line[0] and "measured" in line[0] for line in table) == 3
    with pytest.raises(SystemExit, match="fewer than 5000"):
        run("against_authors", *files, "--lengths", 5000)


def test_corpus_against_the_authors_loop(run):
    sizes = ("--lengths", 20, 80, "--vocabulary", 200, "--width", 32, "--layers", 1, "--batch_tokens", 256)
    windows = ("--context_length", 16, "--stride", 8)
    table = run("corpus", "--documents", 4, "--rounds", 1, *sizes, *windows)
    rows = [line for line in table if line[0].startswith(("authors", "longce predict"))]
    assert len(rows) == 3
    assert all(float(row[2]) > 0 and float(row[3]) < 1e-5 for row in rows)


def test_cheaper_weights_of_a_model(run, model_dir, evaluator_dir, tmp_path):
    (tmp_path / "text.txt").write_text(make_text(80))
    thresholds = ("--alpha", 0.3, "--beta", -6.0, "--context_length", 32, "--stride", 8, "--draws", 3)
    files = ("--model", model_dir, "--evaluator", evaluator_dir, "--files", tmp_path / "text.txt")
    table = {line[0]: line for line in run("cheaper_weights", *files, *thresholds)}
    assert float(table["short_dtype: bfloat16"][1]) > 0.99
    assert float(table["stride = context_length = 32"][1]) > 0.5
    assert float(table["cross entropy"][1]) < float(table["short_dtype: bfloat16"][1])
    assert any("weights stored by evaluator" in name for name in table)


@pytest.mark.slow
def test_extended_contexts(run):
    options = ("--seeds", 1, "--base_steps", 2, "--steps", 2, "--questions", 3, "--methods", "none", "eabf")
    rows = [line for line in run("extended_contexts", *options) if line[0] in ("none", "eabf")]
    assert [row[0] for row in rows] == ["none", "eabf"] * 2
    for row in rows:
        shares = [float(cell.split()[0]) for cell in row[1:]]
        assert len(shares) == 4
        assert all(0 <= share <= 1 for share in shares)


@pytest.mark.slow
def test_data_pipeline(run, model_dir, tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(make_text(300, seed=number))
    sizes = ("--sequence_length", 64, "--processes", 1, "--rounds", 1, "--workers", 0, "--read_seconds", 0.05)
    files = ("--texts", tmp_path, "--tokenizer", model_dir)
    table = {line[0]: line for line in run("data_pipeline", *files, *sizes, "--synthetic_gb", 0.0002)}
    assert float(table["datasets / ours"][1]) > 0
    assert float(table["0 workers"][2]) == pytest.approx(4 * float(table["0 workers"][3]), abs=3)
    assert float(table["0.0002 GB"][1]) > 50


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_soak(run):
    table = run("soak", "--minutes", 0.6, "--steps", 4, "--every", 0.5)
    minutes = [line for line in table if line[0].isdigit()]
    assert len(minutes) == 1
    _, _, memory, files, threads, _ = map(int, minutes[0])
    assert min(memory, files, threads) > 0
    assert "Too short to say anything." in table[-1]


def test_rules_of_token_weights():
    batch = collate_examples([{"input_ids": [5, 6, *range(10, 80), 5, 6], "position_ids": range(74)}] * 2)
    weights = token_weights.lexical_weights(batch, None, 64)
    assert weights.eq(5).nonzero().tolist() == [[0, 73], [1, 73]], "6 after 5, as 72 tokens before"

    batch = collate_examples([{"input_ids": list(range(300)), "position_ids": [*range(200), *range(100)]}])
    extra = token_weights.exposure_weights(batch, None, 64)[0] - 1
    quarter = int(batch["labels"].ne(IGNORE_INDEX).sum()) / 4
    assert float(extra[64:128].sum() + extra[264:].sum()) == pytest.approx(quarter, rel=1e-5)  # contexts of 64 to 127
    assert float(extra[128:200].sum()) == pytest.approx(quarter, rel=1e-5)
    assert extra[:64].sum() + extra[200:264].sum() == 0

    stored = torch.rand(1, 300)
    shuffled = token_weights.shuffled_weights(batch, stored, 64)
    at = batch["labels"].ne(IGNORE_INDEX)
    assert not shuffled[at].equal(stored[at])
    assert shuffled[at].sort().values.equal(stored[at].sort().values)


@pytest.mark.slow
def test_token_weights_end_to_end(tmp_path, monkeypatch, capsys):
    for name, shape in (("base0", {}), ("evaluator", token_weights.DEEP), ("small", token_weights.SMALL)):
        torch.save(token_weights.new_model(**shape).state_dict(), tmp_path / f"{name}.pt")
    methods = ("CE", "LongCE, sliding window", "stored by a small evaluator", "Rho-1")
    arms = (*((name, "steps") for name in methods), *(("LongCE", budget) for budget in ("steps", "operations", "CPU")))
    for name, value in {"ARMS": arms, "RATES": (1e-3,), "CE_RATES": (1e-3, 2e-3), "TEST_SEEDS": (0,)}.items():
        monkeypatch.setattr(token_weights, name, value)
    comparison = token_weights.Comparison(tmp_path, 0, steps=2, documents=4)
    comparison.costs["CPU"] |= {"none": 1.0, "windows": 2.0}
    assert comparison.steps_of("LongCE", "CPU") == 1
    assert comparison.steps_of("LongCE", "operations") == 1
    assert comparison.steps_of("LongCE", "steps") == 2
    assert comparison.costs["operations"]["none"] < comparison.costs["operations"]["sliding"]
    rates = token_weights.tuned_rates(comparison)
    rows = token_weights.report([comparison], rates)
    assert [(row["arm"], row["budget"]) for row in rows] == list(arms)
    assert "| LongCE | operations |" in capsys.readouterr().out
    monkeypatch.setattr(comparison, "_train", lambda *_: pytest.fail("what is there is read"))
    assert str(token_weights.report([comparison], rates)) == str(rows)  # as text, because nan is not equal to itself


@pytest.mark.long
@pytest.mark.slow
def test_token_weights_on_books(tmp_path, monkeypatch, capsys):
    words = [f"w{index}" for index in range(300)]
    for part in ("train", "validation", "test"):
        (tmp_path / part).mkdir()
        for number in range(5):
            text = " ".join(random.Random(f"{part}{number}").choices(words, k=400))
            (tmp_path / part / f"{number}.txt").write_text(text)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0} | {word: 1 + index for index, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "tokenizer")
    sizes = {"SHORT": 64, "LENGTH": 128, "K": 16, "VOCABULARY": 301, "BETA": -9.0, "ALPHA": 0.0}
    for name, value in (sizes | {"RATES": (1e-4, 1e-3), "TEST_SEEDS": (0, 1)}).items():
        monkeypatch.setattr(book_weights, name, value)
    with pytest.raises(SystemExit, match=r"train needs .txt files"):
        book_weights.Books(tmp_path / "tokenizer", tmp_path / "tokenizer")
    books = book_weights.Books(tmp_path, tmp_path / "tokenizer")
    comparison = book_weights.Comparison(tmp_path / "runs", books, base_seconds=0.5, steps=2, evaluator_steps=2)
    comparison.costs.update(none=1.0, windows=2.0, evaluator=1.5)
    best = book_weights.tuned_rate(comparison)
    assert comparison.result("LongCE", True, best, 0)["steps"] == 1, "half as many steps, which cost twice as much"
    chosen = ["LongCE", "documents selected by the evaluator"]
    book_weights.report(comparison, chosen)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    counted = [(row[1].strip(), row[2].strip()) for row in rows[3:]]
    assert counted == [*((name, "counted") for name in chosen), (chosen[1], "free")]
    tried = {rate: comparison.result("CE", True, rate, book_weights.TUNING_SEED)["books"] for rate in (1e-4, 1e-3)}
    assert best == min(tried, key=lambda rate: book_weights.perplexities([tried[rate]])["longppl"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A document of 224 tokens is longer than the 160 positions")
def test_recall_tasks_of_a_model_that_has_hardly_learnt(run, tmp_path):
    sizes = ("--trained_lengths", 160, "--lengths", 160, 224, "--samples", 1, "--depths", 2)
    table = run("recall_tasks", "--output", tmp_path, "--cpu_seconds", 1, *sizes)
    assert sum(line[0].startswith("passkey") for line in table) == 2
    for name in ("random", "trained"):
        assert (tmp_path / f"{name}_scores" / "figures" / "depths.svg").is_file()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_model_recalls_in_texts_as_long_as_those_it_learnt_from_and_not_beyond(run, tmp_path, record_property):
    with pytest.warns(UserWarning, match="1024 tokens is longer than the 208 positions"):
        table = run("recall_tasks", "--output", tmp_path, "--mode", "teacher_forced", "--lengths", 208, 1024)
    rows = [line[0].split() for line in table if line[0].startswith("passkey")]
    (random_inside, random_beyond), (inside, beyond) = ((float(row[1]), float(row[4])) for row in rows)
    record_property("passkey at 208 tokens", inside)
    record_property("passkey at 1024 tokens", beyond)
    assert random_inside == random_beyond == 0
    assert inside > 90
    assert beyond < 40
