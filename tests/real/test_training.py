"""Training of a real model: the step is the paper's formula, and neither kills nor processes nor files change it."""

import gc
import json
import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from callbacks import HuggingFaceExport
from lightning_modules.batch import pack_sequence
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.objectives import LongCE
from lightning_modules.training.step import REFERENCE_TOKENS
from longce.cli.main import main
from tests.reliability import test_resume
from tests.support import reference
from tests.support.distributed import run_distributed
from tests.support.faults import same
from tests.support.runs import make_trainer, whole
from tests.support.tiny_training import loader

pytestmark = [pytest.mark.real, pytest.mark.slow]

LEARNING_RATE = 0.2
STEPS = 3
LOGGED = ("loss", "weight_mean", "gradient_norm")
SHOWN = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.15.mlp.down_proj.weight",
    "model.layers.29.input_layernorm.weight",
    "model.norm.weight",
)
"""Parameters of the first, middle and last layers."""


def relative_error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_loss_and_gradients_are_those_of_the_formula_on_full_logits(model, license_text):
    """Equations 6 and 7 in float64 sums over float32 logits, one window at a time."""
    ids = encode_document(license_text[:1800], load_tokenizer(str(model)))["input_ids"][0][:288]
    sizes = {"context_length": 128, "stride": 64}
    module = LongContextLM(str(model), objective=LongCE(5.0), dtype="float32", **sizes)
    module.configure_model()
    module.backbone.train()
    loss = module.training_step(pack_sequence([ids]), 0) * REFERENCE_TOKENS / (len(ids) - 1)
    loss.backward()

    network = plain_model(model)
    expected = reference.longce(network, ids, *sizes.values(), 5.0)
    expected.backward()
    with torch.no_grad():
        cross_entropy = -reference.document_log_likelihood(network, ids)[1:].mean().item()
    errors = {
        name: relative_error(parameter.grad, module.backbone.model.get_parameter(name).grad)
        for name, parameter in network.named_parameters()
    }
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert abs(loss.item() / cross_entropy - 1) > 1e-3, "the weights change something"
    assert len(errors) > 200
    assert max(errors[name] for name in SHOWN) < 1e-4
    assert max(errors.values()) < 3e-4, max(errors, key=errors.get)


# ------------------------------------------------------------------------------------------------------- processes


def fit(root, folder, ids, rank, processes, strategy, **settings):
    """Losses, gradient norms and updates of a few steps on two sequences each."""
    logged = []
    module = LongContextLM(str(folder), context_length=32, stride=32, dtype="float32", optimizer=sgd)
    module.log_dict = lambda values, **_: logged.append({name: float(values[f"train/{name}"]) for name in LOGGED})
    rows = [pack_sequence([each]) for each in ids][rank::processes]
    fitter = make_trainer(
        root,
        processes,
        strategy,
        max_steps=STEPS,
        accumulate_grad_batches=2 // processes,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        **settings,
    )
    fitter.fit(module, loader(*rows))
    weights = dict(module.named_parameters())
    return module, {"logged": logged, "weights": {name: whole(weights[f"backbone.model.{name}"]) for name in SHOWN}}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def _fit_shared(rank, processes, root, folder, ids):
    os.environ["LOCAL_RANK"] = str(rank)
    for strategy in ("ddp", "fsdp"):
        torch.save(fit(root, folder, ids, rank, processes, strategy)[1], root / f"{strategy} {rank}.pt")
        gc.collect()  # the module of a strategy is in cycles, and the next one takes as much memory


@pytest.fixture(scope="module")
def sequences(model, license_text):
    ids = encode_document(license_text, load_tokenizer(str(model)))["input_ids"][0]
    return [*ids[: 2 * STEPS * 96].split(96)]


@pytest.fixture(scope="module")
def one(model, sequences, tmp_path_factory):
    """The trained module of one process, its results, and its export."""
    root = tmp_path_factory.mktemp("one")
    export = HuggingFaceExport(str(root / "export"))
    module, result = fit(root, model, sequences, 0, 1, "auto", callbacks=[export])
    return SimpleNamespace(module=module, result=result, export=root / "export")


@pytest.mark.long
def test_two_processes_train_like_one(model, sequences, one, tmp_path):
    run_distributed(_fit_shared, tmp_path, model, sequences)
    start = plain_model(model)
    for strategy in ("ddp", "fsdp"):
        for rank in range(2):
            found = torch.load(tmp_path / f"{strategy} {rank}.pt")
            for values, expected in zip(found["logged"], one.result["logged"], strict=True):
                assert values == pytest.approx(expected, rel=1e-4)
            for name in SHOWN:
                before = start.get_parameter(name).detach()
                updates = [each["weights"][name] - before for each in (found, one.result)]
                # Both weights are rounded to float32, and the update is small.
                assert relative_error(*updates) < 2e-3, (strategy, rank, name)


@torch.no_grad()
def logits(network, ids):
    return network.eval()(input_ids=ids.unsqueeze(0)).logits[0]


@pytest.mark.long
def test_the_exported_model_has_the_logits_of_the_trained_one(model, one, sequences):
    exported, ids = plain_model(one.export), sequences[0]
    trained = logits(one.module.backbone.model, ids)
    torch.testing.assert_close(logits(exported, ids), trained, rtol=0, atol=0)
    assert (logits(plain_model(model), ids) - trained).abs().max() > 0.1, "trained"


# ------------------------------------------------------------------------------------------------------------ kills

ADAPTERS = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def config(model, license_text, tmp_path):
    """Ten steps of two short sequences each through `longce fit`."""
    path = tmp_path / "train.jsonl"
    parts = [license_text[start : start + 2000] for start in range(0, 10_000, 2000)]
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    return {
        "model": {
            "pretrained_model_name_or_path": str(model),
            "context_length": 32,
            "stride": 16,
            "dtype": "float32",
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.005}},
        },
        "data": {
            "class_path": "datamodules.TextDataModule",
            "init_args": {
                "tokenizer": str(model),
                "train": str(path),
                "validation": str(path),
                "sequence_length": 64,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "precision": "32-true",
            "max_steps": 10,
            "accumulate_grad_batches": 2,
            "limit_val_batches": 0,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }


def check_killed(config, folder, **options):
    """Two runs, of which one is killed and goes on, have the same batches, losses and last checkpoint; return that."""
    test_resume.compare(config, folder, kills=1, workers={"undisturbed": 0, "killed": 0}, distinct=15, **options)
    files = [test_resume.last_checkpoint(folder / name) for name in ("undisturbed", "killed")]
    first, second = (torch.load(file, weights_only=True) for file in files)
    assert first["global_step"] == second["global_step"] == 10
    for part in ("state_dict", "optimizer_states"):
        assert same(first[part], second[part])
    return files[1], second["state_dict"]


@pytest.mark.long
def test_adapters_are_trained_bit_for_bit_after_a_kill_and_merged(config, model, sequences, tmp_path, capsys):
    config["model"]["lora"] = ADAPTERS
    file, state = check_killed(config, tmp_path)
    main(["export", str(file), str(tmp_path / "merged")])
    capsys.readouterr()
    merged, network = plain_model(tmp_path / "merged"), plain_model(model)
    before = logits(network, sequences[0])
    for name, matrix in state.items():
        if "lora_A" in name:
            target = name.removeprefix("backbone.model.base_model.model.").replace("lora_A.default.", "")
            product = state[name.replace("lora_A", "lora_B")] @ matrix
            assert product.norm() > 0
            network.get_parameter(target).data += ADAPTERS["lora_alpha"] / ADAPTERS["r"] * product
    torch.testing.assert_close(logits(merged, sequences[0]), logits(network, sequences[0]), rtol=1e-4, atol=1e-4)
    losses = [F.cross_entropy(each[:-1], sequences[0][1:]) for each in (before, logits(merged, sequences[0]))]
    assert losses[1] < 0.95 * losses[0], "it has learned its training text"
    text = "Items\n\n2019"
    assert load_tokenizer(str(tmp_path / "merged"))(text)["input_ids"] == load_tokenizer(str(model))(text)["input_ids"]


@pytest.mark.long
def test_all_weights_are_trained_bit_for_bit_after_a_kill(config, sequences, tmp_path, capsys):
    config["model"]["optimizer"]["init_args"]["lr"] = 1e-5
    file, state = check_killed(config, tmp_path, every=2)
    main(["export", str(file), str(tmp_path / "export")])
    capsys.readouterr()
    exported = plain_model(tmp_path / "export")
    for name, weight in exported.state_dict().items():
        assert torch.equal(weight, state[f"backbone.model.{name}"]), name
