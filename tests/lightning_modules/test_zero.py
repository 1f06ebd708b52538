"""DeepSpeed on two processes gives the numbers of one process without it."""

import importlib.util
import os
import pickle
import shutil
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_modules.export import export_checkpoint
from lightning_modules.loading import load_backbone
from lightning_modules.sharding import prepare_deepspeed
from lightning_modules.zero_checkpoints import check_zero_checkpoint
from tests.conftest import tiny_model
from tests.distributed import run_distributed
from tests.runs import Losses, evaluate, make_data, make_module, make_trainer, train, whole

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

RUNS = [("deepspeed_3", "full"), ("deepspeed_1", "lora")]
FLOAT32 = {"dtype": "float32"}  # DeepSpeed knows no float64
UNEVEN = {"uneven": True, **FLOAT32}


def resume(setup, root, processes):
    """Weights after four steps at once, and after four of which the last one goes on from a checkpoint."""
    results = []
    for start in (None, str(root / "third.ckpt")):
        torch.manual_seed(0)
        saver = ModelCheckpoint(root, filename="third", every_n_train_steps=3, save_top_k=-1)
        settings = {"callbacks": [saver], "enable_checkpointing": True, "max_steps": 4, "limit_val_batches": 0}
        trainer = make_trainer(root, processes, "deepspeed_3", **settings)
        module = make_module(setup, "lora", **FLOAT32)
        trainer.fit(module, make_data(setup), ckpt_path=start)
        results.append({name: whole(tensor) for name, tensor in module.named_parameters()})
        empty = all(parameter.numel() == 0 for parameter in module.parameters())
    return empty, results


def half_precision(setup, root, processes):
    """A model whose head is its embedding, in bfloat16, and what the types of things are."""
    torch.manual_seed(0)
    module = make_module(SimpleNamespace(model=setup.tied), **FLOAT32)
    trainer = make_trainer(root, processes, "deepspeed_3", precision="bf16-mixed", max_steps=1, limit_val_batches=0)
    losses = Losses(module)
    trainer.fit(module, make_data(setup))
    frequencies = module.backbone.decoder.rotary_emb.inv_freq
    return {"losses": losses.values, "frequencies": frequencies, "types": {part.dtype for part in module.parameters()}}


def _run(rank, processes, setup, root):
    os.environ["LOCAL_RANK"] = str(rank)
    results = {run: train(setup, root, processes, *run, **UNEVEN) for run in RUNS}
    results["one document"] = evaluate(setup, root, processes, "deepspeed_3", 1, **FLOAT32)
    results["resumed"] = resume(setup, root, processes)
    results["half"] = half_precision(setup, root, processes)
    torch.save(results, root / f"rank {rank}.pt")


@pytest.fixture(scope="module")
def setup(setup, tmp_path_factory):
    tied = tmp_path_factory.mktemp("tied")
    shutil.copytree(setup.model, tied, dirs_exist_ok=True)
    size = load_backbone(setup.model).vocabulary_size
    tiny_model("llama", size, seed=1, tie_word_embeddings=True).save_pretrained(tied)
    return SimpleNamespace(**vars(setup), tied=str(tied))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def two(setup, root):
    """What each of two processes found."""
    run_distributed(_run, setup, root)
    return [torch.load(root / f"rank {rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("strategy", "variant"), RUNS)
def test_losses_weights_and_metrics_are_those_of_one_process(two, setup, tmp_path, strategy, variant):
    expected = train(setup, tmp_path, 1, "auto", variant, uneven=True, dtype="float64")
    for results in two:
        actual = results[strategy, variant]
        torch.testing.assert_close(actual["losses"], expected["losses"], rtol=1e-6, atol=0)
        for name, weight in expected["weights"].items():
            # AdamW makes a step of the rounding of a gradient near 0; one process in float32 is as far off.
            torch.testing.assert_close(actual["weights"][name].double(), weight, rtol=0, atol=2e-4)
        for metric in ("longppl", "longppl_soft", "perplexity"):
            torch.testing.assert_close(actual[metric], expected[metric], rtol=1e-3, atol=0)
        assert actual["logged"].keys() == expected["logged"].keys()
        assert actual["logged"]["val/documents_without_key_tokens"] == 3


def test_one_document_counts_once(two, setup, tmp_path):
    expected = evaluate(setup, tmp_path, 1, "auto", 1, **FLOAT32)
    assert len(expected["pairs"]) == 1
    for results in two:
        torch.testing.assert_close(results["one document"], expected, rtol=5e-6, atol=1e-6)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(two):
    for results in two:
        empty, (uninterrupted, resumed) = results["resumed"]
        assert empty  # all weights were given back after the last step
        torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)


def test_half_precision_is_not_that_of_the_rotation_and_a_tied_head_is_gathered(two, setup, tmp_path):
    torch.manual_seed(0)
    module = make_module(SimpleNamespace(model=setup.tied), **FLOAT32)
    losses = Losses(module)
    settings = {"max_steps": 1, "limit_val_batches": 0}
    make_trainer(tmp_path, 1, "auto", accumulate_grad_batches=2, **settings).fit(module, make_data(setup))
    for results in two:
        half = results["half"]
        assert half["types"] == {torch.bfloat16}
        torch.testing.assert_close(half["frequencies"], 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8))
        assert half["losses"] == pytest.approx(losses.values, rel=0.02)


def test_a_checkpoint_is_exported_after_conversion(two, root, tmp_path):
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    folder = root / "third.ckpt"
    with pytest.raises(ValueError, match=r"convert_zero_checkpoint_to_fp32_state_dict.*third\.ckpt"):
        export_checkpoint(str(folder), str(tmp_path / "exported"))
    content = convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "one")
    exported = export_checkpoint(str(tmp_path / "one"), str(tmp_path / "exported"))
    norm = load_backbone(str(exported)).decoder.norm.weight
    (trained,) = (part for name, part in content["state_dict"].items() if ".model.norm.modules_to_save" in name)
    torch.testing.assert_close(norm, trained, rtol=0, atol=0)
    assert not torch.equal(norm, torch.ones_like(norm))


class Attack:
    """What runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("true",)


def test_a_checkpoint_that_would_run_code_is_refused(two, root, tmp_path):
    folder = root / "third.ckpt"
    check_zero_checkpoint(folder)
    copy = shutil.copytree(folder, tmp_path / "copy.ckpt")
    file = sorted((copy / "checkpoint").glob("*optim*"))[0]
    torch.save({**torch.load(file, weights_only=False), "attack": Attack()}, file)
    with pytest.raises(ValueError, match=r"optim_states\.pt holds code and must not be loaded"):
        check_zero_checkpoint(copy)
    file.write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ValueError, match=r"is torn or no checkpoint"):
        check_zero_checkpoint(copy)
    shutil.rmtree(copy / "checkpoint")
    with pytest.raises(ValueError, match=r"incomplete"):
        check_zero_checkpoint(copy)
    (copy / "latest").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint of DeepSpeed"):
        check_zero_checkpoint(copy)


@pytest.mark.parametrize(
    ("stage", "settings", "dtype", "message"),
    [
        (0, {}, "float32", r"divides nothing: set `trainer.strategy: ddp`"),
        (3, {"precision": "16-mixed"}, "float32", r"16-mixed.* set `bf16-mixed`"),
        (2, {}, "float64", r"set `model.dtype: float32`"),
        (2, {"ckpt_path": "http://somewhere"}, "float32", r"no checkpoint of DeepSpeed"),
        (2, {"accumulate": "fp32"}, "float32", r"leave it out"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(tmp_path, stage, settings, dtype, message):
    strategy = make_trainer(tmp_path, 1, f"deepspeed_{stage}").strategy
    if "accumulate" in settings:
        strategy.config["data_types"] = {"grad_accum_dtype": settings["accumulate"]}
    trainer = SimpleNamespace(**{"strategy": strategy, "precision": "bf16-mixed", "ckpt_path": None, **settings})
    with pytest.raises(ValueError, match=message):
        prepare_deepspeed(trainer, dtype)
