import pytest
import torch

from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.scoring.context_lengths import ContextLengths
from lightning_modules.scoring.document_scorer import DocumentScorer
from tests.conftest import make_text, tiny_model
from tests.support import reference
from tests.support.texts import pad_documents


def scored(model, tokenizer, contexts, window, words=60, **settings):
    document = encode_document(make_text(words), tokenizer)
    scorer = DocumentScorer(
        Backbone(model), "tiny", ShortContext(12, 4), ContextLengths(tuple(contexts), window), **settings
    )
    return document["input_ids"][0], scorer.score(document)[0]


def test_each_rung_is_a_pass_over_its_context_alone(tokenizer):
    """Full logits in float64, one window at a time: x_{P-c} .. x_{n-1}, of which the last w are kept."""
    model = tiny_model(vocab_size=len(tokenizer), dtype=torch.float64)
    ids, scores = scored(model, tokenizer, (1, 7, 30, 64), 10)
    start = len(ids) - 10
    assert len(ids) > 80
    assert list(scores.context_scores) == [1, 7, 30, 64]
    with torch.no_grad():
        for context, own in scores.context_scores.items():
            expected = reference.document_log_likelihood(model, ids[start - context :])[context:]
            torch.testing.assert_close(own.double(), expected, rtol=1e-6, atol=1e-6)
            assert (own - scores.long[start:]).abs().max() > 0.01, "and no other context"


def test_the_longest_rung_is_the_long_pass_where_they_are_the_same(tokenizer, monkeypatch):
    model = tiny_model(vocab_size=len(tokenizer))
    ids, first = scored(model, tokenizer, (16,), 10)
    passes, forward = [], Backbone.forward
    monkeypatch.setattr(Backbone, "forward", lambda *a, **k: passes.append(1) or forward(*a, **k))
    _, without = scored(model, tokenizer, (), 10)
    before = len(passes)
    _, scores = scored(model, tokenizer, (16, len(ids) - 10, len(ids)), 10)
    assert len(passes) - before == before + 1, "one pass for the context length 16"
    assert torch.equal(scores.context_scores[len(ids) - 10], scores.long[-10:])
    assert torch.equal(scores.context_scores[16], first.context_scores[16])
    assert list(scores.context_scores) == [16, len(ids) - 10]
    assert without.context_scores == {}


def test_rows_of_a_batch_have_the_rungs_that_they_have_alone(tokenizer):
    model, lengths = tiny_model(vocab_size=len(tokenizer)), ContextLengths((8, 40), 6)
    rows = [encode_document(make_text(words, words), tokenizer) for words in (1, 8, 70)]
    batch = pad_documents(rows)
    backbone = Backbone(model)
    with torch.no_grad():
        together = lengths.log_likelihood(backbone, batch, backbone(batch))
        alone = [lengths.log_likelihood(backbone, row, backbone(row))[0] for row in rows]
    assert [sorted(own) for own in together] == [[], [8], [8, 40]]
    for own, expected in zip(together, alone, strict=True):
        for context in own:
            torch.testing.assert_close(own[context], expected[context])


@pytest.mark.parametrize("contexts", [(8, 8), (0, 4), (9, 4)])
def test_lengths_without_a_meaning_are_refused(contexts):
    with pytest.raises(ValueError, match="`contexts`"):
        ContextLengths(contexts, 4)
