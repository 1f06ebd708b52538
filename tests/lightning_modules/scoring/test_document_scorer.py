"""Documents that fail by themselves, and errors that stop the run."""

import pytest
import torch

from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.scoring.document_scorer import DocumentScorer, Failed, is_out_of_memory, select_rows
from tests.conftest import make_text, tiny_model
from tests.support.texts import pad_documents


def make_batch(tokenizer, *words):
    return pad_documents([encode_document(make_text(count, count), tokenizer) for count in words])


def scorer(backbone, **settings):
    return DocumentScorer(backbone, "tiny", ShortContext(12, 4), **settings)


def no_room_for(backbone, tokens, error):
    """Let passes over more tokens than that fail."""
    forward = backbone.forward

    def fail(batch, *arguments, **settings):
        if batch["input_ids"].numel() > tokens:
            raise error
        return forward(batch, *arguments, **settings)

    backbone.forward = fail


CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried ..")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), CPU], ids=repr)
def test_what_does_not_fit_together_is_scored_alone_and_what_does_not_fit_alone_fails(tokenizer, error):
    backbone, batch = Backbone(tiny_model(vocab_size=len(tokenizer))), make_batch(tokenizer, 10, 60, 20)
    expected = [scorer(backbone).score(select_rows(batch, [row]))[0] for row in range(3)]
    long = batch["document_boundaries"][1][1]
    no_room_for(backbone, long - 1, error)
    first, second, third = scorer(backbone).try_to_score(batch)
    assert second == Failed(f"out of memory ({long} tokens)")
    for found, wanted in ((first, expected[0]), (third, expected[2])):
        assert torch.equal(found.long, wanted.long)
        assert torch.equal(found.short, wanted.short)
        assert torch.equal(found.offsets, wanted.offsets)
        assert found.text_sha256 == wanted.text_sha256


def test_other_errors_are_those_of_the_run(tokenizer):
    backbone = Backbone(tiny_model(vocab_size=len(tokenizer)))
    no_room_for(backbone, 3, RuntimeError("device-side assert triggered"))
    with pytest.raises(RuntimeError, match="device-side"):
        scorer(backbone).try_to_score(make_batch(tokenizer, 10))
    assert not is_out_of_memory(ValueError("memory"))


def test_more_tokens_than_learned_positions(tokenizer):
    model = tiny_model("gpt2", len(tokenizer), max_position_embeddings=64, n_embd=32, n_layer=1, n_head=2)
    batch = make_batch(tokenizer, 60, 5)
    failed, scored = scorer(Backbone(model)).try_to_score(batch)
    assert "64 learned positions" in failed.reason
    expected = scorer(Backbone(model)).score(select_rows(batch, [1]))[0]
    assert torch.equal(scored.long, expected.long)
    (alone,) = scorer(Backbone(model)).try_to_score(select_rows(batch, [0]))
    assert alone == failed


def test_scores_that_are_no_numbers(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer))
    backbone, batch = Backbone(model), make_batch(tokenizer, 10, 20)
    model.model.embed_tokens.weight.data[batch["input_ids"][1, 1]] = torch.nan
    results = scorer(backbone).try_to_score(batch)
    assert "log-likelihoods are not finite" in results[1].reason
    alone = [scorer(backbone).try_to_score(select_rows(batch, [row]))[0] for row in range(2)]
    assert [isinstance(result, Failed) for result in alone] == [isinstance(result, Failed) for result in results]
