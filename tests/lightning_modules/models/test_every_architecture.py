"""Every causal architecture of the installed transformers: scores are those of its own logits in float64."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_modules.batch import IGNORE_INDEX, pack_sequence
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.file_checks import check_config
from lightning_modules.models.loading.load import choose_attention, register_attention
from tests.support.architectures import NAMES, tiny_config

REFUSED = {
    "differ from its own by": {  # its head does more than a product: see `Backbone.logits`
        *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "inkling_text", "megatron-bert"),
        *("prophetnet", "recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta"),
        *("xlm-roberta-xl", "xlstm"),
    },
    "depend on the tokens that follow": {"bert-generation", "cpmant"},
    "is not a causal LM with a decoder": {"modernbert-decoder"},
    "must be 1 or more": {"xlnet"},
    "language unknown": {"xmod"},
}


def load(name, attention="auto", dtype=torch.float32):
    """Return a model of random weights as `load_backbone` builds it, but for the files."""
    config = tiny_config(name)
    check_config(config)
    attention = register_attention(choose_attention(ModelConfig(attn_implementation=attention), config), config)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()


def exact_log_likelihood(model, document):
    """Return ``[n]`` float64 log-likelihoods by the logits of a document alone; the first is 0."""
    exact = copy.deepcopy(model)
    exact.set_attn_implementation("eager")
    if exact._can_set_experts_implementation():
        exact.set_experts_implementation("eager")  # the others do not support float64
    if model.config.model_type not in ("xglm", "inkling2_text"):  # their code does not support it
        exact = exact.double()
    with torch.no_grad():
        logits = exact(input_ids=document[None], use_cache=False).logits[0, :-1]
    scores = logits.double().log_softmax(-1).gather(-1, document[1:, None]).squeeze(-1)
    return torch.cat([scores.new_zeros(1), scores])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_documents_are_scored_by_the_models_own_logits_packed_or_alone_after_any_number_of_checks(name):
    """The reference shares nothing with what is tested: neither our attention nor the decision on packing."""
    reason = next((reason for reason, names in REFUSED.items() if name in names), None)
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            check_scoring(Backbone(load(name)))
        return
    model = load(name)
    backbone = Backbone(model)
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(2, 120, (length,), generator=generator) for length in (31, 1, 23)]
    expected = torch.cat([exact_log_likelihood(model, document) for document in documents])
    batch = pack_sequence(documents)
    scored = batch["labels"][0] != IGNORE_INDEX
    for _ in range(3):
        check_scoring(backbone)
        backbone.checked_conditions = None  # decide again
        with torch.no_grad():
            packed = backbone(batch)[0].double()
            alone = torch.cat([backbone(pack_sequence([document]))[0] for document in documents]).double()
        torch.testing.assert_close(packed[scored], expected[scored], rtol=0, atol=5e-4)
        torch.testing.assert_close(alone[scored], expected[scored], rtol=0, atol=5e-4)
