import json
import math
import re
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.cli import ReduceLROnPlateau
from torch.optim import SGD, AdamW

from callbacks import StepCheckpoint
from lightning_modules.objectives import CrossEntropy
from lightning_modules.training.checkpoints.due_evaluation import EVALUATED_FILE, DueEvaluation, ResumingTrainer
from lightning_modules.training.checkpoints.io import CheckedCheckpointIO
from lightning_modules.training.optimizers import ParameterGroups, WarmupSchedule
from lightning_modules.training.preemption import Preemption
from tests.support.tiny_training import LENGTH, VOCABULARY, lm, loader, row, trainer
from tests.support.trainers import QUIET

WARMUP, DECAY, TOTAL = 4, 5, 20


@pytest.fixture
def settings():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return {
        "model_config": {"model_type": "llama", "vocab_size": VOCABULARY, "num_key_value_heads": 1, **sizes},
        "objective": CrossEntropy(),
        "optimizer": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1),
    }


class Rates(Callback):
    """Keeps the learning rate of each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, *_):
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def warmup(step):
    return min(1, step / WARMUP)


DECAYS = {
    "constant": lambda step: 1,
    "linear": lambda step: (TOTAL - step) / (TOTAL - WARMUP),
    "cosine": lambda step: 0.5 + 0.5 * math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)),
    "warmup_stable_decay": lambda step: (
        1 if step < TOTAL - DECAY else 0.5 + 0.5 * math.cos(math.pi * (step - TOTAL + DECAY) / DECAY)
    ),
}


@pytest.mark.parametrize("name", DECAYS)
def test_each_named_schedule_is_its_formula_until_the_last_step_of_the_trainer(name, settings, tmp_path):
    arguments = {"num_decay_steps": DECAY} if name == "warmup_stable_decay" else None
    module = lm(
        None, lr_scheduler=lambda o: WarmupSchedule(o, name, warmup_steps=WARMUP, arguments=arguments), **settings
    )
    rates = Rates()
    one = trainer(tmp_path, max_steps=TOTAL, callbacks=[rates])
    one.fit(module, loader(*[row(n) for n in range(TOTAL)]))
    (group,) = one.optimizers[0].param_groups
    assert (len(group["params"]), group["weight_decay"]) == (len(list(module.parameters())), 0.1), "without groups"
    expected = [0.01 * (warmup(step) if step < WARMUP else DECAYS[name](step)) for step in range(TOTAL)]
    assert rates.seen == pytest.approx(expected)


@pytest.mark.parametrize(("name", "end"), [("cosine_with_min_lr", "min_lr"), ("polynomial", "lr_end")])
def test_a_schedule_ends_at_the_learning_rate_that_its_arguments_name(name, end):
    optimizer = SGD([torch.zeros(1)], lr=0.02)
    schedule = WarmupSchedule(optimizer, name, arguments={end: 0.005})
    schedule.end_at(TOTAL)
    assert 0.02 * schedule.lr_lambdas[0](TOTAL) == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("option", "arguments", "end"),
    [
        ("triangular", {"name": "triangular"}, TOTAL),
        ("warmup_steps", {"name": "cosine", "warmup_steps": -1}, TOTAL),
        ("total_steps", {"name": "linear", "total_steps": 0}, TOTAL),
        ("arguments", {"name": "warmup_stable_decay"}, TOTAL),
        ("max_steps", {"name": "linear"}, -1),
        ("warmup_steps", {"name": "linear", "warmup_steps": 30}, TOTAL),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(option, arguments, end):
    with pytest.raises(ValueError, match=option):
        WarmupSchedule(SGD([torch.zeros(1)]), **arguments).end_at(end)
    WarmupSchedule(SGD([torch.zeros(1)]), "constant", warmup_steps=30).end_at(-1)  # has no last step


@pytest.mark.parametrize("callback", [LearningRateFinder, BatchSizeFinder])
def test_callbacks_that_search_settings_are_refused(callback, settings, tmp_path):
    with pytest.raises(ValueError, match=f"`{callback.__name__}`"):
        lm(None, **settings).optimization.check(trainer(tmp_path, max_steps=1, callbacks=[callback()]))


def test_a_schedule_that_needs_a_metric_is_stepped_once_after_each_evaluation(settings, tmp_path):
    def plateau(optimizer, monitor="val/perplexity"):
        return ReduceLROnPlateau(optimizer, monitor=monitor, factor=0.5, patience=0, threshold=0.99)

    settings["optimizer"] = lambda parameters: SGD(parameters, lr=0.01)  # hardly learns
    module, rates = lm(None, lr_scheduler=plateau, **settings), Rates()
    fit = {"max_steps": 12, "val_check_interval": 6, "check_val_every_n_epoch": None, "accumulate_grad_batches": 2}
    one = trainer(tmp_path, num_sanity_val_steps=1, callbacks=[rates], **fit)
    one.fit(module, loader(*[row(n) for n in range(8)]), loader(row(50)))  # evaluations are not at the ends of epochs
    # Evaluations after steps 3, 6, 9, and 12. The first one is the best so far; each other one halves the rate.
    assert rates.seen[::2] == pytest.approx([0.01] * 6 + [0.005] * 3 + [0.0025] * 3)
    assert one.lr_scheduler_configs[0].scheduler.num_bad_epochs == 0

    module = lm(None, lr_scheduler=lambda o: plateau(o, "val/longppl"), **settings)
    with pytest.raises(ValueError, match=r"'val/longppl'.*'val/perplexity'"):
        trainer(tmp_path, **fit).fit(module, loader(*[row(n) for n in range(8)]), loader(row(50)))

    module = lm(None, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau, **settings)
    with pytest.raises(ValueError, match="must name its metric"):
        trainer(tmp_path, **fit).fit(module, loader(row(0)))


def test_groups_have_their_own_learning_rates_and_weight_decay_spares_norms_and_biases(settings, tmp_path):
    settings["model_config"]["attention_bias"] = True
    groups = ParameterGroups(learning_rates={"embed_tokens|lm_head": 1e-3, "layers.*norm": 0.02})
    module = lm(None, parameter_groups=groups, lr_scheduler=lambda o: WarmupSchedule(o, "constant", 2), **settings)
    one = trainer(tmp_path, max_steps=3)
    one.fit(module, loader(*[row(n) for n in range(3)]))
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = {}
    for group in one.optimizers[0].param_groups:
        for parameter in group["params"]:
            found[names[parameter].removeprefix("backbone.model.")] = (group["lr"], group["weight_decay"])
    assert len(found) == len(names)
    assert found["lm_head.weight"] == found["model.embed_tokens.weight"] == (1e-3, 0.1)
    assert found["model.layers.0.input_layernorm.weight"] == (0.02, 0.0)
    assert found["model.norm.weight"] == found["model.layers.0.self_attn.q_proj.bias"] == (0.01, 0.0)
    assert found["model.layers.0.self_attn.q_proj.weight"] == (0.01, 0.1)
    (group,) = ParameterGroups(decay_norms_and_biases=True).split([("norm.weight", torch.zeros(LENGTH))])
    assert "weight_decay" not in group
    with pytest.raises(ValueError, match="'lora_B'"):
        ParameterGroups(learning_rates={"lora_B": 1.0}).split([("norm.weight", torch.zeros(LENGTH))])


@pytest.mark.parametrize(("pattern", "rate"), [("*norm", 1.0), ("norm", -1.0), ("norm", math.inf)])
def test_learning_rates_that_cannot_be_meant_are_refused_before_anything_is_loaded(pattern, rate):
    with pytest.raises(ValueError, match=f"learning_rates` '{re.escape(pattern)}'"):
        ParameterGroups(learning_rates={pattern: rate})


def test_a_resumed_run_continues_its_schedule_and_its_groups(settings, tmp_path):
    def run(steps, **fit):
        groups = ParameterGroups(learning_rates={"embed_tokens": 1e-3})
        module = lm(
            None,
            parameter_groups=groups,
            lr_scheduler=lambda o: WarmupSchedule(o, "linear", 2, total_steps=9),
            **settings,
        )
        rates, plugins = Rates(), [CheckedCheckpointIO()]
        one = trainer(tmp_path, max_steps=steps, callbacks=[rates], plugins=plugins)
        one.fit(module, loader(*[row(0)] * 8), **fit)  # the loader would start again
        return one, module, rates.seen

    torch.manual_seed(0)
    _, whole, expected = run(8)
    torch.manual_seed(0)
    first, _, before = run(4)
    first.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed, after = run(8, ckpt_path=tmp_path / "half.ckpt")
    assert before + after == expected == pytest.approx([0, 5e-4, *(1e-3 * (9 - step) / 7 for step in range(2, 8))])
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_that_resumes_beyond_its_last_step_has_the_schedule_of_the_longer_run(settings, tmp_path):
    def run(steps, **fit):
        module = lm(None, lr_scheduler=lambda o: WarmupSchedule(o, "cosine"), **settings)
        rates = Rates()
        one = trainer(tmp_path, max_steps=steps, callbacks=[rates], plugins=[CheckedCheckpointIO()])
        one.fit(module, loader(*[row(0)] * 8), **fit)
        return one, rates.seen

    run(4)[0].save_checkpoint(tmp_path / "half.ckpt")
    _, after = run(8, ckpt_path=tmp_path / "half.ckpt")
    assert after == pytest.approx([0.005 + 0.005 * math.cos(math.pi * step / 8) for step in range(4, 8)])


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_schedule_that_needs_a_metric_knows_the_evaluation_after_the_checkpoint_that_resumes(settings, tmp_path):
    settings["optimizer"] = lambda parameters: SGD(parameters, lr=0.01)  # hardly learns

    def run(**fit):
        rates = Rates()
        save = StepCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        options = {"max_steps": 12, "val_check_interval": 3, "enable_checkpointing": True, "num_sanity_val_steps": 0}
        callbacks = [rates, save, DueEvaluation(Preemption().signal)]
        one = ResumingTrainer(callbacks=callbacks, **{**QUIET, **options}, plugins=[CheckedCheckpointIO()])
        plateau = partial(ReduceLROnPlateau, monitor="val/perplexity", factor=0.5, patience=0, threshold=0.99)
        module = lm(None, lr_scheduler=plateau, **settings)
        one.fit(module, loader(*[row(n) for n in range(12)]), loader(row(50)), **fit)
        return rates.seen

    expected = run()
    assert expected == pytest.approx([0.01] * 6 + [0.005] * 3 + [0.0025] * 3)
    # The checkpoint was saved before the evaluation at its step, and the run was killed after both.
    (tmp_path / EVALUATED_FILE).write_text(json.dumps({"run": None, "step": 6}))
    assert run(ckpt_path=tmp_path / "step=6.ckpt") == expected[6:]
