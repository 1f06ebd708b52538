import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from callbacks import HuggingFaceExport, TokenScoresWriter
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.token_scores import TokenScores, text_sha256
from lightning_modules.tokenization import encode_document
from tests.conftest import make_text


def make_trainer(callback, tmp_path):
    return Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )


@pytest.fixture
def documents(tokenizer):
    return [encode_document(make_text(60, seed), tokenizer, name=str(seed)) for seed in range(2)]


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj", "lm_head"]}])
def test_export_gives_the_same_logits_and_replaces_an_earlier_one(model_dir, documents, tmp_path, lora):
    target = tmp_path / "out" / "model"
    for _ in range(2):
        module = LongContextLM(
            str(model_dir), context_length=48, stride=16, lora=lora, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01)
        )
        make_trainer(HuggingFaceExport(str(target)), tmp_path).fit(module, DataLoader(documents, batch_size=None))
    ids = documents[0]["input_ids"]
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(target)
        torch.testing.assert_close(
            loaded(ids).logits, module.backbone.base_model.eval()(ids).logits, rtol=1e-4, atol=1e-4
        )
        original = AutoModelForCausalLM.from_pretrained(model_dir)
        assert (loaded(ids).logits - original(ids).logits).abs().max() > 0.01
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_predictions_become_files(model_dir, documents, tmp_path):
    module = LongContextLM(str(model_dir), context_length=48, stride=16)
    trainer = make_trainer(TokenScoresWriter(str(tmp_path / "scores")), tmp_path)
    trainer.predict(module, DataLoader(documents, batch_size=None), return_predictions=False)
    for document in documents:
        scores = TokenScores.load(tmp_path / "scores" / f"{text_sha256(document['text'][0])}.safetensors")
        assert torch.equal(scores.offsets, document["offsets"][0])


def test_export_refuses_a_folder_of_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("keep")
    with pytest.raises(ValueError, match="no earlier export"):
        HuggingFaceExport(str(tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "keep"
