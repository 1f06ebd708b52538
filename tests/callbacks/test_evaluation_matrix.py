"""Validation sets x evaluators x thresholds, from before the first step."""

import csv
import math
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from callbacks import ExternalEvaluator
from datamodules import MixtureDataModule, TextDataModule
from datamodules.packing.evaluation_documents import ValidationSet
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.identity import model_identity
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.records import Definition, read_records, split_measurements, summarize
from lightning_modules.scoring.score import score
from lightning_modules.scoring.token_scores import text_sha256
from lightning_modules.utilities.statistics import corpus_mean
from longce.compare.runs import read_runs
from tests.conftest import make_text
from tests.support.texts import write_key_spans
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings(
    r"ignore:\d of \d .*documents have no key token", "ignore:The 'train_dataloader' does not have many workers"
)

THRESHOLDS = {"loose": {"alpha": 0.2, "beta": -math.inf}, "strict": {"alpha": 0.4, "beta": -6.5}}
LENGTHS = {"context_length": 48, "stride": 16}
TEXTS = {"books": [70, 90], "reports": [80, 60, 75]}  # words of each document


@pytest.fixture
def folders(tmp_path):
    for name, sizes in TEXTS.items():
        (tmp_path / name).mkdir()
        for number, size in enumerate(sizes):
            (tmp_path / name / f"{number}.txt").write_text(make_text(size, seed=size))
    return tmp_path


def make_evaluator(folder, tmp_path, **options):
    settings = LENGTHS | {"thresholds": THRESHOLDS, "cache_dir": str(tmp_path / "cache")} | options
    return ExternalEvaluator(str(folder), **settings)


def make_data(model_dir, folders, **options):
    sets = {
        "books": ValidationSet(f"{folders}/books/*.txt", length="whole"),
        "reports": ValidationSet(f"{folders}/reports", documents=2, length=100),
    }
    settings = {"sequence_length": 128, "cache_dir": str(folders / "cache"), "validation_sets": sets} | options
    return TextDataModule(str(model_dir), train=f"{folders}/reports", **settings)


def make_trainer(root, callbacks, **options):
    return quiet_trainer(root, *callbacks, **{"num_sanity_val_steps": 0, **options})


def test_every_cell_is_what_longce_score_prints(model_dir, evaluator_dir, folders):
    evaluators = {"near": model_dir, "other": evaluator_dir}
    callbacks = [make_evaluator(path, folders, name=name) for name, path in evaluators.items()]
    trainer = make_trainer(folders, callbacks)
    module = LongContextLM(str(model_dir), **LENGTHS)
    (logged,) = trainer.validate(module, make_data(model_dir, folders), verbose=False)
    for path in (folders / "reports").iterdir():  # `score` cuts by the evaluator's tokens
        text = encode_document(path.read_text(), load_tokenizer(str(model_dir)), max_tokens=100)["text"][0]
        path.write_text(text)
    for set_name in ("books", "reports"):
        for name, path in evaluators.items():
            for label, pair in THRESHOLDS.items():
                paths = [f"{folders}/{set_name}/{number}.txt" for number in (0, 1)]
                options = LENGTHS | pair | {"cache_dir": str(folders / "cache")}
                numbers = summarize(score(paths, str(model_dir), str(path), **options)).numbers()
                assert numbers["key_tokens"] > 0
                assert {"longppl", "longppl_soft", "bits_per_byte"} <= set(numbers)
                places = [f"val/{set_name}/{name}/{label}", f"val/{set_name}/{name}", f"val/{set_name}"]
                for number, value in numbers.items():
                    place = next(place for place in places if f"{place}/{number}" in logged)
                    assert logged[f"{place}/{number}"] == pytest.approx(value, rel=1e-5)
    assert "val/longppl" not in logged


def test_a_limit_of_batches_that_leaves_out_a_set_is_warned_of(model_dir, folders):
    module = LongContextLM(str(model_dir), **LENGTHS)
    for limit, batch_size, left_out in ((1, 1, True), (0.5, 1, True), (3, 1, False), (1, 3, False)):
        data = make_data(model_dir, folders, validation_batch_size=batch_size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (logged,) = make_trainer(folders, [], limit_val_batches=limit).validate(module, data, verbose=False)
        said = "\n".join(str(each.message) for each in caught)
        assert (f"= {limit} leaves out the validation set(s) reports, so" in said) == left_out, limit
        assert math.isnan(logged["val/reports/perplexity"]) == left_out
        assert logged["val/books/perplexity"] > 1


def test_the_first_evaluation_is_before_the_first_step_and_a_resumed_run_does_not_repeat_it(
    model_dir, evaluator_dir, folders
):
    class Starts(Callback):
        steps = ()

        def on_validation_start(self, trainer, pl_module):
            self.steps = (*self.steps, trainer.global_step)

    starts = Starts()

    def fit(steps, checkpoint=None, **options):
        starts.steps = ()
        torch.manual_seed(0)
        callback = make_evaluator(evaluator_dir, folders, **options)
        logger = CSVLogger(folders, name="logs")
        trainer = make_trainer(folders, [callback, starts], logger=logger, max_steps=steps, log_every_n_steps=1)
        module = LongContextLM(str(model_dir), **LENGTHS, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
        trainer.fit(module, make_data(model_dir, folders), ckpt_path=checkpoint)
        trainer.save_checkpoint(folders / "last.ckpt")
        logger.save()
        with Path(logger.experiment.metrics_file_path).open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("val/books/loose/longppl")]
        seen = [(int(row["step"]), float(row["val/books/loose/longppl"])) for row in rows]
        return seen, {name: weight.detach().clone() for name, weight in module.named_parameters()}

    seen, weights = fit(1)
    first, before = seen[0]
    assert first == 0
    base = make_trainer(folders, [make_evaluator(evaluator_dir, folders)])
    (logged,) = base.validate(LongContextLM(str(model_dir), **LENGTHS), make_data(model_dir, folders), verbose=False)
    assert before == pytest.approx(logged["val/books/loose/longppl"], rel=1e-6)
    assert starts.steps[0] == 0
    fit(2, folders / "last.ckpt")
    assert set(starts.steps) <= {2}, "the resumed run begins at step 1"
    without, same = fit(1, before_training=False)
    assert 0 not in [step for step, _ in without]
    assert all(torch.equal(weights[name], same[name]) for name in weights), "it does not change training"


def test_each_document_has_a_record_per_evaluator_and_thresholds(model_dir, evaluator_dir, folders):
    logger = TensorBoardLogger(folders, name="run", version="1")
    trainer = make_trainer(folders, [make_evaluator(evaluator_dir, folders, name="tiny")], logger=logger)
    module = LongContextLM(str(model_dir), **LENGTHS)
    (logged,) = trainer.validate(module, make_data(model_dir, folders, add_special_tokens=True), verbose=False)
    run = folders / "run" / "1"
    (run / "config.yaml").write_text("trainer: {}")
    (compared,) = read_runs([run])
    records = read_records(run / "documents" / "val-tiny-step-0.parquet")
    assert len(records) == len({(each.text_sha256, each.thresholds_label) for each in records}) == 4 * len(THRESHOLDS)
    first = records[0]
    assert (first.stage, first.step, first.evaluator_label) == ("val", 0, "tiny")
    assert first.evaluator.identity == model_identity(ModelConfig(str(evaluator_dir)))
    assert first.model.numerics == ("float32", "32-true", "sdpa")
    assert first.model.special_tokens
    assert all(each.evaluator == first.evaluator for each in records)
    for (set_name, label), total in summarize(records, by=("set", "thresholds_label")).items():
        definitions = {each.definition for each in records if each.thresholds_label == label}
        assert definitions == {Definition(**LENGTHS, **THRESHOLDS[label])}
        (cell,) = (each for each in compared.evaluations if each.set == set_name and each.thresholds.startswith(label))
        for name in ("longppl", "perplexity", "key_bits_per_byte"):
            assert corpus_mean(compared.last(cell)[1], name) == pytest.approx(getattr(total, name), rel=1e-12)
        for name, value in total.numbers().items():
            place = f"val/{set_name}/{label}/{name}"
            place = place if place in logged else f"val/{set_name}/{name}"
            assert logged[place] == pytest.approx(value, rel=1e-6, nan_ok=True)


def test_special_tokens_are_recorded_as_each_source_of_a_mixture_adds_them(model_dir, evaluator_dir, folders):
    sources = {}
    for name, special in (("books", True), ("reports", False)):
        texts = {"validation": f"{folders}/{name}/*.txt", "add_special_tokens": special}
        sources[name] = {"class_path": "datamodules.TextDataModule", "init_args": texts}
    data = MixtureDataModule(str(model_dir), sources=sources, sequence_length=128, cache_dir=str(folders / "cache"))
    logger = TensorBoardLogger(folders, name="run", version="1")
    trainer = make_trainer(folders, [make_evaluator(evaluator_dir, folders, thresholds=None)], logger=logger)
    trainer.validate(LongContextLM(str(model_dir), **LENGTHS), data, verbose=False)
    run = folders / "run" / "1"
    file = run / "documents" / "val-evaluator-step-0.parquet"
    records = read_records(file)
    assert Counter(record.model.special_tokens for record in records) == {True: 2, False: 3}
    assert len(split_measurements(records)) == 1
    (run / "config.yaml").write_text("trainer: {}")
    for path in (run, file):
        (compared,) = read_runs([path])
        ((_, table),) = (compared.last(cell) for cell in compared.evaluations)
        assert len(table) == len(records) == 5


def test_spans_of_a_book_in_sets_of_different_length_are_refused_before_it_is_scored(model_dir, folders):
    class Batches(Callback):
        seen = 0

        def on_validation_batch_start(self, *_):
            self.seen += 1

    spans = folders / "spans"
    spans.mkdir()
    sets = {
        "whole": ValidationSet(f"{folders}/books/*.txt", length="whole"),
        "short": ValidationSet(f"{folders}/books/*.txt", length=60),
    }
    data = make_data(model_dir, folders, validation_sets=sets)
    data.setup("validate")
    rows = [data.validation[index] for index in range(len(data.validation))]
    for row in rows:
        write_key_spans(spans / f"{row['name'].replace('/', '_')}.txt", torch.tensor([[20, 40]]))
    batches = Batches()
    trainer = make_trainer(folders, [ExternalEvaluator(key_spans=str(spans)), batches])
    with pytest.raises(ValueError, match=r"the key spans of two texts.*SHA-256"):
        trainer.validate(LongContextLM(str(model_dir), **LENGTHS), data, verbose=False)
    assert batches.seen == 0
    for row in rows:
        write_key_spans(spans / f"{text_sha256(row['text'])}.txt", torch.tensor([[20, 40]]))
    (logged,) = trainer.validate(LongContextLM(str(model_dir), **LENGTHS), data, verbose=False)
    assert batches.seen > 0
    assert logged["val/short/key_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"thresholds": {"a/b": {"alpha": 1}}}, "`thresholds`"),
        ({"thresholds": {"a": {"gamma": 1}}}, "`thresholds`"),
        ({"thresholds": {"a": {"alpha": -1}}}, "alpha"),
        ({"thresholds": {"a": {"beta": 1}}}, "beta"),
        ({"name": "meta-llama/Llama-3.1-8B"}, "`name`"),
    ],
)
def test_wrong_thresholds_and_names_are_refused_at_once(evaluator_dir, tmp_path, options, named):
    with pytest.raises(ValueError, match=named):
        make_evaluator(evaluator_dir, tmp_path, **options)


@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`")
def test_the_first_evaluation_comes_when_all_callbacks_have_started(model_dir, evaluator_dir, folders):
    callbacks = [make_evaluator(evaluator_dir, folders), ThroughputMonitor(batch_size_fn=len)]
    logger = CSVLogger(folders, name="logs")
    trainer = make_trainer(folders, callbacks, logger=logger, max_steps=1, log_every_n_steps=1)
    trainer.fit(LongContextLM(str(model_dir), **LENGTHS), make_data(model_dir, folders))
    assert trainer.global_step == 1


class OwnData(TextDataModule):
    """Its batches do not name the sets."""

    def val_dataloader(self):
        loader = super().val_dataloader()
        collate = loader.collate_fn
        loader.collate_fn = lambda rows: {key: value for key, value in collate(rows).items() if key != "sets"}
        return loader


def test_documents_of_an_unknown_set_are_not_left_out_silently(model_dir, folders):
    data = make_data(model_dir, folders)
    data.__class__ = OwnData
    module = LongContextLM(str(model_dir), **LENGTHS)
    with pytest.raises(ValueError, match=r"`validation_sets` are \['books', 'reports'\]"):
        make_trainer(folders, []).validate(module, data, verbose=False)
