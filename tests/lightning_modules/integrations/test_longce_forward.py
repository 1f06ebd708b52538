"""LongCE inside a model's own ``forward``, against a plain float64 formula and the step of `LongContextLM`."""

import copy
import inspect
import logging
import pickle
import types

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import BertConfig, BertForMaskedLM, DataCollatorWithFlattening, T5Config, T5ForConditionalGeneration

import longce
from lightning_modules.batch import IGNORE_INDEX as NO
from lightning_modules.integrations.longce_forward import check_device
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.objectives import CrossEntropy, Interpolated, LongCE, Normalized, Scheduled, StoredInfluence
from lightning_modules.training import step
from tests.conftest import tiny_model
from tests.support.longce_sums import D, K, documents, longce_sum, pad, relative_error, text

VOCABULARY = 90


@pytest.fixture
def model():
    return tiny_model(vocab_size=VOCABULARY, seed=3, tie_word_embeddings=False).train()


def apply(model, **settings):
    longce.apply_longce(model, context_length=K, stride=D, **settings)
    return model


def in_float64(model):
    """A copy of a model without LongCE, in float64."""
    model = copy.deepcopy(model)
    longce.remove_longce(model)
    return model.double().eval()


def check_loss_and_gradients(model, inputs, texts, *, divisor=None, rel=1e-11):
    """In float64, the loss of a model with LongCE, and its gradients, are those of the plain formula."""
    model.double()
    plain = in_float64(model)
    loss = model(**inputs, **({} if divisor is None else {"num_items_in_batch": torch.tensor(divisor)})).loss
    loss.backward()
    scored = sum(int((labels[1:] != NO).sum()) for _, labels in texts)
    expected = sum(longce_sum(plain, *one) for one in texts) / (scored if divisor is None else divisor)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=rel)
    trained = [each for each in zip(model.parameters(), plain.parameters(), strict=True) if each[0].requires_grad]
    assert relative_error([each.grad for each, _ in trained], [each.grad for _, each in trained]) < rel


TEXTS = [text(40, seed=1), text(23, seed=2, prompt=9), text(31, seed=3)]


def packed():
    """Three documents in one row, as trainers pack them."""
    examples = [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in TEXTS]
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(examples)


LAYOUTS = {
    "right": lambda: pad(TEXTS),
    "left": lambda: pad(TEXTS, side="left"),
    "packed": packed,
    "left, with positions that count the padding": lambda: {
        **pad(TEXTS, side="left"),
        "position_ids": torch.arange(40).expand(3, -1),
    },
    "one position for all": lambda: {**pad(TEXTS), "position_ids": torch.arange(40).unsqueeze(0)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_padded_packed_and_masked(layout, model):
    check_loss_and_gradients(apply(model), LAYOUTS[layout](), TEXTS)


def test_float32(model):
    expected = sum(longce_sum(copy.deepcopy(model).double().eval(), *one) for one in TEXTS)
    loss = apply(model)(**packed(), num_items_in_batch=1).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


IN_FLOAT32 = 1e-6  # eager attention and Mamba compute a part in float32


@pytest.mark.parametrize(("attention", "rel"), [("sdpa", 1e-11), ("eager", IN_FLOAT32)])
def test_the_number_of_items_is_the_divisor(attention, rel, model):
    model.set_attn_implementation(attention)
    check_loss_and_gradients(apply(model), packed(), TEXTS, divisor=123, rel=rel)


@pytest.mark.parametrize("applied", ["before", "after", "to the base"])
def test_adapters(applied, model):
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    if applied == "before":
        apply(model)
    with_adapters = get_peft_model(model, config)
    if applied == "after":
        apply(with_adapters)
    if applied == "to the base":
        apply(with_adapters.get_base_model())
    check_loss_and_gradients(with_adapters, pad(TEXTS), TEXTS)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, model):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    check_loss_and_gradients(apply(model), packed(), TEXTS)


@pytest.mark.parametrize(
    "architecture",
    [("qwen2", {"tie_word_embeddings": True}), ("gemma2", {"final_logit_softcapping": 2.0, "head_dim": 8})],
)
def test_other_heads(architecture):
    name, overrides = architecture
    model = tiny_model(name, VOCABULARY, attn_implementation="eager", **overrides).train()
    check_loss_and_gradients(apply(model), pad(TEXTS), TEXTS, rel=IN_FLOAT32)


def test_documents_that_attention_cannot_isolate_have_passes_of_their_own():
    model = tiny_model("mamba", VOCABULARY, attn_implementation="eager", state_size=4, num_hidden_layers=1).train()
    check_loss_and_gradients(apply(model), packed(), TEXTS, rel=IN_FLOAT32)


@pytest.mark.parametrize("objective", [LongCE(1.5), Normalized(LongCE()), Interpolated(LongCE(), 0.3), CrossEntropy()])
@pytest.mark.parametrize("method", ["windows", "sliding_window"])
def test_equals_a_step_of_the_lightning_module(objective, method, model, tmp_path):
    model.save_pretrained(tmp_path)
    module = LongContextLM(str(tmp_path), objective, K, D, short_method=method)
    module.configure_model()
    check_scoring(module.backbone)
    module.backbone.train()
    batch = documents(TEXTS)
    module.on_train_batch_start(batch, 0)
    module.training_step(batch, 0).backward()
    apply(model, objective=objective, short_method=method)
    loss = model(**packed(), num_items_in_batch=step.REFERENCE_TOKENS).loss
    loss.backward()
    assert torch.equal(loss, module._losses[0])
    for parameter, other in zip(model.parameters(), module.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_weights_come_from_eval_mode(model):
    """Dropout is on in the long pass only, which is said; the mode of each part of the model stays as it is."""
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    apply(model)(**packed()).loss.backward()
    assert [module.training for module in model.modules()] == before


def test_nothing_changes_without_labels_or_in_eval_mode(model, caplog):
    inputs = pad(TEXTS)
    unlabeled = {name: values for name, values in inputs.items() if name != "labels"}
    plain = copy.deepcopy(model)
    apply(model)
    assert torch.equal(model(**unlabeled).logits, plain(**unlabeled).logits)
    assert "label_smoothing_factor" in caplog.text
    model.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).loss, plain(**inputs).loss)
    assert "eval mode" not in caplog.text
    assert torch.equal(model(**inputs).loss, plain(**inputs).loss)
    assert "eval mode" in caplog.text
    assert torch.equal(model(inputs["input_ids"]).logits, plain(inputs["input_ids"]).logits)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    prompt = {"input_ids": inputs["input_ids"][:1, :5], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**prompt), plain.generate(**prompt))


def test_a_tuple_is_returned_if_it_is_asked_for(model):
    inputs = pad(TEXTS)
    apply(model)
    (loss,) = model(inputs.pop("input_ids"), return_dict=False, **inputs)
    assert loss.requires_grad


def test_removing_undoes_all(model):
    state = {name: dict(vars(each)) for name, each in (("model", model), ("decoder", model.model))}
    hooks = len(model.model._forward_pre_hooks)
    apply(model)
    longce.remove_longce(model)
    assert vars(model) == state["model"]
    assert model.config._attn_implementation == "sdpa"
    assert len(model.model._forward_pre_hooks) == hooks
    inputs = pad(TEXTS)
    assert model(**inputs).logits is not None
    own = model.forward = types.MethodType(lambda self, *_, **__: "own", model)
    apply(model)
    longce.remove_longce(model)
    assert vars(model)["forward"] is own
    with pytest.raises(ValueError, match="does not use LongCE"):
        longce.remove_longce(model)


def test_removing_works_inside_what_others_have_put_around_it(model):
    inputs = pad(TEXTS)
    plain = model(**inputs).loss.item()
    apply(model)
    with_longce = model.forward
    model.forward = lambda *args, **kwargs: with_longce(*args, **kwargs)
    assert model(**inputs).loss.item() != plain
    longce.remove_longce(model)
    assert model(**inputs).loss.item() == plain
    apply(model)
    assert model(**inputs).loss.item() != plain


def test_copies_are_independent(model):
    inputs = pad(TEXTS)
    apply(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        model.lm_head.weight.zero_()
    losses = [each(**inputs).loss.item() for each in (model, *copies)]
    assert losses[0] == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=1e-6)
    assert losses[1] == losses[2] != losses[0]


def test_a_replaced_forward_does_not_train_plain_cross_entropy(model):
    inputs = pad(TEXTS)
    apply(model)(**inputs)
    model.forward = types.MethodType(type(model).forward, model)
    with pytest.raises(RuntimeError, match="replaced after `apply_longce`"):
        model(**inputs)
    with torch.no_grad():
        model(**inputs)
    model.eval()(**inputs)
    longce.remove_longce(model)
    model.train()(**inputs).loss.backward()


def test_a_wrapped_forward_keeps_it(model):
    """As accelerate does for autocast, and undoes by `unwrap_model(keep_fp32_wrapper=False)`."""
    inputs = pad(TEXTS)
    apply(model)
    loss = model(**inputs).loss
    wrapped = torch.autocast("cpu", torch.bfloat16, enabled=False)(model.forward)
    model.forward = wrapped
    assert torch.equal(model(**inputs).loss, loss)
    model.forward = types.MethodType(wrapped.__wrapped__, model)
    assert torch.equal(model(**inputs).loss, loss)
    assert model(inputs.pop("input_ids")).logits is not None


def test_autocast(model):
    inputs = pad(TEXTS)
    exact = apply(model)(**inputs).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs).loss
    assert loss.dtype == torch.float32
    assert loss.item() != exact
    assert loss.item() == pytest.approx(exact, rel=0.02)


def test_batches_of_short_documents_are_reported_once(model, caplog):
    caplog.set_level(logging.WARNING)
    apply(model)
    short = pad([text(8, seed=4), text(12, seed=5)])
    loss = model(**short).loss
    model(**short)
    model(**pad([text(9, seed=4)]))
    longce.remove_longce(model)
    torch.testing.assert_close(loss, model(**short).loss)
    assert caplog.text.count("No document of a batch") == 1


def test_dropout_is_reported(model, caplog):
    config = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    apply(get_peft_model(model, config))(**pad(TEXTS))
    assert "lora_dropout" in caplog.text


def test_a_batch_without_scored_tokens_has_no_loss(model):
    inputs = pad(TEXTS)
    inputs["labels"].fill_(NO)
    for items in ({}, {"num_items_in_batch": torch.tensor(0)}):
        loss = apply(copy.deepcopy(model))(**inputs, **items).loss
        loss.backward()
        assert loss.item() == 0


def _bert():
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **size))


def _t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1))


def _prompts():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return get_peft_model(tiny_model(vocab_size=VOCABULARY), config)


@pytest.mark.parametrize(
    ("make", "settings", "error", "named"),
    [
        (lambda: torch.nn.Linear(2, 2), {}, TypeError, "Linear"),
        (lambda: torch.nn.DataParallel(tiny_model()), {}, TypeError, "DataParallel"),
        (lambda: tiny_model().model, {}, ValueError, "LlamaModel"),
        (_t5, {}, ValueError, "T5ForConditionalGeneration"),
        (_prompts, {}, ValueError, "prompt learning"),
        (lambda: apply(tiny_model()), {}, ValueError, "`remove_longce`"),
        (tiny_model, {"stride": 0}, ValueError, "`stride`"),
        (tiny_model, {"context_length": -1}, ValueError, "`context_length`"),
        (tiny_model, {"context_length": 4096 - D}, ValueError, "4096 positions"),
        (tiny_model, {"objective": StoredInfluence()}, ValueError, "`objective`"),
        (tiny_model, {"objective": Normalized(Scheduled(LongCE(), 3))}, ValueError, "Scheduled"),
    ],
)
def test_what_cannot_work_is_refused_at_once(make, settings, error, named):
    with pytest.raises(error, match=named):
        longce.apply_longce(make(), **{"context_length": K, "stride": D, **settings})


@pytest.mark.parametrize(
    ("inputs", "error", "named"),
    [
        ({"labels": torch.arange(1, 21).unsqueeze(0)}, ValueError, "shift"),
        ({"past_key_values": object()}, ValueError, "past_key_values"),
        ({"attention_mask": {}}, ValueError, "masks that are not tensors"),
        ({"seq_idx": torch.zeros(1, 20, dtype=torch.int32)}, ValueError, "position_ids.*seq_idx"),
        ({"cu_seq_lens_q": torch.tensor([0, 8, 20])}, ValueError, "position_ids.*cu_seq_lens_q"),
        ({"attention_mask": torch.arange(20).unsqueeze(0) // 10 + 1}, ValueError, "numbers of documents"),
        ({"position_ids": torch.cat([torch.arange(9), torch.arange(50, 61)]).unsqueeze(0)}, ValueError, "50 after"),
        ({"position_ids": torch.arange(100, 120).unsqueeze(0)}, ValueError, "start at 0 .* got 100"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 20, 32)}, ValueError, "`input_ids`"),
        ({"pixel_values": torch.zeros(1)}, ValueError, "pixel_values"),
        ({"attention_mask": torch.zeros(1, 20)}, ValueError, "padding"),
        ({"attention_mask": torch.ones(1, 1, 20, 20)}, ValueError, "[B, T]"),
        ({"position_ids": torch.zeros(3, 1, 20)}, ValueError, "[B, T]"),
        ({"output_router_logits": True}, ValueError, "router"),
        ({"fused_lm_head": True}, RuntimeError, "SFTTrainer"),
        ({"input_ids": torch.full((1, 20), VOCABULARY)}, ValueError, "embedding"),
    ],
)
def test_inputs_that_cannot_be_trained_on_are_refused(inputs, error, named, model):
    ids = torch.arange(20).unsqueeze(0)
    given = {"input_ids": ids, "labels": ids} | inputs
    if given["input_ids"] is not None and "labels" not in inputs:
        given["labels"] = given["input_ids"]
    with pytest.raises(error, match=named.replace("[", r"\[")):
        apply(model)(**given)


def test_models_that_see_what_follows_are_refused_before_the_first_step():
    model = apply(_bert().train())
    with pytest.raises(ValueError, match="BertForMaskedLM"):
        model(**pad(TEXTS))


def test_replicas_on_other_gpus_are_refused():
    """As `nn.DataParallel` makes them, which copies the ``forward`` of the first GPU."""
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    with pytest.raises(ValueError, match="torchrun"):
        check_device(second, first)
    check_device(first, first)
    check_device(torch.device("cpu"), first)
    check_device(first, torch.device("cuda"))  # offloaded weights
