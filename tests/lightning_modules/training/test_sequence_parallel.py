"""The same numbers whether a process has whole rows or shares each with others (DeepSpeed Ulysses)."""

import functools
import os
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from callbacks import ExternalEvaluator
from datamodules import PG19DataModule
from datamodules.packing.positions import PoSE
from lightning_modules.batch import IGNORE_INDEX, pack_sequence, with_scored
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.attention import document_attention, register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone, load_config
from lightning_modules.objectives import CrossEntropy, LongCE
from lightning_modules.training.preflight import check_sequence_parallelism
from lightning_modules.training.sequence_parallel import (
    FullyShardedUlyssesStrategy,
    SequenceGroup,
    UlyssesStrategy,
    check_processes,
    sequence_parallel_size,
)
from tests.conftest import make_text, tiny_config, tiny_model
from tests.support.distributed import run_distributed
from tests.support.packing import assume_isolation
from tests.support.runs import Losses, assert_same, logged_values, whole
from tests.support.trainers import quiet_trainer

# One of the books is too short for a key token.
pytestmark = pytest.mark.filterwarnings("ignore:1 of 5 val documents have no key token")

STEPS, ROW = 5, 65  # tokens of a row, which neither 2 nor 4 divides
EABF = {"method": "eabf", "original_length": 16, "target_length": 128}
VARIANTS = {
    "longce": {"gradient_checkpointing": True, "context_extension": EABF},
    "cross entropy": {"objective": CrossEntropy(), "gradient_checkpointing": "selective"},
    "lora": {
        "lora": {"r": 2, "target_modules": ["q_proj", "lm_head"], "modules_to_save": ["norm"]},
    },
}
VARIANTS["sliding window"] = {**VARIANTS["longce"], "short_method": "sliding_window"}
VARIANTS["layers with windows"] = {"gradient_checkpointing": True}  # of another model
SKIPPING = ("longce", "sliding window")
"""Variants whose positions skip."""
RUNS = [("ddp", "longce"), ("fsdp", "lora"), ("ddp", "layers with windows"), ("ddp", "cross entropy")]
STRATEGIES = {"ddp": UlyssesStrategy, "fsdp": FullyShardedUlyssesStrategy}


@pytest.fixture(scope="module")
def setup(tokenizer, evaluator_dir, tmp_path_factory):
    """Books, and two models with fewer key-value heads than processes.

    EABF scales the last of the three layers of the first one. The second one is like Gemma 3, with windows of 8 tokens.
    """
    folder = tmp_path_factory.mktemp("sequence parallelism")
    sizes = {"seed": 1, "num_hidden_layers": 3, "num_key_value_heads": 1}
    tiny_model("llama", len(tokenizer), **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    windowed = tmp_path_factory.mktemp("layers with windows")
    sizes |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
    # With tied weights, a random model of these sizes always repeats its last token.
    tiny_model("gemma3_text", len(tokenizer), **sizes, tie_word_embeddings=False).save_pretrained(windowed)
    tokenizer.save_pretrained(windowed)
    lengths = {"train": [150, 20, 250, 5, 150], "validation": [60, 3, 80, 40, 71]}
    for split, words in lengths.items():
        (folder / split).mkdir()
        for number, count in enumerate(words):
            (folder / split / f"{number}.txt").write_text(make_text(count, seed=100 * len(split) + number))
    return SimpleNamespace(folder=str(folder), windowed=str(windowed), evaluator=str(evaluator_dir))


def train(setup, root, variant, *, strategy="auto", processes=1, accumulated=2):
    """Five steps with clipping and accumulation, then validation."""
    torch.manual_seed(0 if strategy == "auto" else int(os.environ["LOCAL_RANK"]))  # processes draw windows together
    module = LongContextLM(
        setup.windowed if variant == "layers with windows" else setup.folder,
        context_length=16,
        stride=16,
        dtype="float64",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        **({"objective": LongCE()} | VARIANTS[variant]),
    )
    judge = ExternalEvaluator(
        setup.evaluator, context_length=16, stride=16, alpha=0.5, beta=-6.0, cache_dir=str(root / f"by {strategy}")
    )
    trainer = quiet_trainer(
        root,
        judge,
        strategy="auto" if strategy == "auto" else STRATEGIES[strategy](sequence_parallel_size=2),
        devices=processes,
        inference_mode=strategy != "fsdp",
        num_sanity_val_steps=0,
        max_steps=STEPS,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=1.0,
        val_check_interval=STEPS * accumulated,
    )
    losses = Losses(module)
    pose = PoSE(EABF["target_length"]) if variant in SKIPPING else None
    settings = {"path": setup.folder, "sequence_length": ROW, "cache_dir": str(root / "tokens"), "pose": pose}
    data = PG19DataModule(setup.folder, **settings)
    widths = seen_tokens(module)
    trainer.fit(module, data)
    assert len(losses.values) == STEPS
    results = {
        "losses": torch.tensor(losses.values, dtype=torch.float64),
        "longppl": trainer.callback_metrics["val/longppl"],
        "longppl_soft": trainer.callback_metrics["val/longppl_soft"],
        "perplexity": module._perplexities[""].compute(),
        "logged": logged_values(trainer),
        "tokens_per_step": module.training_facts().tokens_per_step,
        "weights": {name: whole(tensor) for name, tensor in module.named_parameters()},
    }
    return results, widths


def seen_tokens(module):
    """How many tokens of a row are in a layer where gradients are wanted: filled in as training goes on."""
    widths = set()

    def look(layer, inputs):
        if torch.is_grad_enabled():
            widths.add(inputs[0].shape[1])

    module.on_train_start = lambda: module.backbone.decoder.layers[0].mlp.register_forward_pre_hook(look)
    return widths


def other_rows(group):
    """What is said of processes that share a row and were given different ones."""
    tokens = torch.full((1, 4), group.rank)
    batch = pack_sequence([tokens[0]])
    with pytest.raises(ValueError, match="distributed_sampler_kwargs") as error:
        group.check_same_batch(batch)
    group.check_same_batch(batch | {"input_ids": torch.zeros(1, 4)})
    return str(error.value)


def looks_elsewhere(setup, group):
    """What is said of a model of which a part is not attention and looks at other tokens."""
    backbone = load_backbone(ModelConfig(setup.folder))
    with pytest.raises(ValueError, match="isolates packed documents without masks"):
        group.check_backbone(backbone)  # nothing has measured it
    assume_isolation(backbone)
    group.check_backbone(backbone)
    assert backbone.decoder.layers[0].self_attn.num_key_value_groups == 4, "passes that are not shared would use it"
    backbone.decoder.layers[0].mlp.register_forward_hook(lambda _, __, output: output.cumsum(1))
    with pytest.raises(ValueError, match="`sequence_parallel_size`") as error:
        group.check_backbone(backbone)
    backbone.base_model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="'eager'"):
        group.check_backbone(backbone)
    return str(error.value)


def without_shared_memory():
    """DeepSpeed compiles this operator on a CPU, which takes a minute once; nothing here calls it."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _train(rank, processes, setup, root, runs, accumulated):
    os.environ["LOCAL_RANK"] = str(rank)
    without_shared_memory()
    results = {}
    for strategy, variant in runs:
        results[strategy, variant], widths = train(
            setup, root, variant, strategy=strategy, processes=processes, accumulated=accumulated
        )
        assert widths == {33}, "half of 65 tokens, rounded up"
    group = SequenceGroup(dist.group.WORLD)
    results["messages"] = other_rows(group), looks_elsewhere(setup, group)
    sdpa = AttentionInterface()["sdpa"]
    assert getattr(sdpa, "attention", sdpa) is sdpa_attention_forward, "an evaluator would be given the exchange"
    torch.save(results, root / f"rank {rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two(setup, root):
    """What each of two processes found."""
    pytest.importorskip("deepspeed")
    run_distributed(_train, setup, root, RUNS, 2)
    return [torch.load(root / f"rank {rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def one(setup, root):
    """What one process finds; computed when asked for."""
    return functools.cache(lambda variant, accumulated=2: train(setup, root / "one", variant, accumulated=accumulated))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "variant"), RUNS)
def test_losses_weights_and_metrics_are_those_of_whole_rows(two, one, strategy, variant):
    expected, widths = one(variant)
    assert widths == {ROW}
    assert expected["losses"].isfinite().all()
    assert expected["longppl"].isfinite()
    atol = 1e-7 if variant == "layers with windows" else 1e-9  # the norms of Gemma are computed in float32
    for results in two:
        assert_same(results[strategy, variant], expected, atol)


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused_by_all_processes(two):
    assert two[0]["messages"] == two[1]["messages"]


@pytest.mark.slow
def test_two_groups_of_two_processes(setup, one, tmp_path):
    pytest.importorskip("deepspeed")
    runs = [("ddp", "longce"), ("fsdp", "longce"), ("ddp", "sliding window")]
    run_distributed(_train, setup, tmp_path, runs, 1, world_size=4)
    for rank in range(4):
        results = torch.load(tmp_path / f"rank {rank}.pt")
        for strategy, variant in runs:  # the groups draw other windows than a single process does
            assert_same(results[strategy, variant], one(variant)[0])


def _group(rank, size):
    group = SequenceGroup.__new__(SequenceGroup)
    group.rank, group.size = rank, size
    return group


def test_parts_are_the_tokens_and_what_they_predict():
    tokens = torch.arange(10, 17).unsqueeze(0)
    labels = tokens.clone()
    labels[:, [0, 5]] = IGNORE_INDEX
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1]])
    batch = {"input_ids": tokens, "labels": labels, "position_ids": positions, "document_boundaries": [[0, 5, 7]]}
    batch = with_scored(batch)
    shards = [_group(rank, 2).shard(batch) for rank in range(2)]
    no = IGNORE_INDEX
    assert [shard["input_ids"].tolist() for shard in shards] == [[[10, 11, 12, 13]], [[14, 15, 16, 0]]]
    assert [shard["labels"].tolist() for shard in shards] == [[[no, 11, 12, 13, 14]], [[no, no, 16, no, no]]]
    assert [shard["scored"].tolist() for shard in shards] == [shard["labels"].ne(no).tolist() for shard in shards]
    assert [shard["position_ids"].tolist() for shard in shards] == [[[0, 1, 2, 3]], [[4, 0, 1, 0]]]
    assert all(shard["document_boundaries"] == [[0, 5, 7, 8]] for shard in shards)


@pytest.mark.parametrize(
    ("size", "settings", "attention", "named"),
    [
        (3, {}, "auto", "= 3 must divide"),
        (8, {}, "auto", "= 8 must divide"),
        (4, {"num_attention_heads": 24, "num_key_value_heads": 6}, "auto", "6 key-value heads"),
        (2, {}, "flash_attention_2", "`sdpa`"),
        (2, {"architecture": "gemma2"}, "auto", "'gemma2'"),  # caps the scores of its attention
        (2, {"architecture": "mamba"}, "auto", "'mamba'"),
        (2, {"architecture": "llama4_text", "layer_types": ["chunked_attention", "full_attention"]}, "auto", "chunked"),
        (2, {"rope_parameters": {"rope_type": "rerope", "rope_theta": 1e4}}, "auto", "'rerope'"),
        (2, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "auto", "'dynamic'"),
    ],
)
def test_models_whose_rows_cannot_be_shared(size, settings, attention, named):
    config = tiny_config(**({"hidden_size": 48} | settings))
    with pytest.raises(ValueError, match=named):
        check_sequence_parallelism(config, size, attention)
    check_sequence_parallelism(config, 1, attention)


def test_models_whose_rows_can_be_shared(tmp_path):
    for size, heads, key_heads in [(2, 4, 2), (4, 4, 2), (4, 8, 8), (8, 8, 1)]:
        config = tiny_config(num_attention_heads=heads, num_key_value_heads=key_heads, hidden_size=64)
        check_sequence_parallelism(config, size)
    check_sequence_parallelism(tiny_config("mistral", sliding_window=64), 2)
    check_sequence_parallelism(tiny_config("gemma3_text"), 2)
    tiny_config("qwen2").save_pretrained(tmp_path)
    check_sequence_parallelism(load_config(ModelConfig(str(tmp_path), context_extension=EABF)), 2)


def _attend_without_windows(module, *states, attention_window=None, **kwargs):
    return document_attention(module, *states, None, **kwargs)


@pytest.mark.parametrize("attend", [partial(document_attention, attention_mask=None), _attend_without_windows])
def test_the_check_of_a_group_sees_windows_longer_than_its_documents(attend, monkeypatch):
    backbone = Backbone(tiny_model("gemma3_text", attn_implementation=register_document_attention(), sliding_window=64))
    assume_isolation(backbone)
    group = _group(0, 2)

    def score(backbone, batch):
        return backbone(_group(0, 1).shard(batch), exchange=attend)[:, :-1]

    monkeypatch.setattr(group, "sharded_log_likelihood", score)
    is_wrong = attend is _attend_without_windows
    with pytest.raises(ValueError, match="`sequence_parallel_size`") if is_wrong else nullcontext():
        group.check_backbone(backbone)
    assert backbone.base_model.config.sliding_window == 64


def test_groups_need_their_processes():
    check_processes(4, 8)
    with pytest.raises(ValueError, match="`sequence_parallel_size` = 4"):
        check_processes(4, 6)


def test_each_process_has_rows_of_its_own_without_it(monkeypatch):
    trainer = SimpleNamespace(strategy=object(), world_size=2)
    assert sequence_parallel_size(trainer) == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    trainer.strategy = UlyssesStrategy(sequence_parallel_size=2)
    with pytest.raises(ValueError, match="deepspeed"):
        sequence_parallel_size(trainer)


def test_a_mask_of_a_part_is_refused():
    backbone = Backbone(tiny_model())
    backbone.base_model.set_attn_implementation(register_document_attention())
    assert AttentionInterface()["sdpa"] is not None
    with pytest.raises(ValueError, match="`sequence_parallel_size: 1`"):
        backbone.decoder(
            input_ids=torch.zeros(1, 4, dtype=torch.long),
            attention_mask=torch.tensor([[0, 1, 1, 1]]),
            exchange=sdpa_attention_forward,
        )
