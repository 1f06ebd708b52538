"""The same numbers by one process and by two, whether each holds all weights (DDP) or a part of them (FSDP2)."""

import functools
import os
import traceback
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lightning_modules.export.checkpoint import export_checkpoint
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.scored_model import open_evaluator
from lightning_modules.training import fsdp
from lightning_modules.training.fsdp import (
    FullyShardedStrategy,
    data_parallel_mesh,
    load_sharded_backbone,
)
from tests.conftest import make_text, tiny_model
from tests.lightning_modules.training.checkpoints.test_sharded import fail_in_one
from tests.support.distributed import run_distributed
from tests.support.runs import (
    STEPS,
    VARIANTS,
    Losses,
    assert_same,
    evaluate,
    make_data,
    make_module,
    make_trainer,
    train,
    whole,
)

DOCUMENTS = (1, 3)


def resume(setup, root, processes, parts, strategy="fsdp"):
    """Weights after five steps at once, and after five of which the last two go on from a checkpoint."""
    results, folder = [], root / f"{'offload' if strategy == 'offload' else 'parts'} {parts}"
    for start in (None, str(folder / "third.ckpt")):
        torch.manual_seed(0)
        saver = ModelCheckpoint(folder, filename="third", every_n_train_steps=3, save_top_k=-1)
        settings = {"callbacks": [saver], "enable_checkpointing": True, "max_steps": STEPS, "limit_val_batches": 0}
        trainer = make_trainer(root, processes, strategy, parts=parts, **settings)
        module = make_module(setup, "lora")
        trainer.fit(module, make_data(setup), ckpt_path=start, weights_only=True)
        results.append({name: whole(tensor) for name, tensor in module.named_parameters()})
    assert (folder / "third.ckpt").is_dir() == parts
    return results


def partly_known(setup, root, rank):
    """One process asks a divided evaluator for what it knows, the other for what nobody has scored."""
    settings = {"context_length": 16, "stride": 16, "cache_dir": str(root / f"evaluator {rank}")}
    evaluator = open_evaluator(EvaluatorConfig(setup.evaluator, sharded=True, **settings))
    first, second = make_text(60, seed=1), make_text(90, seed=2)
    evaluator.scores(first)
    divided = isinstance(next(evaluator._backbone.parameters()), DTensor)
    scores = [evaluator.scores(text) for text in (first if rank == 0 else second, second, "too short")]
    evaluator.join()
    return divided, [torch.stack([pair.long, pair.short]) for pair in scores]


def half_precision(setup, root, processes, precision):
    """Losses of two steps, and what the types of things are in between."""
    seen = {}

    def look(layer, inputs):
        seen["gathered"] = layer.self_attn.q_proj.weight.dtype
        seen["residual"] = inputs[0].dtype
        seen["frequencies"] = module.backbone.decoder.rotary_emb.inv_freq

    torch.manual_seed(0)
    module = make_module(setup, dtype="float32")
    trainer = make_trainer(root, processes, "fsdp", precision=precision, max_steps=2, limit_val_batches=1)
    losses = Losses(module)
    module.on_train_start = lambda: module.backbone.decoder.layers[1].register_forward_pre_hook(look)
    trainer.fit(module, make_data(setup))
    return {**seen, "losses": losses.values, "kept": next(module.parameters()).dtype}


def failure_of(function, *arguments):
    """What went wrong, for a test to show; the others are none the worse for it."""
    try:
        function(*arguments)
    except Exception:
        return traceback.format_exc()
    return None


def _run(rank, processes, setup, root):
    """Everything that takes several processes, in one start of them."""
    os.environ["LOCAL_RANK"] = str(rank)
    results = {}
    for strategy in ("ddp", "fsdp"):
        for variant in VARIANTS:
            results[strategy, variant] = train(setup, root, processes, strategy, variant)
        for documents in DOCUMENTS:
            results[strategy, documents] = evaluate(setup, root, processes, strategy, documents, sharded=documents == 3)
    for parts in (True, False):
        results["resumed", parts] = resume(setup, root, processes, parts)
        results["offloaded and resumed", parts] = resume(setup, root, processes, parts, "offload")
    with mock.patch.object(fsdp, "fully_shard", wraps=fsdp.fully_shard) as fully_shard:
        results["offload", "full"] = train(setup, root, processes, "offload", "full", offload_activations=True)
    results["policies"] = {type(call.kwargs.get("offload_policy")).__name__ for call in fully_shard.call_args_list}
    for precision in ("bf16-mixed", "bf16-true"):
        results[precision] = half_precision(setup, root, processes, precision)
    results["partly known"] = partly_known(setup, root, rank)
    results["one cannot write"] = failure_of(fail_in_one, rank, root / "together")
    torch.save(results, root / f"rank {rank}.pt")


def _evaluate(rank, processes, setup, root):
    os.environ["LOCAL_RANK"] = str(rank)
    results = {number: evaluate(setup, root, processes, "fsdp", number, sharded=True) for number in (1, 4)}
    torch.save(results, root / f"rank {rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two(setup, root):
    """What each of two processes found."""
    run_distributed(_run, setup, root)
    return [torch.load(root / f"rank {rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def one(setup, root):
    """What one process finds; computed when asked for."""
    return functools.cache(lambda variant: train(setup, root / "one", 1, "auto", variant))


@pytest.fixture(scope="module")
def one_evaluated(setup, root):
    """What one process finds in some documents; computed when asked for."""
    return functools.cache(lambda documents: evaluate(setup, root / "one", 1, "auto", documents))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:. of 7 val documents have no key token")  # two or three of them are too short
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_losses_weights_and_metrics_are_those_of_one_process(two, one, strategy, variant):
    expected = one(variant)
    assert expected["losses"].isfinite().all()
    assert expected["logged"]["val/documents_without_key_tokens"] == 2
    for results in two:
        assert_same(results[strategy, variant], expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_each_document_counts_once_also_if_there_are_fewer_than_processes(
    two, one_evaluated, strategy, documents, recwarn
):
    expected = one_evaluated(documents)
    assert len(expected["pairs"]) == documents
    for results in two:
        assert_same(results[strategy, documents], expected)


@pytest.mark.slow
def test_three_processes_with_a_divided_evaluator(setup, one_evaluated, tmp_path, recwarn):
    run_distributed(_evaluate, setup, tmp_path, world_size=3)
    for documents in (1, 4):
        expected = one_evaluated(documents)
        for rank in range(3):
            assert_same(torch.load(tmp_path / f"rank {rank}.pt")[documents], expected)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [True, False])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(two, parts):
    for results in two:
        uninterrupted, resumed = results["resumed", parts]
        assert_same(resumed, uninterrupted)


@pytest.mark.slow
def test_offloading_changes_no_bit(two):
    for results in two:
        assert results["policies"] == {"CPUOffloadPolicy"}
        torch.testing.assert_close(results["offload", "full"], results["fsdp", "full"], rtol=0, atol=0)


def test_offloaded_weights_stay_in_host_memory_and_follow_casts():
    backbone = Backbone(tiny_model())
    embedding, norm = backbone.base_model.get_input_embeddings(), backbone.decoder.norm
    weight, mesh = embedding.weight.detach(), DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=0)
    spec = DTensorSpec(mesh, (Replicate(),), TensorMeta(weight.shape, weight.stride(), weight.dtype))
    embedding.weight = nn.Parameter(DTensor(weight, spec, requires_grad=False))
    assert backbone.device.type == "cuda"
    backbone.to("meta").to(torch.bfloat16)
    placed = [(each.weight.device.type, each.weight.dtype) for each in (embedding, norm)]
    assert placed == [("cpu", torch.bfloat16), ("meta", torch.bfloat16)]


def test_gradients_in_host_memory_are_summed_by_gloo(monkeypatch):
    """Without a GPU, only the choice of the backend can be tested."""
    monkeypatch.setattr(ModelParallelStrategy, "setup_environment", lambda _: None)
    for offload, backend in ((True, "cpu:gloo,cuda:nccl"), (False, None)):
        strategy = FullyShardedStrategy(offload=offload)
        strategy.parallel_devices, strategy.cluster_environment = [torch.device("cuda:0")], LightningEnvironment()
        strategy.setup_environment()
        assert strategy.process_group_backend == backend


@pytest.mark.slow
@pytest.mark.parametrize("parts", [True, False])
def test_an_offloaded_run_resumes_bit_for_bit(two, parts):
    for results in two:
        uninterrupted, resumed = results["offloaded and resumed", parts]
        torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)
        torch.testing.assert_close(uninterrupted, results["resumed", parts][0], rtol=0, atol=0)


@pytest.mark.slow
def test_if_one_process_cannot_write_none_waits_and_the_old_checkpoint_stays(two):
    assert [results["one cannot write"] for results in two] == [None, None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_one_file_of_divided_weights_is_like_any_other(two, setup, root):
    """It holds what is trained only; one process reads it and goes on."""
    path = root / "parts False" / "third.ckpt"
    names = torch.load(path, weights_only=True)["state_dict"]
    assert all("lora" in name or "modules_to_save" in name for name in names)
    module = make_module(setup, "lora")
    trainer = make_trainer(root, 1, "auto", max_steps=STEPS, limit_val_batches=0)
    trainer.fit(module, make_data(setup, batch_size=2), ckpt_path=str(path), weights_only=True)
    assert trainer.global_step == STEPS
    assert (root / "parts True" / "third.ckpt").is_dir()


@pytest.mark.slow
def test_checkpoints_of_divided_weights_are_exported(two, root, tmp_path):
    parts, whole_file = (root / f"parts {parts}" / "third.ckpt" for parts in (True, False))
    exported = [
        load_backbone(ModelConfig(str(export_checkpoint(str(file), str(tmp_path / folder))))).state_dict()
        for file, folder in ((parts, "from parts"), (whole_file, "from one"))
    ]
    torch.testing.assert_close(*exported, rtol=0, atol=0)


@pytest.mark.slow
def test_a_divided_evaluator_serves_who_asks(two, setup, tmp_path):
    evaluator = open_evaluator(EvaluatorConfig(setup.evaluator, context_length=16, stride=16, cache_dir=str(tmp_path)))
    for rank, results in enumerate(two):
        divided, pairs = results["partly known"]
        assert divided
        texts = (make_text(60, seed=1) if rank == 0 else make_text(90, seed=2), make_text(90, seed=2), "too short")
        scores = [evaluator.scores(text) for text in texts]
        torch.testing.assert_close(pairs, [torch.stack([pair.long, pair.short]) for pair in scores])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_is_that_of_the_products_and_not_of_the_rotation(two, precision):
    results = two[0][precision]
    mixed = precision == "bf16-mixed"
    assert results["gathered"] == results["residual"] == torch.bfloat16
    assert results["kept"] == (torch.float32 if mixed else torch.bfloat16)
    expected = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(results["frequencies"], expected)
    exact = two[0]["fsdp", "full"]["losses"]
    assert results["losses"][0] == pytest.approx(exact[0].item(), rel=0.3)


def _strategy(kind, tensor_parallel=1):
    strategy = kind.__new__(kind)
    sizes = {"tensor_parallel": SimpleNamespace(size=lambda: tensor_parallel)}
    strategy._device_mesh = sizes
    return SimpleNamespace(strategy=strategy, validate_loop=SimpleNamespace(inference_mode=True))


@pytest.mark.parametrize(
    ("trainer", "named"),
    [
        (_strategy(FSDPStrategy), "FSDP1"),
        (_strategy(DeepSpeedStrategy), "DeepSpeed"),
        (_strategy(ModelParallelStrategy, 4), "size 4"),
        (_strategy(FullyShardedStrategy), "inference_mode: false"),
    ],
)
def test_what_cannot_be_divided_is_refused(trainer, named):
    with pytest.raises(ValueError, match=named):
        data_parallel_mesh(trainer)


def test_quantized_weights_are_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="`quantization`"):
        load_sharded_backbone(ModelConfig("model", quantization={"load_in_4bit": True}), None, device="cpu")
