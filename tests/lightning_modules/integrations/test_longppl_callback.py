"""LongPPL in Hugging Face's Trainer is that of `longce.score`."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedTokenizer,
    Trainer,
    TrainingArguments,
)

import longce
from tests.conftest import make_text

SIZES = {"context_length": 16, "stride": 8, "alpha": 0.5, "beta": -6.0}
TEXTS = {name: make_text(60, seed) for seed, name in enumerate(("b", "a", "c"))}
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*")


def make_trainer(model, tokenizer, root, **settings):
    ids = [tokenizer(text)["input_ids"] for text in TEXTS.values()]
    rows = Dataset.from_list([{"input_ids": row} for row in ids])
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    quiet |= {"per_device_train_batch_size": 3, "optim": "sgd", "learning_rate": 0.01, "lr_scheduler_type": "constant"}
    return Trainer(
        model,
        TrainingArguments(root, **quiet, **({"save_strategy": "no"} | settings)),
        train_dataset=rows,
        eval_dataset={"one": rows, "two": rows.select([0])},
        data_collator=DataCollatorWithFlattening(),
        processing_class=tokenizer,
    )


@pytest.fixture
def trained(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir)


def scored(model, tokenizer, evaluator, root):
    model.save_pretrained(root)
    tokenizer.save_pretrained(root)
    records = longce.score(TEXTS, model=str(root), evaluator=str(evaluator), **SIZES)
    return sorted(records, key=lambda record: record.document)


@pytest.mark.slow
@pytest.mark.parametrize("other", [False, True], ids=["same tokenizer", "other tokenizer"])
def test_equals_score_before_and_after_training(other, trained, tokenizer, model_dir, evaluator_dir, tmp_path):
    evaluator = evaluator_dir if other else model_dir
    longce.apply_longce(trained, context_length=8, stride=4)
    plan = {"num_train_epochs": 2, "eval_strategy": "epoch", "logging_steps": 1}
    trainer = make_trainer(trained, tokenizer, tmp_path / "run", **plan)
    before = copy.deepcopy(trained)
    callback = longce.LongPPLCallback(trainer, TEXTS, str(evaluator), **SIZES)
    trainer.add_callback(callback)
    first = trainer.evaluate()
    log = list(trainer.state.log_history)
    trainer.train()
    logged = [entry for entry in log + trainer.state.log_history if "eval_longppl" in entry]
    assert [entry["step"] for entry in logged] == [0, 1, 2]  # once for both data sets
    for model, entry in ((before, logged[0]), (trained, logged[2])):
        expected = scored(model, tokenizer, evaluator, tmp_path / f"model-{entry['step']}")
        total = longce.summarize(expected)
        assert total.key_tokens == entry["eval_key_tokens"] > 20
        assert entry["eval_longppl"] == pytest.approx(total.longppl, rel=1e-6)
        assert entry["eval_perplexity"] == pytest.approx(total.perplexity, rel=1e-6)
        assert entry["eval_longppl_per_evaluator_token"] == pytest.approx(total.longppl_per_evaluator_token, rel=1e-6)
    assert [record.document for record in callback.records] == ["a", "b", "c"]
    assert callback.records[0].sums.nll == pytest.approx(expected[0].sums.nll, rel=1e-6)
    assert {record.step for record in callback.records} == {2}
    assert first["eval_longppl"] == logged[0]["eval_longppl"] != logged[2]["eval_longppl"]
    # Weights may change without a step.
    trained.load_state_dict(before.state_dict())
    assert trainer.evaluate()["eval_longppl"] == first["eval_longppl"]


def test_the_best_model_is_chosen_by_it(trained, tokenizer, model_dir, tmp_path):
    plan = {"num_train_epochs": 3, "eval_strategy": "epoch", "metric_for_best_model": "eval_longppl"}
    plan |= {"save_strategy": "epoch", "load_best_model_at_end": True, "greater_is_better": True}
    trainer = make_trainer(trained, tokenizer, tmp_path, **plan)
    trainer.add_callback(longce.LongPPLCallback(trainer, list(TEXTS.values()), str(model_dir), **SIZES))
    trainer.train()
    logged = [entry["eval_longppl"] for entry in trainer.state.log_history if "eval_longppl" in entry]
    assert trainer.state.best_metric == max(logged) != logged[-1]
    # The weights are those of the best model now, at the step of the last one.
    metrics = trainer.evaluate(metric_key_prefix="test")
    assert metrics["test_longppl"] == pytest.approx(max(logged), rel=1e-6)
    assert "eval_longppl" not in metrics


def test_the_model_stays_as_it_is(trained, tokenizer, model_dir, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.5)
    model = get_peft_model(trained, config)
    longce.apply_longce(model, context_length=8, stride=4)
    trainer = make_trainer(model, tokenizer, tmp_path)
    callback = longce.LongPPLCallback(trainer, TEXTS, str(model_dir), **SIZES)
    model.train()
    trained.model.norm.eval()
    state = [module.training for module in model.modules()]
    names = set(vars(trained))
    forward = trained.forward
    metrics = {}
    callback.on_evaluate(trainer.args, trainer.state, trainer.control, metrics, model=model)
    assert metrics["eval_longppl"] > 1
    assert [module.training for module in model.modules()] == state
    assert trained.forward is forward
    assert callback.evaluator._backbone is None  # its memory is free again
    assert set(vars(trained)) == names
    merged = scored(copy.deepcopy(model).merge_and_unload(), tokenizer, model_dir, tmp_path / "merged")
    assert metrics["eval_longppl"] == pytest.approx(longce.summarize(merged).longppl, rel=1e-5)


def test_stored_scores_need_no_evaluator(trained, tokenizer, model_dir, tmp_path, monkeypatch):
    trainer = make_trainer(trained, tokenizer, tmp_path)
    values = []
    for _ in range(2):
        callback = longce.LongPPLCallback(trainer, TEXTS, str(model_dir), **SIZES)
        metrics = {}
        callback.on_evaluate(trainer.args, trainer.state, trainer.control, metrics, model=trained)
        values.append(metrics)
        monkeypatch.setattr(longce.ScoredModel, "_load", lambda self: pytest.fail("the evaluator was loaded"))
    assert values[0] == values[1]


@pytest.mark.parametrize("special_tokens", [False, True])
def test_records_have_whether_special_tokens_precede_the_texts(special_tokens, trained, tokenizer, model_dir, tmp_path):
    trainer = make_trainer(trained, tokenizer, tmp_path)
    callback = longce.LongPPLCallback(trainer, TEXTS, str(model_dir), special_tokens=special_tokens, **SIZES)
    callback.on_evaluate(trainer.args, trainer.state, trainer.control, {}, model=trained)
    assert {record.model.special_tokens for record in callback.records} == {special_tokens}


def test_a_training_that_has_diverged_has_no_longppl(trained, tokenizer, model_dir, tmp_path, caplog):
    trainer = make_trainer(trained, tokenizer, tmp_path)
    callback = longce.LongPPLCallback(trainer, TEXTS, str(model_dir), **SIZES)
    trainer.add_callback(callback)
    assert trainer.evaluate()["eval_longppl"] > 1
    with torch.no_grad():
        trained.lm_head.weight.mul_(math.nan)
    assert math.isnan(trainer.evaluate()["eval_longppl"])
    assert "impossible log-likelihoods" in caplog.text


def test_texts_without_key_tokens_are_reported(trained, tokenizer, model_dir, tmp_path, caplog):
    trainer = make_trainer(trained, tokenizer, tmp_path)
    callback = longce.LongPPLCallback(trainer, {"short": "ba ce"}, str(model_dir), max_tokens=4, **SIZES)
    metrics = {}
    callback.on_evaluate(trainer.args, trainer.state, trainer.control, metrics, model=trained)
    assert math.isnan(metrics["eval_longppl"])
    assert "1 of 1 texts have no key token" in caplog.text


@pytest.mark.parametrize(
    ("texts", "settings", "named"),
    [
        ({}, {}, "`texts`"),
        (TEXTS, {"sharded": True}, "`sharded`"),
        (TEXTS, {"stride": 0}, "`stride`"),
        (TEXTS, {"tokenizer_class": PreTrainedTokenizer}, "fast tokenizer"),
    ],
)
def test_what_cannot_work_is_refused_at_once(texts, settings, named, tokenizer, model_dir):
    settings = dict(settings)
    own = settings.pop("tokenizer_class", None)
    trainer = SimpleNamespace(processing_class=tokenizer if own is None else object())
    with pytest.raises(ValueError, match=named):
        longce.LongPPLCallback(trainer, texts, str(model_dir), **{**SIZES, **settings})
