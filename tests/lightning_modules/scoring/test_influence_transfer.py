from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import processors

from datamodules.packing.packing import pack_documents
from datamodules.packing.sequences import PackedRowDataset, collate_rows
from lightning_modules.batch import pack_sequence
from lightning_modules.functional import transfer_influence
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.tokenization.detokenization import TokenCharacters
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring.influence_transfer import InfluenceTransfer, compute_influence, have_same_ids
from lightning_modules.scoring.scored_model import score_text
from tests.conftest import make_text, metaspace_tokenizer
from tests.support import reference
from tests.support.texts import sentencepiece_like

SHORT = ShortContext(24, 8)
TEXTS = [make_text(90, 1), make_text(4, 2), f"Ünïcode 日本語 🙂 {make_text(80, 3)} 日本語 🙂", make_text(100, 4)]


def packed(tokenizer):
    """Batches of rows that begin and end in the middle of a word or a character, with an end token in each document."""
    documents = [[*tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, 1] for text in TEXTS]
    tokens = np.concatenate(documents)
    store = SimpleNamespace(tokens=tokens, read=lambda start, stop: tokens[start:stop])
    rows = PackedRowDataset(store, pack_documents(np.cumsum([0, *map(len, documents)]), 97))
    return [collate_rows([rows[index] for index in range(len(rows))[start : start + 2]]) for start in (0, 2, 4)]


def test_rows_without_short_contexts_are_not_scored(model_dir):
    backbone = load_backbone(ModelConfig(str(model_dir)))
    ids = torch.arange(32).unsqueeze(0) % 7
    batch = pack_sequence([ids[0]])
    weights = compute_influence(batch, backbone, ShortContext(16, 8), gamma=5.0)
    assert weights.max() > 1.01
    assert torch.equal(compute_influence(batch, backbone, ShortContext(16, 8), gamma=1.01), weights.clamp(max=1.01))
    backbone.forward = None
    assert torch.equal(compute_influence(batch, backbone, SHORT, gamma=5.0), torch.ones(1, 32))


@pytest.mark.parametrize("special", [False, True])
def test_weights_of_another_tokenizer_match_a_walk_over_the_characters(evaluator_dir, tokenizer, corpus, special):
    judge = load_backbone(ModelConfig(str(evaluator_dir))).double()
    other = metaspace_tokenizer([*corpus, "Ünïcode 日本語 🙂"])
    if special:
        other.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="</s> $A", special_tokens=[("</s>", other.eos_token_id)]
        )
    transfer = InfluenceTransfer(TokenCharacters(tokenizer), other, add_special_tokens=special)
    moved = 0
    for batch in packed(tokenizer):
        found = transfer.compute_influence(batch, judge, SHORT, gamma=4.0)
        for row, boundaries in enumerate(batch["document_boundaries"]):
            for start, stop in pairwise(boundaries):
                ids = batch["input_ids"][row, start:stop]
                expected = slow_transfer(ids, tokenizer, judge.model, other, special)
                torch.testing.assert_close(found[row, start:stop].double(), expected, rtol=1e-4, atol=1e-5)
                moved += int((expected != 1).sum())
    assert moved > 100


def test_a_document_is_read_without_the_space_that_its_tokenizer_puts_before_it(evaluator_dir, corpus):
    judge = load_backbone(ModelConfig(str(evaluator_dir))).double()
    tokenizer = sentencepiece_like(corpus)
    other = metaspace_tokenizer(corpus)
    encoding = tokenizer.backend_tokenizer.encode(TEXTS[0])
    transfer = InfluenceTransfer(TokenCharacters(tokenizer), other, add_special_tokens=False)
    batch = pack_sequence([torch.tensor([*encoding.ids, 2])])
    found = transfer.compute_influence(batch, judge, SHORT, gamma=4.0)[0]
    scores = score_text(TEXTS[0], judge, other, SHORT, add_special_tokens=False)
    expected = transfer_influence(scores.soft_influence(gamma=4.0), scores.offsets, torch.tensor(encoding.offsets))
    torch.testing.assert_close(found, torch.cat([expected, torch.ones(1)]).float())
    assert (expected > 1).any()


def slow_transfer(ids, tokenizer, judge, other, special):
    text, offsets = TokenCharacters(tokenizer)(ids)
    encoding = other.backend_tokenizer.encode(text, add_special_tokens=special)
    with torch.no_grad():
        long, short = reference.long_and_short(judge, torch.tensor(encoding.ids), 24, 8)
    weights = (long - short).exp().clamp(max=4).tolist()
    characters = []
    for character in range(len(text)):
        owners = [w for w, (a, b) in zip(weights, encoding.offsets, strict=True) if a <= character < b]
        characters.append(sum(owners) / len(owners) if owners else 1.0)
    moved = [sum(characters[a:b]) / (b - a) if b > a else 1.0 for a, b in offsets.tolist()]
    return torch.tensor([1.0, *moved[1:]], dtype=torch.float64)


def test_equal_ids_are_those_of_equal_vocabularies_and_rules(model_dir, tokenizer, other_tokenizer):
    again = load_tokenizer(str(model_dir))
    assert have_same_ids(tokenizer, again)
    again.backend_tokenizer.post_processor = processors.ByteLevel()
    assert have_same_ids(tokenizer, again), "which special tokens it would add does not matter"
    again.add_tokens(["new"])
    assert not have_same_ids(tokenizer, again)
    assert not have_same_ids(tokenizer, other_tokenizer)
