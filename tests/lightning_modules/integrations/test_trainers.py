"""Hugging Face's Trainer and TRL's SFTTrainer train with LongCE: their losses and weights are those of the formula."""

import copy
import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer, TrainingArguments

import longce
from tests.support.distributed import run_like_torchrun
from tests.support.longce_sums import D, K, change_error, take_steps, text
from tests.support.recipes import load_recipe

trl = pytest.importorskip("trl")
from tests.support import trl_training

SETTINGS = {
    "use_cpu": True,
    "report_to": [],
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,  # 4 texts, so each step is on all of them
    "num_train_epochs": 2,
    "max_grad_norm": 0,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}
TEXTS = [text(40, seed=1), text(23, seed=2, prompt=9), text(31, seed=3), text(60, seed=4, prompt=30)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),  # TRL sets it
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*(flash|Padding-free|packing).*"),  # TRL advises flash attention for packing
]


def rows(texts=TEXTS):
    return Dataset.from_list([{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in texts])


def logged_losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_trainer(layout, adapted, model, chat_tokenizer, tmp_path):
    model.double()
    if adapted:
        config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    start = copy.deepcopy(model).eval()
    expected = copy.deepcopy(start)
    losses = take_steps(expected, [TEXTS, TEXTS])
    longce.apply_longce(model, context_length=K, stride=D)
    collator = DataCollatorWithFlattening() if layout == "packed" else DataCollatorForSeq2Seq(chat_tokenizer)
    arguments = TrainingArguments(tmp_path, **SETTINGS)
    trainer = Trainer(model, arguments, train_dataset=rows(), data_collator=collator)
    trainer.train()
    assert logged_losses(trainer) == pytest.approx(losses, rel=1e-6)  # the Trainer adds losses up in float32
    assert change_error(model, expected, start) < 1e-6  # norms round to float32, also in float64


def test_evaluation_is_that_of_the_model_and_the_saved_model_has_no_trace(model, tmp_path):
    plain = copy.deepcopy(model)
    longce.apply_longce(model, context_length=K, stride=D)
    losses, configs = [], []
    for name, each in (("plain", plain), ("longce", model)):
        arguments = TrainingArguments(tmp_path / name, **SETTINGS)
        trainer = Trainer(each, arguments, eval_dataset=rows(), data_collator=DataCollatorWithFlattening())
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.save_model()
        configs.append(json.loads((tmp_path / name / "config.json").read_text()))
    assert losses[0] == losses[1]
    assert configs[0] == configs[1]


def test_losses_that_the_trainer_computes_itself_are_reported(model, caplog, tmp_path):
    longce.apply_longce(model, context_length=K, stride=D)
    arguments = TrainingArguments(tmp_path, **SETTINGS, label_smoothing_factor=0.1)
    Trainer(model, arguments, train_dataset=rows(), data_collator=DataCollatorWithFlattening()).train()
    assert "label_smoothing_factor" in caplog.text


# ---------------------------------------------------------------------------------------------------------------- TRL

CHATS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in [
        ("ba ce difo guka " * 6, "le mi nopu rase"),
        ("ti vo zuba", "ce di fogu " * 9),
        ("ka", "le mi no pu rase tivo " * 5),
        ("zu ba ce", "difo"),
    ]
]


def sft(model, tokenizer, root, trainer=None, peft_config=None, **settings):
    settings = {**SETTINGS, "assistant_only_loss": True, "max_length": None, "bf16": False, **settings}
    trainer_class = load_recipe("trl_sft").LongCETrainer if trainer is None else trainer
    arguments = trl.SFTConfig(root, **{"gradient_checkpointing": False, **settings})
    return trainer_class(
        model,
        arguments,
        train_dataset=Dataset.from_list(CHATS),
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def texts_of(trainer):
    """The texts of TRL's rows, of which a packed one has several."""
    texts = []
    for row in trainer.train_dataset:
        ids = torch.tensor(row["input_ids"])
        labels = torch.tensor(row["labels"])
        lengths = row.get("seq_lengths", [len(ids)])
        texts += zip(ids.split(lengths), labels.split(lengths), strict=True)
    return texts


@pytest.mark.parametrize("applied", ["before", "after"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"packing": True, "max_length": 300, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
        {"padding_free": True},
    ],
    ids=["padded", "checkpointing", "packed", "padding-free"],
)
def test_sft_trainer(applied, settings, model, chat_tokenizer, tmp_path):
    model.double()
    start = copy.deepcopy(model).eval()
    if applied == "before":
        longce.apply_longce(model, context_length=K, stride=D)
    trainer = sft(model, chat_tokenizer, tmp_path, **settings)
    if applied == "after":
        longce.apply_longce(trainer.model, context_length=K, stride=D)
    trainer.train()
    texts = texts_of(trainer)
    answers = [chat_tokenizer.decode([token for token in labels if token != -100]) for _, labels in texts]
    assert sorted(answers) == sorted(chat["messages"][1]["content"] + "</s>" for chat in CHATS)
    expected = copy.deepcopy(start)
    losses = take_steps(expected, [texts] * len(logged_losses(trainer)))
    assert logged_losses(trainer) == pytest.approx(losses, rel=1e-6)
    assert change_error(model, expected, start) < 1e-6  # norms round to float32, also in float64


def test_sft_trainer_in_two_processes(model, chat_tokenizer, tmp_path):
    """Two processes with half of each batch train as one does."""
    model.double()
    start = copy.deepcopy(model).eval()
    model.save_pretrained(tmp_path / "model")
    chat_tokenizer.save_pretrained(tmp_path / "model")
    arguments = {**SETTINGS, "per_device_train_batch_size": 1, "assistant_only_loss": True, "max_length": None}
    arguments |= {"bf16": False, "gradient_checkpointing": False}
    (tmp_path / "settings.json").write_text(json.dumps({"arguments": arguments, "rows": CHATS}))
    run_like_torchrun(trl_training.train, tmp_path, K, D, log=tmp_path / "printed")
    expected = copy.deepcopy(start)
    losses = take_steps(expected, [texts_of(sft(model, chat_tokenizer, tmp_path / "one"))] * 2)
    for rank in range(2):
        model = copy.deepcopy(start)
        model.load_state_dict(torch.load(tmp_path / f"weights-{rank}.pt"))
        assert change_error(model, expected, start) < 1e-6
    log = json.loads((tmp_path / "log-0.json").read_text())
    assert [entry["loss"] for entry in log if "loss" in entry] == pytest.approx(losses, rel=1e-6)


def test_sft_trainer_adds_adapters(model, chat_tokenizer, tmp_path):
    model.double()
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    expected = get_peft_model(copy.deepcopy(model), config).eval()
    longce.apply_longce(model, context_length=K, stride=D)
    trainer = sft(model, chat_tokenizer, tmp_path, peft_config=config)
    expected.load_state_dict(trainer.model.state_dict())
    start = copy.deepcopy(expected)
    losses = take_steps(expected, [texts_of(trainer)] * 2)
    trainer.train()
    assert logged_losses(trainer) == pytest.approx(losses, rel=1e-6)
    assert change_error(trainer.model, expected, start) < 1e-6


@pytest.mark.parametrize("applied", ["before", "after"])
def test_an_sft_trainer_that_computes_its_own_loss_is_refused(applied, model, chat_tokenizer, tmp_path):
    """It replaces the model's ``forward`` when it is made, or would read what only its own ``forward`` returns."""
    if applied == "before":
        longce.apply_longce(model, context_length=K, stride=D)
    trainer = sft(model, chat_tokenizer, tmp_path, trl.SFTTrainer)
    if applied == "after":
        longce.apply_longce(model, context_length=K, stride=D)
    with pytest.raises(RuntimeError, match="trl_sft"):
        trainer.train()


def test_evaluation_of_the_sft_trainer_is_trls(model, chat_tokenizer, tmp_path):
    """Also its metrics, which need no logits."""
    results = []
    for trained in (copy.deepcopy(model), model):
        if trained is model:
            longce.apply_longce(model, context_length=K, stride=D)
        trainer = sft(trained, chat_tokenizer, tmp_path, None if trained is model else trl.SFTTrainer)
        results.append(trainer.evaluate(trainer.train_dataset))
    names = {"eval_loss", "eval_entropy", "eval_mean_token_accuracy"}
    assert {name: results[0][name] for name in names & set(results[0])} == {
        name: results[1][name] for name in names & set(results[1])
    }
    assert "eval_loss" in results[0]
