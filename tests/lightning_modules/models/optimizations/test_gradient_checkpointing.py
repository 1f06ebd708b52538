import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules.functional import Weighing, soft_influence
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations.gradient_checkpointing import ATTENTION, enable_checkpointing
from tests.conftest import tiny_model
from tests.lightning_modules.models.test_backbone import build, documents, packed


class Count(TorchDispatchMode):
    """How often attention is computed."""

    def __init__(self):
        super().__init__()
        self.attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.attention += func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu"
        return func(*args, **(kwargs or {}))


def step(kind, autocast=False):
    model = build("llama").train()
    enable_checkpointing(model, kind)
    scorer = Backbone(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Count() as count:
        scorer(packed(documents(30, 8), documents(38)), Weighing(soft_influence)).loss.backward()
    return count.attention, {name: p.grad for name, p in scorer.named_parameters()}


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_the_same_bit_for_bit_and_attention_is_computed_once(autocast):
    none, full, selective = (step(kind, autocast) for kind in (False, True, "selective"))
    assert (none[0], full[0], selective[0]) == (6, 12, 6), "two layers, three documents"
    for name, gradient in full[1].items():
        assert torch.equal(selective[1][name], gradient), name


def test_it_keeps_the_outputs_of_attention_and_little_more():
    def kept(kind):
        model = tiny_model("llama", 90).train()
        enable_checkpointing(model, kind)
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model.model(input_ids=torch.zeros(1, 200, dtype=torch.int64), use_cache=False).last_hidden_state
        return sum(sizes.values()), output

    (full, _), (none, _) = kept(True), kept(False)
    assert full < none / 4


def test_loaded_by_name(tmp_path):
    from lightning_modules.models.loading import load_backbone

    tiny_model("llama", 90).save_pretrained(tmp_path)
    backbone = load_backbone(str(tmp_path), gradient_checkpointing="selective", attn_implementation="sdpa").train()
    with Count() as count:
        backbone(packed([torch.arange(30)]), Weighing(soft_influence)).loss.backward()
    assert count.attention == 2


def test_attention_that_cannot_be_kept_and_other_words_are_refused():
    with pytest.raises(ValueError, match=r"has 'eager'.*attn_implementation"):
        enable_checkpointing(build("llama", attention="eager"), "selective")
    with pytest.raises(ValueError, match="got 'selectivee'"):
        enable_checkpointing(build("llama"), "selectivee")
    enable_checkpointing(build("llama", attention="eager"), True)


def test_the_operators_that_are_kept_exist():
    for name in ATTENTION:
        library, _, operator = name.partition("::")
        if library == "aten":
            assert hasattr(torch.ops.aten, operator), name
    assert len([name for name in ATTENTION if name.startswith("aten")]) == 4
