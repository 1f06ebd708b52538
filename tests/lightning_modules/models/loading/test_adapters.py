import copy

import pytest
import torch

from lightning_modules.functional.linear_head import LinearHead
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading import adapters
from lightning_modules.models.loading.adapters import add_adapters, embeddings_and_norms, quantization_config
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.training.step import REFERENCE_TOKENS
from tests.conftest import tiny_model
from tests.support import reference
from tests.support.tiny_training import LENGTH, VOCABULARY, loader, row, trainer
from tests.support.tiny_training import lm as tiny_lm

ALL = {"r": 2, "target_modules": "all-linear", "modules_to_save": "embeddings-and-norms"}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}


def lm(folder, **settings):
    return tiny_lm(str(folder), **{"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01), **settings})


def fit(tmp_path, module, steps=2, **settings):
    torch.manual_seed(steps)  # adapters are made at random
    rows = loader(*[row(0)] * 6)  # the same row: where a resumed run goes on does not matter
    result = trainer(tmp_path, max_steps=steps, **settings.pop("trainer", {}))
    result.fit(module, rows, **settings)
    return result


@pytest.fixture
def folder(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128}  # 4-bit blocks hold 64 numbers
    tiny_model("llama", VOCABULARY, seed=6, **sizes).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("llama", ["embed_tokens", "input_layernorm", "norm", "post_attention_layernorm"]),
        ("qwen3", ["embed_tokens", "input_layernorm", "k_norm", "norm", "post_attention_layernorm", "q_norm"]),
        ("gpt_neox", ["embed_in", "final_layer_norm", "input_layernorm", "post_attention_layernorm"]),
    ],
)
def test_embeddings_and_norms_of_any_architecture_are_trained_in_full(architecture, names):
    model = tiny_model(architecture, VOCABULARY)
    assert embeddings_and_norms(model) == names
    full = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if any(f".{part}." in f".{name}" for part in names)
    )
    adapted = add_adapters(model, ALL)
    trained = {name: parameter.numel() for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert sum(size for name, size in trained.items() if "lora_" not in name) == full
    assert sum(size for name, size in trained.items() if "lora_" in name) > 0


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_trained_with_its_embedding(tied):
    model = tiny_model("llama", VOCABULARY, tie_word_embeddings=tied)
    backbone = Backbone(add_adapters(model, ALL)).train()
    assert isinstance(backbone.head, LinearHead)
    embedding = model.get_input_embeddings().modules_to_save["default"].weight
    assert (backbone.head.weight is embedding) == tied
    with torch.no_grad():
        embedding.mul_(1.5)
    check_scoring(backbone)
    merged = copy.deepcopy(backbone.model).double().merge_and_unload()
    expected = reference.document_log_likelihood(merged, row(0)["input_ids"][0])
    torch.testing.assert_close(backbone(row(0))[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["embed_tokens"], r".*(q_proj|lm_head)"])
def test_low_rank_adapters_of_a_tied_head_are_refused(targets):
    """peft 0.21 gives embedding and head parameters of their own in the same memory, until the model is moved."""
    with pytest.raises(ValueError, match=r"would untie them: remove both from `lora\.target_modules`"):
        add_adapters(tiny_model("llama", VOCABULARY, tie_word_embeddings=True), {"r": 2, "target_modules": targets})
    add_adapters(tiny_model("llama", VOCABULARY), {"r": 2, "target_modules": targets})


@pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`")
def test_a_tied_head_that_peft_would_leave_behind_is_refused():
    with pytest.raises(ValueError, match="would train the embedding alone"):
        add_adapters(tiny_model("gpt_neox", VOCABULARY, tie_word_embeddings=True), ALL)


def test_arguments_are_left_as_they_are():
    """Checkpoints hold them: peft would add the embedding to the list, and an export build other adapters."""
    arguments = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    before = copy.deepcopy(arguments)
    add_adapters(tiny_model("llama", tie_word_embeddings=True), arguments)
    assert arguments == before


def test_what_is_trained_in_full_is_float32_under_mixed_precision():
    half = tiny_model("llama", VOCABULARY, dtype=torch.bfloat16)
    adapted = add_adapters(copy.deepcopy(half), ALL, autocast=True)
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in adapted.parameters() if not p.requires_grad} == {torch.bfloat16}
    torch.testing.assert_close(
        adapted.get_base_model().model.norm.weight, half.model.norm.weight.float(), rtol=0, atol=0
    )


Q_PROJ = {"r": 2, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ({"rank": 2}, "rank"),
        ({"r": 2, "target_modules": ["q_proj", "v_prj"]}, "target_modules.*Did you mean 'v_proj'"),
        ({**Q_PROJ, "modules_to_save": ["head"]}, "modules_to_save"),
        ({**Q_PROJ, "modules_to_save": "head"}, "modules_to_save"),
        ({**Q_PROJ, "rank_pattern": {"q_prj": 4}}, "rank_pattern"),
        ({**Q_PROJ, "alpha_pattern": {"^q_proj": 4}}, "alpha_pattern"),
        ({"r": 2, "target_modules": "all-linear", "exclude_modules": ["layers.5.q_proj"]}, "exclude_modules"),
        ({**Q_PROJ, "r": "2"}, "`lora`"),
    ],
)
def test_arguments_that_do_nothing_are_refused(arguments, option):
    with pytest.raises(ValueError, match=option):
        add_adapters(tiny_model("llama", VOCABULARY), arguments)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"load_in_4bit": True, "load_in_8bit": True}, {"load_in_4bits": True}, {"load_in_4bit": True, "x": 1}],
)
def test_quantization_without_a_meaning_is_refused(arguments):
    with pytest.raises(ValueError, match="`quantization`"):
        quantization_config(arguments, compute_dtype=torch.float32)


def test_quantization_without_its_package_is_refused_before_anything_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="needs the bitsandbytes package"):
        lm(folder, quantization=FOUR_BITS, lora=ALL).check_early(LENGTH)


def test_quantised_weights_cannot_be_trained_and_random_ones_not_quantised(folder):
    with pytest.raises(ValueError, match=r"set `model\.lora`"):
        lm(folder, quantization=FOUR_BITS).check_early(LENGTH)
    lm(folder, quantization=FOUR_BITS).check_early(None)  # evaluation only
    with pytest.raises(ValueError, match="`quantization` needs stored weights"):
        lm(folder / "config.json", quantization=FOUR_BITS, lora=ALL).check_early(LENGTH)


@pytest.mark.parametrize(("bits", "precision"), [(4, "bf16-mixed"), (8, "32-true")])
def test_training_over_quantised_weights(folder, tmp_path, bits, precision):
    pytest.importorskip("bitsandbytes")
    quantization = FOUR_BITS if bits == 4 else {"load_in_8bit": True}
    module = lm(folder, quantization=quantization, lora=ALL, gradient_checkpointing=True)
    fit(tmp_path, module, trainer={"precision": precision})
    layer = module.backbone.base_model.model.layers[0].self_attn.q_proj
    assert type(layer.base_layer).__name__ == ("Linear4bit" if bits == 4 else "Linear8bitLt")
    assert layer.lora_B["default"].weight.abs().max() > 0
    assert layer.base_layer.weight.element_size() * layer.base_layer.weight.numel() == 64 * 64 * bits // 8


def test_gradients_through_quantised_weights_after_a_short_pass(folder):
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit

    module = lm(folder, quantization=FOUR_BITS, lora={"r": 2, "target_modules": "all-linear"})
    torch.manual_seed(1)
    module.configure_model()
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model = copy.deepcopy(module.backbone.model)
    module.backbone.train()
    loss = module.training_step(row(0), 0) * REFERENCE_TOKENS / (row(0)["labels"].shape[1] - 1)
    loss.backward()  # the short pass runs in eval mode

    for name, part in list(model.named_modules()):
        if name.endswith("base_layer"):
            plain = torch.nn.Linear(part.in_features, part.out_features, bias=False)
            plain.weight = torch.nn.Parameter(dequantize_4bit(part.weight.data, part.weight.quant_state).float(), False)
            model.set_submodule(name, plain)
    model = model.double()
    reference.longce(model, row(0)["input_ids"][0], 8, 4, 5.0).backward()
    for (name, actual), wanted in zip(module.backbone.model.named_parameters(), model.parameters(), strict=True):
        if actual.requires_grad:
            torch.testing.assert_close(actual.grad.double(), wanted.grad, rtol=1e-3, atol=1e-5, msg=name)
            assert wanted.grad.abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, FOUR_BITS])
def test_a_checkpoint_of_adapters_holds_only_these_and_resumes(folder, tmp_path, quantization):
    if quantization:
        pytest.importorskip("bitsandbytes")
    whole = lm(folder, lora=ALL, quantization=quantization)
    fit(tmp_path, whole, steps=4)
    half = lm(folder, lora=ALL, quantization=quantization)
    torch.manual_seed(4)
    half.configure_model()
    fit(tmp_path, half, steps=2).save_checkpoint(tmp_path / "half.ckpt")
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert set(state) == {name for name, parameter in half.named_parameters() if parameter.requires_grad}
    resumed = lm(folder, lora=ALL, quantization=quantization)
    fit(tmp_path, resumed, steps=4, ckpt_path=str(tmp_path / "half.ckpt"))
    expected = dict(whole.named_parameters())
    for name, parameter in resumed.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0)


def test_a_checkpoint_of_other_adapters_or_another_model_is_refused(folder, tmp_path):
    fit(tmp_path, lm(folder, lora={"r": 2, "target_modules": ["q_proj"]})).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"lacks 4 of the weights that `model\.lora` trains"):
        fit(
            tmp_path,
            lm(folder, lora={"r": 2, "target_modules": ["q_proj", "v_proj"]}),
            ckpt_path=str(tmp_path / "a.ckpt"),
        )
    tiny_model("llama", VOCABULARY, seed=7, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"trained on other weights than those of .*other"):
        fit(
            tmp_path,
            lm(tmp_path / "other", lora={"r": 2, "target_modules": ["q_proj"]}),
            ckpt_path=str(tmp_path / "a.ckpt"),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("attack", ["one number", "two swapped", "two swapped in a chunk", "two opposite"])
def test_any_change_of_frozen_weights_is_noticed(monkeypatch, dtype, attack):
    monkeypatch.setattr(adapters, "_CHECKSUM_WORDS", 100)  # several for 40 x 60 numbers
    module = torch.nn.Linear(60, 40, dtype=dtype).requires_grad_(False)
    first = adapters.frozen_fingerprint(module)
    assert adapters.frozen_fingerprint(copy.deepcopy(module)) == first
    numbers = module.weight.view(-1)
    if attack == "one number":
        numbers[2399] *= 2
    elif attack == "two swapped":
        numbers[[100, 1999]] = numbers[[1999, 100]].clone()
    elif attack == "two swapped in a chunk":
        numbers[[3, 11]] = numbers[[11, 3]].clone()
    else:
        numbers[[3, 11]] = -numbers[[3, 11]]  # the highest bits of two words in a chunk
    assert first != adapters.frozen_fingerprint(module)


def test_adapters_of_a_model_without_stored_weights_keep_it_in_the_checkpoint(folder, tmp_path):
    module = lm(folder / "config.json", lora={"r": 2, "target_modules": ["q_proj"]})
    fit(tmp_path, module).save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert set(state) == set(module.state_dict())


def perplexity(tmp_path, module, **settings):
    run = trainer(tmp_path, **settings.pop("trainer", {}))
    return run.validate(module, loader(row(3)), verbose=False, **settings)[0]["val/perplexity"]


@pytest.mark.filterwarnings("ignore:Found keys that are in the model state dict but not")  # only what is trained
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("start", [True, "pissa_niter_4"])
def test_a_checkpoint_is_read_again_under_every_precision(folder, tmp_path, precision, start):
    """Frozen weights are rounded by `bf16-true` after a checkpoint is read, and by PiSSA at random."""
    lora, settings = {**ALL, "init_lora_weights": start}, {"precision": precision}
    module, path = lm(folder, lora=lora), str(tmp_path / "a.ckpt")
    fit(tmp_path, module, trainer=settings).save_checkpoint(path)
    expected = perplexity(tmp_path, module, trainer=settings)
    assert perplexity(tmp_path, lm(folder, lora=lora), trainer=settings, ckpt_path=path) == expected
    fit(tmp_path, lm(folder, lora=lora), steps=3, trainer=settings, ckpt_path=path)
    again = LongContextLM.load_from_checkpoint(path, weights_only=True)
    trained = dict(module.named_parameters())
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter.to(trained[name].dtype), trained[name], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The model has dropout")
def test_adapters_that_would_count_otherwise_are_refused(folder, tmp_path):
    lora, path = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}, str(tmp_path / "a.ckpt")
    fit(tmp_path, lm(folder, lora=lora)).save_checkpoint(path)
    same = {**lora, "lora_dropout": 0.1, "use_rslora": False, "alpha_pattern": {}}
    fit(tmp_path, lm(folder, lora=same), steps=3, ckpt_path=path)
    for name, value in (("lora_alpha", 8), ("use_rslora", True), ("alpha_pattern", {"q_proj": 9})):
        with pytest.raises(ValueError, match=name):
            perplexity(tmp_path, lm(folder, lora={**lora, name: value}), ckpt_path=path)


def test_adapters_over_weights_that_are_quantised_otherwise_are_refused(folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    path, lora = str(tmp_path / "a.ckpt"), {"r": 2, "target_modules": ["q_proj"]}
    fit(tmp_path, lm(folder, lora=lora, quantization=FOUR_BITS)).save_checkpoint(path)
    same = {**FOUR_BITS, "bnb_4bit_compute_dtype": "bfloat16"}
    perplexity(tmp_path, lm(folder, lora=lora, quantization=same), ckpt_path=path)
    for other in ({"load_in_8bit": True}, {**FOUR_BITS, "bnb_4bit_quant_type": "fp4"}):
        with pytest.raises(ValueError, match=r"trained with `quantization` = .*nf4"):
            perplexity(tmp_path, lm(folder, lora=lora, quantization=other), ckpt_path=path)


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj"]}])
def test_a_checkpoint_under_another_extension_is_named(folder, tmp_path, lora, recwarn):
    extension = {"method": "abf", "original_length": 16, "target_length": 64}
    path = str(tmp_path / "a.ckpt")
    fit(tmp_path, lm(folder, lora=lora, context_extension=extension)).save_checkpoint(path)
    perplexity(tmp_path, lm(folder, lora=lora, context_extension=extension), ckpt_path=path)
    assert not [w for w in recwarn if "computes with" in str(w.message)]
    with pytest.warns(UserWarning, match="`rope_parameters` = .*500000.*, and this run has .*10000"):
        perplexity(tmp_path, lm(folder, lora=lora), ckpt_path=path)
