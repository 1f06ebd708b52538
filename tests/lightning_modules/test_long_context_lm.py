import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_modules.batch import IGNORE_INDEX, with_scored
from lightning_modules.functional import long_perplexity
from lightning_modules.functional.windows import ShortContext
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models import short_context
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.short_context import (
    ShortContextConfig,
    long_and_short,
    sliding_window_log_likelihood,
)
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.objectives import CrossEntropy, Interpolated, LongCE, Normalized, Scheduled, StoredInfluence
from lightning_modules.training import fsdp
from lightning_modules.training.facts import objective_facts
from lightning_modules.training.preflight import check_fit
from lightning_modules.training.step import REFERENCE_TOKENS, gradient_norm
from tests.conftest import make_text, tiny_model
from tests.support import architectures, reference
from tests.support.tiny_training import LENGTH, VOCABULARY, lm, loader, row, trainer


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama", VOCABULARY, seed=6).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("architecture", "gamma", "checkpointing"),  # all pairs of gamma and checkpointing
    [("llama", 5.0, False), ("llama", 1.5, True), ("mistral", 1.5, False), ("qwen2", 5.0, True)],
)
@pytest.mark.core
def test_longce_loss_and_gradients_match_a_float64_reference(architecture, gamma, checkpointing, tmp_path):
    tiny_model(architecture, VOCABULARY, seed=6).save_pretrained(tmp_path / "model")
    module = lm(str(tmp_path / "model"), objective=LongCE(gamma), gradient_checkpointing=checkpointing)
    module.configure_model()
    batch = row(0, boundaries=(0, 23, LENGTH))
    module.backbone.train()
    loss = module.training_step(batch, 0) * REFERENCE_TOKENS / (LENGTH - 2)
    loss.backward()

    model = copy.deepcopy(module.backbone.model).double().eval()
    model.zero_grad()
    documents = [batch["input_ids"][0, :23], batch["input_ids"][0, 23:]]
    losses = [reference.longce(model, document, 8, 4, gamma) * (len(document) - 1) for document in documents]
    expected = sum(losses) / (LENGTH - 2)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, actual), wanted in zip(module.backbone.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.double(), wanted.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_evaluations_do_not_change_the_losses_of_packed_documents(tmp_path):
    """Of a model whose documents cannot share a pass, which each start of an evaluation had decided again."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(architectures.tiny_config("lfm2"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    rows = [row(seed, (0, 23, LENGTH)) for seed in range(4)]

    def losses(**settings):
        seen = []
        record = LambdaCallback(on_train_batch_end=lambda *args: seen.append(args[2]["loss"].item()))
        module = lm(str(tmp_path / "model"), optimizer=partial(torch.optim.SGD, lr=0.0))
        trainer(tmp_path, max_steps=4, callbacks=[record], **settings).fit(module, loader(*rows), loader(rows[0]))
        assert not module.backbone.isolates_documents
        return seen

    alone = losses(limit_val_batches=0)
    assert losses(val_check_interval=1, num_sanity_val_steps=1) == alone
    documents = [rows[0]["input_ids"][0, :23], rows[0]["input_ids"][0, 23:]]
    exact = [reference.longce(model.eval(), ids, 8, 4, 5.0) * (len(ids) - 1) for ids in documents]
    assert alone[0] == pytest.approx(sum(exact).item() / REFERENCE_TOKENS, rel=1e-4)


class Recorder(torch.optim.SGD):
    """Keeps the gradients of each step and changes nothing."""

    def step(self, closure):
        closure()
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])


def test_cross_entropy_is_that_of_transformers_and_costs_no_short_pass(folder, monkeypatch):
    module = lm(folder, objective=CrossEntropy())
    module.configure_model()
    monkeypatch.setattr(short_context, "short_log_likelihood", None)
    batch = row(1)
    expected = module.backbone.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
    torch.testing.assert_close(module.training_step(batch, 0) * REFERENCE_TOKENS / (LENGTH - 1), expected)


def test_stored_weights_give_the_loss_and_gradients_of_longce_without_a_short_pass(folder, monkeypatch):
    batch = row(0, boundaries=(0, 23, LENGTH))
    long, short = long_and_short(load_backbone(ModelConfig(folder)), batch, ShortContext(8, 4))
    weights = (long - short).exp()
    assert (weights > 4).any()
    results = []
    for objective in (LongCE(4.0), StoredInfluence(4.0)):
        module = lm(folder, objective=objective)
        module.configure_model()
        if objective.uses_stored:
            monkeypatch.setattr(short_context, "short_log_likelihood", None)
            batch["influence"] = weights
        loss = module.training_step(batch, 0)
        loss.backward()
        sums = module._statistics.compute(SingleDeviceStrategy(), gradient_norm(module.parameters()))
        results.append([loss, sums, [parameter.grad for parameter in module.parameters()]])
    torch.testing.assert_close(*results)
    shares = {"weight_above_1", "weight_at_cap", "weight_effective_share"}
    assert set(sums) == {"loss", "perplexity", "gradient_norm", "step_tokens", "weight_mean", *shares}


@pytest.mark.core
def test_fit_logs_means_over_all_micro_batches_and_lowers_the_loss(folder, tmp_path):
    module = lm(folder, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    runner = trainer(tmp_path, max_steps=8, accumulate_grad_batches=2)
    logged = []
    module.log_dict = lambda values, **_: logged.append({name: float(value) for name, value in values.items()})
    module.log = lambda *_, **__: None
    first = copy.deepcopy(module)
    first.configure_model()
    first.backbone.train()
    rows = [row(0), row(1, boundaries=(0, 14))]
    runner.fit(module, loader(*(rows * 8)))

    assert len(logged) == 8
    shares = ("weight_above_1", "weight_at_cap", "weight_effective_share")
    names = ("loss", "perplexity", "weight_mean", *shares, "gradient_norm")
    costs = ("tokens", "gpu_hours", "tokens_per_second", "data_wait")
    assert set(logged[0]) == {f"train/{name}" for name in (*names, *costs)}
    assert [values["train/tokens"] for values in logged] == [(LENGTH + 14) * step for step in range(1, 9)]
    assert 0 <= logged[0]["train/data_wait"] < 1
    with torch.no_grad():
        pairs = [long_and_short(first.backbone, batch, ShortContext(8, 4)) for batch in rows]
    long, short = (torch.cat([part[0][1:] for part in parts]) for parts in zip(*pairs, strict=True))
    weight = (long - short).exp().clamp(max=5)
    assert logged[0]["train/loss"] == pytest.approx(float(-(weight * long).mean()), rel=1e-4)
    assert logged[0]["train/perplexity"] == pytest.approx(float(torch.exp(-long.mean())), rel=1e-4)
    assert logged[0]["train/weight_mean"] == pytest.approx(float(weight.mean()), rel=1e-4)
    assert logged[0]["train/weight_above_1"] == pytest.approx(float((weight > 1).float().mean()))
    assert logged[0]["train/weight_at_cap"] == pytest.approx(float((weight == 5).float().mean()))
    assert logged[0]["train/weight_at_cap"] > 0
    effective = weight.sum() ** 2 / weight.square().sum() / len(weight)
    assert logged[0]["train/weight_effective_share"] == pytest.approx(float(effective), rel=1e-4)
    assert logged[0]["train/tokens_per_second"] > 0
    first.backbone.requires_grad_()
    sizes = (LENGTH - 1, 13)
    parts = zip(weight.split(sizes), rows, strict=True)
    losses = [(part * -first.backbone(batch)[0, 1:]).sum() for part, batch in parts]
    gradients = torch.autograd.grad(sum(losses) / len(weight), [*first.parameters()])
    norm = torch.nn.utils.get_total_norm(gradients)
    assert logged[0]["train/gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert logged[-1]["train/loss"] < 0.9 * logged[0]["train/loss"]


def test_validation_gives_log_likelihoods_and_logs_perplexity(folder, tmp_path):
    module = lm(folder)
    rows = [row(0), row(1, boundaries=(0, 17)), row(2, boundaries=(0, 1))]
    result = trainer(tmp_path).validate(module, loader(*rows), verbose=False)
    with torch.no_grad():
        scores = [module.backbone(batch) for batch in rows]
    everything = torch.cat([part[0, 1:] for part in scores])
    expected = float(long_perplexity(everything, torch.ones_like(everything)))
    assert result[0]["val/perplexity"] == pytest.approx(expected, rel=1e-5)


def test_predict_gives_the_pair_of_each_document(model_dir, tokenizer, tmp_path):
    text = make_text(30)
    document = encode_document(text, tokenizer)
    (scores,) = trainer(tmp_path).predict(lm(str(model_dir)), loader(document))[0]
    assert scores.offsets.tolist() == document["offsets"][0].tolist()
    assert scores.short_context == ShortContext(8, 4)
    assert (scores.long != scores.short)[12:].any()
    assert torch.equal(scores.long[:12], scores.short[:12])


def test_paper_defaults(folder, tmp_path):
    module = lm(folder)
    runner = trainer(tmp_path, max_steps=22)
    rates = []
    module.on_before_zero_grad = lambda optimizer: rates.append(optimizer.param_groups[0]["lr"])
    runner.fit(module, loader(*(row(seed) for seed in range(22))))
    settings = module.optimizers().param_groups[0]
    assert settings["betas"] == (0.9, 0.95)
    assert settings["weight_decay"] == 0
    assert rates[0] == pytest.approx(2e-5 / 20)
    assert rates[9] == pytest.approx(2e-5 / 2)
    assert rates[19:] == pytest.approx([2e-5] * 3)


@pytest.mark.parametrize(("accumulated", "kept"), [(1, [False] * 4), (2, [False, True] * 2)])
def test_gradients_are_freed_after_the_step(folder, tmp_path, monkeypatch, accumulated, kept):
    module, found = lm(folder), []
    original = module.training_step

    def look(*arguments):
        found.append(any(parameter.grad is not None for parameter in module.parameters()))
        return original(*arguments)

    monkeypatch.setattr(module, "training_step", look)
    trainer(tmp_path, accumulate_grad_batches=accumulated, max_steps=4 // accumulated).fit(
        module, loader(*map(row, range(4)))
    )
    assert found == kept


def test_dropout_and_checkpointing_are_on_in_training(folder, tmp_path, monkeypatch):
    module = lm(folder, gradient_checkpointing=True)
    modes = []
    original = module.training_step
    monkeypatch.setattr(
        module,
        "training_step",
        lambda *a: modes.append(all(m.training for m in module.backbone.modules())) or original(*a),
    )
    trainer(tmp_path).fit(module, loader(row(0), row(1)), loader(row(2)))
    assert modes == [True, True]
    module.backbone.eval()
    with pytest.raises(RuntimeError, match="eval mode"):
        module.on_train_batch_start(row(0), 0)


def test_a_loss_that_is_not_finite_changes_no_weight_and_does_not_stop_the_next_run(folder, tmp_path):
    module = lm(folder, objective=BrokenOnce())
    module.configure_model()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(FloatingPointError, match="objective BrokenOnce returned 39 NaN token weights at step 0"):
        trainer(tmp_path, accumulate_grad_batches=3).fit(module, loader(*(row(seed) for seed in range(3))))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    trainer(tmp_path).fit(module, loader(row(0)))


def test_a_loss_of_another_process_that_is_not_finite_stops_this_one(folder, tmp_path, monkeypatch):
    module = lm(folder)
    reduce = SingleDeviceStrategy.reduce
    monkeypatch.setattr(SingleDeviceStrategy, "reduce", lambda *args, **kwargs: reduce(*args, **kwargs) + float("nan"))
    with pytest.raises(FloatingPointError, match="The loss of another process is not finite at step 0"):
        trainer(tmp_path).fit(module, loader(row(0)))


def test_a_run_interrupted_within_a_step_does_not_change_the_next_one(folder, tmp_path):
    def fit(module):
        runner = trainer(tmp_path, max_steps=1)
        runner.fit(module, loader(row(0)))
        return runner.callback_metrics["train/loss"]

    expected, module = fit(lm(folder)), lm(folder)
    module.on_train_batch_end = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, accumulate_grad_batches=2).fit(module, loader(row(1), row(2)))
    del module.on_train_batch_end
    torch.testing.assert_close(fit(module), expected)


class BrokenOnce(CrossEntropy):
    """The weights of the second batch are NaN."""

    batches = 0

    def token_weights(self, long, short, batch):
        self.batches += 1
        return torch.full_like(long, float("nan") if self.batches == 2 else 1.0)


class AverageOfLastSteps(WeightAveraging):
    """A user's own averaging."""


@pytest.mark.parametrize("callback", [StochasticWeightAveraging(0.1), EMAWeightAveraging(), AverageOfLastSteps()])
@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_weight_averaging_of_lightning_is_refused_before_weights_are_loaded(folder, tmp_path, callback, lora):
    module = lm(folder, lora=lora)
    with pytest.raises(ValueError, match=f"`{type(callback).__name__}` is not supported.*Remove it"):
        trainer(tmp_path, callbacks=[callback]).fit(module, loader(row(0)))
    assert not list(module.parameters())


def test_edited_labels_are_noticed_and_used_after_with_scored(folder):
    module, edited = lm(folder), row(0)
    module.configure_model()
    edited["labels"][0, 20:25] = edited["labels"][0, 32] = IGNORE_INDEX
    short = partial(module.short_context.score, module.backbone)
    for score in (module.log_likelihood, lambda batch: short(batch).log_likelihood):
        with pytest.raises(RuntimeError, match="call `with_scored`"):
            score(edited)
        kept = edited["labels"].ne(IGNORE_INDEX)
        assert torch.equal(score(with_scored(edited)), score(row(0)).masked_fill(~kept, 0))


@pytest.mark.parametrize("boundaries", [[0, 30, 20, LENGTH], [5, LENGTH], [0, LENGTH + 1]])
def test_boundaries_of_another_loader_that_do_not_ascend_within_the_sequence_are_refused(folder, boundaries):
    module, batch = lm(folder), row(0)
    module.configure_model()
    module.backbone.train()
    del batch["scored"]
    batch["document_boundaries"] = [boundaries]
    with pytest.raises(ValueError, match="must ascend"):
        module.on_train_batch_start(batch, 0)


STORED = row(0)
STORED["influence"] = torch.ones(1, LENGTH)


@pytest.mark.parametrize(
    ("settings", "batch", "named"),
    [
        ({}, row(0, vocabulary=5000), "embedding of 90 tokens"),
        ({"context_length": 36}, row(0), r"36 \+ 4 = 40"),
        ({"short_method": "sliding_window", "attn_implementation": "eager"}, row(0), "ignores the window"),
        ({"objective": StoredInfluence()}, row(0), r"`data\.influence`"),
        ({"objective": CrossEntropy()}, STORED, r"CrossEntropy.*`model\.objective`"),
    ],
)
def test_sequences_that_do_not_fit_the_run_are_refused(folder, tmp_path, settings, batch, named):
    with pytest.raises(ValueError, match=named):
        trainer(tmp_path).fit(lm(folder, **settings), loader(batch))


def test_an_objective_without_a_short_context_trains_on_sequences_of_any_length(folder, tmp_path):
    trainer(tmp_path).fit(lm(folder, context_length=36, objective=CrossEntropy()), loader(row(0)))


def test_an_empty_training_set_is_no_success(folder, tmp_path):
    zero = pytest.warns(UserWarning, match="Total length of .* across ranks is zero")
    with pytest.raises(ValueError, match="nothing to train on"), zero:
        trainer(tmp_path).fit(lm(folder), DataLoader([], batch_size=None))


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
def test_precisions_leave_positions_and_sums_alone(folder, tmp_path, precision):
    module = lm(folder)
    runner = trainer(tmp_path, precision=precision)
    runner.fit(module, loader(row(0), row(1)), loader(row(2)))
    rotary = module.backbone.model.model.rotary_emb.inv_freq
    assert rotary.dtype == torch.float32
    dimension = 8
    expected = 1.0 / 10000.0 ** (torch.arange(0, dimension, 2) / dimension)
    torch.testing.assert_close(rotary, expected)
    assert module._perplexities[""].log_likelihood.dtype == torch.float64
    assert math.isfinite(runner.callback_metrics["val/perplexity"])
    expected_dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert next(module.backbone.parameters()).dtype == expected_dtype


@pytest.mark.filterwarnings("ignore:Found keys that are in the model state dict but not")  # it holds the adapters only
def test_checkpoint_loads_without_pickle_and_scores_the_same(folder, tmp_path):
    module = lm(folder, lora={"r": 2, "target_modules": ["q_proj"]}, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    runner = trainer(tmp_path)
    runner.fit(module, loader(row(0), row(1)))
    runner.save_checkpoint(tmp_path / "last.ckpt")
    loaded = LongContextLM.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded.backbone.eval()(row(3)), module.backbone.eval()(row(3)))


def test_training_with_a_sliding_window_weighs_tokens_by_it(folder, tmp_path):
    module = lm(folder, objective=LongCE(4.0), short_method="sliding_window")
    module.configure_model()
    batch = row(0, boundaries=(0, 23, LENGTH))
    short = module.short_context.score(module.backbone, batch)
    expected = sliding_window_log_likelihood(module.backbone, batch, context_length=8)
    assert torch.equal(short.log_likelihood, expected.log_likelihood)
    exact = lm(folder, objective=LongCE(4.0))
    exact.configure_model()
    losses = [each.training_step(batch, 0).item() for each in (module, exact)]
    assert losses[0] != losses[1]
    trainer(tmp_path).fit(module, loader(batch, row(1)))
    facts = module.training_facts()
    assert (facts.objective["short_method"], facts.context_length, facts.stride) == ("sliding_window", 8, None)


@pytest.mark.parametrize(("option", "value"), [("context_length", 0), ("stride", -1)])
def test_options_without_a_meaning_are_refused_before_anything_is_loaded(option, value):
    with pytest.raises(ValueError, match=option):
        lm("no/such", **{option: value})


def test_a_device_without_float64_is_refused_before_weights_are_read(folder, monkeypatch):
    module = LongContextLM(folder, context_length=8, stride=4)
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("mps")), precision="32-true")
    monkeypatch.setattr(fsdp, "load_backbone", lambda **_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=r"Apple's GPUs do not support float64.*: set `trainer.accelerator: cpu`"):
        module.configure_model()


def test_a_schedule_makes_short_passes_only_where_there_are_weights(folder, tmp_path, monkeypatch):
    module = lm(folder, objective=Scheduled(LongCE(), start=1, warmup=2, stop=4))
    fit = trainer(tmp_path, max_steps=6, accumulate_grad_batches=2)
    passes, logged, short_pass = [], [], ShortContextConfig.score

    def count(*args, **options):
        passes.append(fit.global_step)
        return short_pass(*args, **options)

    monkeypatch.setattr(ShortContextConfig, "score", count)
    module.log_dict = lambda values, **_: logged.append({key: float(value) for key, value in values.items()})
    module.log = lambda *_, **__: None
    fit.fit(module, loader(*[row(seed) for seed in range(12)]))
    assert passes == [2, 2, 3, 3], "half of the weights in the first, all of them in the second"
    assert [values["train/weight_mean"] == 1 for values in logged] == [True, True, False, False, True, True]
    assert [values["train/weight_at_cap"] > 0 for values in logged] == [False, False, True, True, False, False]
    assert len({tuple(sorted(values)) for values in logged}) == 1, "the same curves throughout"


def test_facts_of_an_objective_in_another_one():
    objective = Interpolated(Normalized(LongCE(3.0)), 0.25)
    facts = objective_facts(objective, ShortContextConfig(8, 4))["objective"]
    inner = {"name": "Normalized", "objective": {"name": "LongCE", "gamma": 3.0}}
    assert facts == {"name": "Interpolated", "objective": inner, "cross_entropy_share": 0.25}


def test_the_loss_that_balances_experts_is_not_left_out_silently():
    config = {"model_type": "mixtral", "output_router_logits": True}
    module = LongContextLM(model_config=config)
    with pytest.raises(ValueError, match="set `output_router_logits` to false"):
        module.check_early(8192)
    module.check_early(None)  # evaluation
    backbone = Backbone(tiny_model("mixtral", num_local_experts=2, output_router_logits=True))
    with pytest.raises(ValueError, match="set `output_router_logits` to false"):  # without the command line
        check_fit(module.objective, module.loading, backbone, SimpleNamespace())
    LongContextLM(model_config={"model_type": "mixtral"}).check_early(8192)
