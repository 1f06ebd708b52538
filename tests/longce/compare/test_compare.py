import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats
from torch.utils.tensorboard import SummaryWriter

from lightning_modules.scoring.records import read_records, write_records
from lightning_modules.training.checkpoints.spans import flatten_config
from lightning_modules.utilities.statistics import corpus_mean, paired_ratio
from longce.cli.main import main
from longce.compare.command import compare
from longce.compare.runs import read_runs
from longce.correlate.result_files import read_results
from tests.support.records import DEFINITION, EVALUATOR, MODEL, make_record

LONGPPL = np.array([4.0, 9.0, 5.0, 7.0, 6.0, 8.0])
KEY_TOKENS = np.array([10, 20, 5, 40, 30, 1])


def make_run(folder, factors, *, objective="LongCE", scalars=True, documents=6, **fields):
    """A run whose LongPPL after each number of steps is a factor times that of the base model."""
    logger = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"version": folder.name}}
    config = {
        "trainer": {"callbacks": [], "logger": logger, "max_steps": 20},
        "model": {"objective": {"class_path": f"lightning_modules.objectives.{objective}"}},
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if folder.name == "longce":
        inspector = {"class_path": "callbacks.KeyTokenInspector", "init_args": {"documents": 2}}
        config["trainer"]["callbacks"].insert(0, inspector)
    identity = {
        "run.id": folder.name,
        "run.parameters": 44_000,
        "trainer.callbacks.StepCheckpoint.init_args.dirpath": folder.name,
    }
    (folder / "hparams.yaml").write_text(yaml.safe_dump({**flatten_config(config), **identity}))
    for step, factor in factors.items():
        write_documents(folder, step, factor, documents, **fields)
    if scalars:
        with SummaryWriter(folder) as writer:
            for step in range(max(factors)):
                writer.add_scalar("train/loss", 3.0 - step / 10, step)
                writer.add_scalar("train/tokens", 100 * (step + 1), step)
                writer.add_scalar("train/gpu_hours", 0.5 * (step + 1), step)
    return folder


def write_documents(folder, step, factor, documents=6, **fields):
    """Write the records of an evaluation."""
    records = [
        make_record(
            f"doc{number}",
            LONGPPL[number] * factor,
            LONGPPL[number] * 10,
            key_tokens=int(KEY_TOKENS[number]),
            stage="val",
            step=step,
            **fields,
        )
        for number in range(documents)
    ]
    write_records(folder / "documents" / f"val-evaluator-step-{step}.parquet", records)


def write_score(path, factor, *, text="t", **fields):
    """Write records of `longce score`; two documents have the same name."""
    records = [
        make_record(f"{number // 2}.txt", value * factor, value, key_tokens=int(key), text=f"{text}{number}", **fields)
        for number, (value, key) in enumerate(zip(LONGPPL, KEY_TOKENS, strict=True))
    ]
    write_records(path, records)
    return path


def change_records(path, change):
    """Write the records of a file again, each changed by a function of its number and itself."""
    write_records(path, [change(number, record) for number, record in enumerate(read_records(path))])


@pytest.mark.parametrize(
    "changed",
    [
        {"identity": f"sha256:{'b' * 64}"},
        {"tokenizer": "u"},
        {"dtype": "bfloat16"},
        {"attention": "eager"},
        {"special_tokens": False},
    ],
)
def test_another_evaluator_has_a_heading_of_its_own(tmp_path, changed):
    write_score(tmp_path / "a.parquet", 1.0)
    write_score(tmp_path / "b.parquet", 1.0, evaluator=EVALUATOR._replace(**changed))
    printed = compare([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    assert len(set(re.findall(r"\(sha256:.*?\)", printed))) == 2
    assert "1.000" not in printed  # no ratio of numbers by different evaluators


NUMERICS = {"dtype": "float32", "precision": "32-true", "attention": "sdpa"}


def write_run(tmp_path, name, factor, numerics):
    model = MODEL._replace(**numerics)
    return make_run(tmp_path / name, {0: 1.0, 2: factor}, scalars=False, model=model)


def write_scalars(tmp_path, name, factor, numerics):
    """A run without an evaluator."""
    folder = make_run(tmp_path / name, {}, scalars=False)
    (folder / "metrics.csv").write_text(f"step,epoch,val/perplexity\n0,0,9.0\n1,0,{8 * factor}\n")
    (folder / "numerics.json").write_text(json.dumps(dict.fromkeys((0, 2), numerics)))
    return folder


def write_result(tmp_path, name, factor, numerics):
    return write_score(tmp_path / f"{name}.parquet", factor, model=MODEL._replace(**numerics))


@pytest.mark.parametrize(
    ("write", "changed"),
    [
        (write_run, {"precision": "bf16-mixed"}),
        (write_scalars, {"dtype": "bfloat16"}),
        (write_scalars, {"precision": None}),
        (write_result, {"attention": "eager"}),
        (write_result, {"precision": "bf16-mixed"}),
    ],
)
def test_numbers_of_other_numerics_are_not_compared_and_the_difference_is_named(tmp_path, write, changed):
    one = write(tmp_path, "a", 1.0, NUMERICS)
    same = write(tmp_path, "same", 0.8, NUMERICS)
    other = write(tmp_path, "b", 0.5, NUMERICS | changed)
    printed = compare([one, same])
    assert "0.800" in printed
    assert "Not compared" not in printed
    printed = compare([one, same, other])
    assert "0.800" in printed
    assert "0.500" not in printed
    assert "0.625" not in printed
    ((key, value),) = changed.items()
    sentences = " ".join(printed.partition("\n\n")[0].split())
    assert f"their {key} differs: {NUMERICS[key]} (a, same) against {value or 'not recorded'} (b)." in sentences


def test_numerics_that_are_not_recorded_are_named(tmp_path):
    unknown = [write_scalars(tmp_path, name, 1.0, {}) for name in ("c", "d")]
    assert "The precision of c, d is not recorded" in " ".join(compare(unknown).split())


def test_other_texts_do_not_hide_other_numerics(tmp_path):
    one = write_result(tmp_path, "a", 1.0, NUMERICS)
    other = write_score(tmp_path / "b.parquet", 1.0, text="u", model=MODEL._replace(**NUMERICS | {"dtype": "bfloat16"}))
    assert "their dtype differs" in " ".join(compare([one, other]).split())


def test_a_later_evaluation_of_other_precision_is_not_the_final_number_of_a_run(tmp_path):
    one, other = (write_run(tmp_path, name, factor, NUMERICS) for name, factor in (("a", 1.0), ("b", 0.8)))
    later = one / "evaluations" / "validate-step-2"
    later.mkdir(parents=True)
    (later / "config.yaml").write_text((one / "config.yaml").read_text())
    mixed = MODEL._replace(**NUMERICS | {"precision": "bf16-mixed"})
    write_documents(later, 2, 0.4, model=mixed)
    printed = " ".join(compare([one, other]).split())
    assert "the ratio of LongPPL is 0.800 [" in printed
    assert "their precision differs: 32-true (a, b) against bf16-mixed (a)." in printed
    write_documents(later, 3, 0.2, model=mixed)
    alone = compare([one])
    assert "step 0's" in alone
    assert "0.500" not in alone, "the first one in bf16-mixed is not that of step 0"


def test_documents_of_other_texts_are_not_compared(tmp_path):
    """The set is the same: the texts of a folder, of which one was edited between two trainings."""
    runs = [make_run(tmp_path / name, {1: factor}) for name, factor in (("a", 1.0), ("b", 0.8))]
    (file,) = runs[1].glob("documents/*")
    change_records(file, lambda number, record: record._replace(text_sha256="edited") if number == 5 else record)
    assert "ratio over 5 of 6 documents" in compare(runs)


def corpus(longppl):
    return math.exp((np.log(longppl) * KEY_TOKENS).sum() / KEY_TOKENS.sum())


def make_shared(generator, documents):
    """Documents of unequal length whose LongPPL is 0.9 times the baseline's on average over tokens."""
    baseline = np.exp(generator.normal(2, 0.5, documents))
    tokens = np.ceil(np.exp(generator.normal(4, 1, documents)))
    difference = (
        math.log(0.9) + generator.normal(0, 0.05, documents) + generator.normal(0, 0.5, documents) / tokens**0.5
    )
    return pd.DataFrame({"key_tokens": tokens, "longppl": baseline * np.exp(difference), "longppl_baseline": baseline})


def test_the_ratio_is_that_of_the_corpus_and_its_interval_leaves_each_document_out_once():
    shared = make_shared(np.random.default_rng(1), 12)
    shared.loc[3, ["key_tokens", "longppl"]] = 0, math.nan
    value, (low, high) = paired_ratio(shared, "longppl")
    kept = [each for each in range(12) if each != 3]

    def plain(documents, name):
        total = sum(shared["key_tokens"][each] * math.log(shared[name][each]) for each in documents)
        return total / sum(shared["key_tokens"][each] for each in documents)

    def difference(documents):
        return plain(documents, "longppl") - plain(documents, "longppl_baseline")

    left_out = [difference([each for each in kept if each != other]) for other in kept]
    error = math.sqrt(10 / 11 * sum((each - sum(left_out) / 11) ** 2 for each in left_out))
    half = stats.t.ppf(0.975, 10) * error
    assert value == pytest.approx(math.exp(difference(kept)))
    assert (low, high) == pytest.approx((value * math.exp(-half), value * math.exp(half)))


@pytest.mark.parametrize("documents", [5, 16])
def test_the_interval_covers_the_true_ratio(documents):
    generator = np.random.default_rng(0)
    found = [paired_ratio(make_shared(generator, documents), "longppl")[1] for _ in range(400)]
    assert 0.9 < np.mean([low < 0.9 < high for low, high in found]) < 0.97


def test_few_documents_have_no_interval_and_equal_models_a_point():
    shared = pd.DataFrame({"tokens": KEY_TOKENS, "perplexity": LONGPPL / 2, "perplexity_baseline": LONGPPL})
    assert paired_ratio(shared[:4], "perplexity") == (pytest.approx(0.5), None)
    assert paired_ratio(shared.assign(perplexity=LONGPPL), "perplexity") == (1.0, (1.0, 1.0))
    assert math.isnan(paired_ratio(shared.assign(tokens=0), "perplexity")[0])
    assert math.isnan(corpus_mean(shared.assign(tokens=0), "perplexity"))


def test_a_model_that_has_diverged_is_infinitely_worse_and_has_no_interval(tmp_path):
    factors = {"good": 1.0, "bad": math.inf, "huge": 1e300}
    good, bad, huge = (write_score(tmp_path / f"{name}.parquet", factor) for name, factor in factors.items())
    printed = compare([bad, good, huge])
    assert re.search(r"bad +∞ +\d", printed)
    assert re.search(rf"good +{corpus(LONGPPL):.3f} +0 \(infinite for the baseline\) +\d", printed)
    assert re.search(r"bad +∞ +∞ +\d", compare([good, huge, bad]))


def test_runs_are_ranked_with_what_differs_and_costs(tmp_path, capsys):
    runs = [
        make_run(tmp_path / "ce", {0: 1.0, 10: 0.9}, objective="CrossEntropy"),
        make_run(tmp_path / "longce", {0: 1.0, 20: 0.8}),
    ]
    main(["compare", *map(str, runs)])
    printed = re.sub(r" {2,}", " | ", capsys.readouterr().out)
    table = printed.partition("Final numbers")[2]
    best, second = (line for line in table.splitlines() if "alpha 2, beta -2" in line or line.startswith(" | "))
    assert f"longce | {corpus(LONGPPL) * 0.8:.3f} | 0.889 [0.889, 0.889]" in best
    assert f"ce | {corpus(LONGPPL) * 0.9:.3f}" in second
    assert (
        "model.objective | lightning_modules.objectives.CrossEntropy | lightning_modules.objectives.LongCE" in printed
    )
    assert "ce | 10 | 1,000 | 5 | 44,000" in printed
    assert "longce | 20 | 2,000 | 10 | 44,000" in printed
    assert "1.125 [1.125, 1.125]" in compare(runs[::-1])


def test_tasks_after_the_last_step_are_no_step(tmp_path):
    """`LongContextTasks` logs at the step itself, and Lightning at the one before."""
    runs = [make_run(tmp_path / name, {0: 1.0, 20: 0.9}) for name in ("base", "tasks")]
    with SummaryWriter(runs[1]) as writer:
        writer.add_scalar("tasks/average/4096", 50.0, 20)
    assert "They differ in optimizer steps" not in compare(runs)
    assert max(read_runs(runs)[1].scalars["step"]) == 20


def test_curves_begin_at_the_base_model_and_include_later_evaluations_and_resumed_logs(tmp_path):
    folder = make_run(tmp_path / "run", {0: 1.0, 10: 0.9})
    with SummaryWriter(folder, filename_suffix=".resumed") as writer:
        for step in range(8, 16):
            writer.add_scalar("train/loss", 1.0, step)
    first, resumed = sorted(folder.glob("events.*"), key=lambda file: file.name.endswith(".resumed"))
    first.rename(folder / "events.out.tfevents.1.host.1.9")  # of one process in one second
    resumed.rename(folder / "events.out.tfevents.1.host.1.10")
    (folder / "evaluations" / "validate-step-16").mkdir(parents=True)
    (folder / "evaluations" / "validate-step-16" / "config.yaml").write_text((folder / "config.yaml").read_text())
    write_documents(folder / "evaluations" / "validate-step-16", 16, 0.7)
    (run,) = read_runs([folder])
    ((cell, evaluations),) = run.evaluations.items()
    assert (cell.set, cell.evaluator, cell.thresholds) == ("validation", "E", "alpha 2, beta -2")
    assert cell.details.startswith("sha256:")
    assert cell.details.endswith("K 64, d 16")
    assert str(cell.numerics) == "float32, none, sdpa"
    assert sorted(evaluations) == [0, 10, 16]
    assert sorted(run.scalars["train/loss"]) == list(range(1, 17))
    assert run.scalars["train/loss"][9] == 1.0  # of the resumed training, not of the one that was killed


def test_the_last_of_repeated_evaluations_counts_also_in_a_copy_of_the_run(tmp_path):
    run = make_run(tmp_path / "run", {0: 1.0, 20: 0.9})
    for number, factor in ((1, 0.8), (2, 0.7), (10, 0.6)):
        folder = run / "evaluations" / ("validate-step-20" if number == 1 else f"validate-step-20-{number}")
        write_documents(folder, 20, factor)
        os.utime(folder, (1000 - number, 1000 - number))
    (read,) = read_runs([run])
    (cell,) = read.evaluations
    assert read.last(cell)[1]["longppl"].tolist() == pytest.approx((0.6 * LONGPPL).tolist())


def test_a_run_in_training_or_a_damaged_file_is_read_up_to_its_last_complete_event(tmp_path, caplog):
    folder = make_run(tmp_path / "run", {10: 0.9})
    (events,) = folder.glob("events.out.tfevents.*")
    whole = events.read_bytes()
    read_runs([folder])
    assert not caplog.records
    events.write_bytes(whole[:-5])
    (run,) = read_runs([folder])
    assert max(run.scalars["train/loss"]) == 10
    assert max(run.scalars["train/gpu_hours"]) == 9
    assert "unfinished or damaged" in caplog.text
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    events.write_bytes(damaged)
    (run,) = read_runs([folder])
    assert 0 < max(run.scalars["train/loss"]) < 10


def test_a_run_without_an_evaluator_or_with_csv_logs_is_compared_by_what_it_logged(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("trainer: {callbacks: null}\n")
    assert compare([tmp_path / "new"]) == "These runs have logged nothing yet.\n"
    lines = {"a": "0,0,,50.0\n9,0,2.0,\n9,0,,30.0\n", "b": "0,0,,50.0\n9,0,2.5,\n9,0,,20.0\n"}
    for name, rows in lines.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("trainer: {callbacks: {class_path: a.B}}\n")
        (tmp_path / name / "metrics.csv").write_text(f"step,epoch,train/loss,val/perplexity\n{rows}")
    (evaluations,) = read_runs([tmp_path / "a"])[0].evaluations.values()
    assert sorted(evaluations) == [0, 10]  # before training, and after the tenth step
    printed = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html")
    assert Page((tmp_path / "page.html").read_text()).images[1:] == ["Perplexity: validation", "Training loss (nats)"]
    assert re.search(r"validation +b +20\.000 +0\.667 +10 +no records by document, so no intervals\n", printed)
    assert "LongPPL" not in printed.split("perplexity")[0]


def test_the_same_texts_in_another_order_are_compared(tmp_path):
    one = write_score(tmp_path / "a.parquet", 1.0)
    other = write_score(tmp_path / "b.parquet", 0.8)
    write_records(other, read_records(other)[::-1])
    printed = compare([one, other])
    assert "the ratio of LongPPL is 0.800 [" in " ".join(printed.split())
    assert "texts" not in printed.partition("Settings that differ")[2]
    first, second = read_results([str(one), str(other)])
    assert first.values["longppl"].settings == second.values["longppl"].settings


@pytest.mark.parametrize("sets", [("val",), ("val", "test")])
def test_runs_without_records_by_document_have_no_interval(tmp_path, sets):
    """Their numbers are about whole sets, and are not compared as if each set were one document."""
    head = ",".join(["step", *(f"{stage}/{kind}" for stage in sets for kind in ("longppl", "perplexity"))])
    for name, longppl in (("a", 5.0), ("b", 4.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("trainer: {callbacks: null}\n")
        numbers = [9, *([longppl, 2 * longppl] * len(sets))]
        (tmp_path / name / "metrics.csv").write_text(f"{head}\n{','.join(map(str, numbers))}\n")
    printed = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html")
    verdict, _, tables = printed.partition("\n\n")
    assert re.search(
        r"validation +b +4\.000 +0\.800 +8\.000 +0\.800 +10 +no records by document, so no intervals\n", tables
    )
    sentences = " ".join(verdict.split())
    assert "the runs have no records by document" in sentences
    assert "differences may be due to chance" in sentences
    for wrong in ("documents 1", "1 document", "too few", "95%"):
        assert wrong not in printed
    assert "Documents that changed most" not in (tmp_path / "page.html").read_text()


def test_other_documents_and_other_evaluators_are_not_compared(tmp_path):
    longer = DEFINITION._replace(context_length=128)
    runs = [make_run(tmp_path / "a", {1: 1.0}), make_run(tmp_path / "b", {1: 0.5}, definition=longer)]
    runs.append(make_run(tmp_path / "c", {1: 0.5}, documents=5))
    (file,) = runs[2].glob("documents/*")

    def change(number, record):
        """Key tokens of another tokenizer."""
        sums = record.sums._replace(key_tokens=11, key_nll=11 * math.log(1e9))
        return record._replace(sums=sums) if number == 0 else record

    change_records(file, change)
    other = EVALUATOR._replace(name="hub/F")
    runs.append(make_run(tmp_path / "d", {1: 0.5}, evaluator=other, definition=DEFINITION._replace(stride=8)))
    printed = compare(runs)
    assert re.search(r"\nvalidation, F \(.*K 64, d 8\), alpha 2, beta -2 +d ", printed)
    lines = [re.split(r" {2,}", line) for line in printed.splitlines()]
    (only,) = [line[:2] for line in lines if "K 128" in line[0]]
    assert only[0].startswith("validation, E (")
    assert only[1] == "b"
    assert "0.500 (4 documents: too few)" in printed
    assert "ratio over 4 of 6 documents" in printed


def test_results_of_longce_score_are_compared(tmp_path):
    (tmp_path / "scores").mkdir()
    one, other = (
        write_score(tmp_path / "scores" / f"{name}.parquet", factor) for name, factor in (("a", 1.0), ("b", 0.8))
    )
    printed = compare([one, other])
    assert re.search(r"\nEvaluator: E \(.*K\s64,\sd\s16\)\.\n", printed)
    assert printed == compare([tmp_path / "scores"])
    row = rf"b .*{corpus(LONGPPL) * 0.8:.3f} +0\.800 \[0\.800, 0\.800\]"
    assert re.search(rf"texts \w+, E, alpha 2, beta -2 +{row}", printed)
    (run,) = read_runs([one])
    ((documents,),) = (steps.values() for steps in run.evaluations.values())
    assert documents.index.is_unique  # names may be repeated
    texts = write_score(tmp_path / "other.parquet", 0.5, text="u", definition=DEFINITION._replace(alpha=1.0))
    printed = compare([one, f"new={texts}"])
    assert len(set(re.findall(r"^(texts \w+), E, alpha [12], beta -2 ", printed, re.MULTILINE))) == 2
    assert "ratio" not in printed
    assert re.search(r"alpha +2.0 +1.0", printed)


def test_records_of_several_models_are_compared_with_the_first(tmp_path):
    """Of one file as of a file for each, by the models' names."""
    models = {"org/old": 1.0, "org/new": 0.8}
    for name, factor in models.items():
        write_score(tmp_path / f"{Path(name).name}.parquet", factor, model=MODEL._replace(name=name))
    files = [tmp_path / "old.parquet", tmp_path / "new.parquet"]
    write_records(tmp_path / "both.parquet", [record for file in files for record in read_records(file)])
    assert compare([tmp_path / "both.parquet"]) == compare(files)
    with pytest.raises(ValueError, match="has 2"):
        compare([f"name={tmp_path / 'both.parquet'}"])


def test_measurements_of_one_file_are_never_thrown_together(tmp_path):
    """Other thresholds, sets and steps are rows of their own; models of one name are refused."""
    strict = DEFINITION._replace(alpha=4.0)
    for name, factor in (("a", 1.0), ("b", 0.8)):
        model = MODEL._replace(name=name, identity=name)
        records = []
        for number, fields in enumerate(({}, {"definition": strict}, {"set": "books", "stage": "val", "step": 3})):
            value = 3.0 + number
            records += [
                make_record(f"{each}", value * factor, 9.0, text=f"{number} {each}", model=model, **fields)
                for each in range(6)
            ]
        write_records(tmp_path / f"{name}.parquet", records)
    printed = compare([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    for value in (2.4, 3.2, 4.0):
        assert re.search(rf"b +{value:.3f} +0\.800 \[0\.800, 0\.800\]", printed)
    entries = read_results([str(tmp_path / "a.parquet")])
    assert [entry.values["longppl"].number for entry in entries] == pytest.approx([3.0, 4.0, 5.0])
    same = [make_record("a", 2.0, 3.0, model=MODEL._replace(identity=identity)) for identity in "xy"]
    write_records(tmp_path / "same.parquet", same)
    with pytest.raises(ValueError, match="Two runs have the name 'hub/M'"):
        compare([tmp_path / "same.parquet"])


def test_what_cannot_be_compared_is_refused(tmp_path):
    run = make_run(tmp_path / "runs" / "version_0", {0: 1.0})
    score = write_score(tmp_path / "a.parquet", 1.0)
    (tmp_path / "b.parquet").write_text('{"documents": 3}')
    pd.DataFrame({"longppl": [1.0]}).to_parquet(tmp_path / "c.parquet")
    write_records(tmp_path / "d.parquet", [])
    for words, named in (
        ([tmp_path / "runs"], "version_0"),
        ([run, score], "runs, or records"),
        ([run, run], "version_0"),
        ([tmp_path / "b.parquet"], "b.parquet"),
        ([tmp_path / "c.parquet"], "c.parquet"),
        ([tmp_path / "d.parquet"], "d.parquet"),
    ):
        with pytest.raises(ValueError, match=named):
            compare(words)


class Page(HTMLParser):
    """Elements of a page, which must be closed in the order in which they were opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "img":
            self.images.append(dict(attrs)["alt"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_of_a_run_has_curves_and_changed_documents(tmp_path):
    folder = make_run(tmp_path / "run", {0: 1.0, 10: 0.9})

    def change(number, record):
        sums = record.sums
        if number == 2:
            sums = sums._replace(key_nll=sums.key_nll + sums.key_tokens * math.log(2))
        if number == 5:
            sums = sums._replace(key_tokens=0, key_nll=0.0)
        return record._replace(sums=sums)

    change_records(folder / "documents" / "val-evaluator-step-10.parquet", change)
    compare([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert set(Page(page).images[1:]) >= {"Training loss (nats)"}
    texts = re.sub(r"\s*<[^>]*>\s*", "|", page.partition("<h1>")[2])
    assert re.search(r"Documents that changed most\|.*?doc2\|+5\.000\|+9\.000\|+1\.800", texts)
    assert "nan" not in texts.lower()


def test_documents_without_key_tokens_are_not_counted_as_too_few(tmp_path):
    files = []
    for name, factor in (("a", 1.0), ("b", 0.5)):
        files.append(write_score(tmp_path / f"{name}.parquet", factor))
        change_records(files[-1], drop_key_tokens)
    assert "0.500 (2 documents: too few)" in compare(files)


def drop_key_tokens(number, record):
    return record if number < 2 else record._replace(sums=record.sums._replace(key_tokens=0, key_nll=0.0))
