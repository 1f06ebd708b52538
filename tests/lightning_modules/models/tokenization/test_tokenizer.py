import json
import re

import pytest
from transformers import AutoTokenizer, Qwen2Config

from lightning_modules.models.tokenization.tokenizer import (
    load_tokenizer,
    tokenizer_from_json,
    tokenizer_hash,
    tokenizer_to_json,
    vocabulary_size,
    warn_of_other_tokenizer,
)
from tests.conftest import byte_level_tokenizer, make_text


def test_stored_truncation_is_dropped_and_the_hash_is_that_of_the_tokens(model_dir, evaluator_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.backend_tokenizer.enable_truncation(max_length=3)
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"]
    loaded = load_tokenizer(str(tmp_path))
    before = tokenizer_hash(loaded)
    assert len(loaded("the cat sat on the mat")["input_ids"]) > 3
    assert tokenizer_hash(loaded) == before == tokenizer_hash(load_tokenizer(str(model_dir)))
    assert tokenizer_hash(load_tokenizer(str(evaluator_dir))) != before


def test_vocabulary_size_is_one_more_than_the_largest_id(model_dir):
    tokenizer = load_tokenizer(str(model_dir))
    assert vocabulary_size(tokenizer) == 400
    tokenizer.add_tokens(["new"])
    assert vocabulary_size(tokenizer) == 401


def test_the_stored_tokenizer_is_used_where_transformers_would_build_another(tmp_path):
    tokenizer = byte_level_tokenizer(["the cat sat on 1234 mats"])  # Qwen2's tokenizer separates digits
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="would load .* as Qwen2Tokenizer"):
        loaded = load_tokenizer(str(tmp_path))
    text = "the cat sat on 1234 mats"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    # If this fails, transformers reads the file by itself now.
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] != tokenizer(text)["input_ids"]


def test_unknown_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"No tokenizer at '{tmp_path / 'none'}'")):
        load_tokenizer(str(tmp_path / "none"))


def test_a_tokenizer_that_is_nowhere_survives_as_json(tokenizer):
    again = tokenizer_from_json(tokenizer_to_json(tokenizer))
    text = "ba ce di, fo 12 ü"
    assert again(text, return_offsets_mapping=True) == tokenizer(text, return_offsets_mapping=True)
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert tokenizer_hash(again) == tokenizer_hash(tokenizer)
    for damaged in ("{", "[]", '{"tokenizer": "x", "special": {}}', tokenizer_to_json(tokenizer)[:-9]):
        with pytest.raises(ValueError, match="The stored tokenizer is damaged"):
            tokenizer_from_json(damaged)


def test_only_another_tokenizer_is_warned_of(model_dir, tmp_path, recwarn):
    tokenizer = load_tokenizer(str(model_dir))
    stored = tokenizer_from_json(tokenizer_to_json(tokenizer))  # the same, from nowhere
    for same in (tokenizer, stored):
        warn_of_other_tokenizer(same, str(model_dir))
    warn_of_other_tokenizer(tokenizer, str(tmp_path))  # a model without a tokenizer
    tokenizer.add_tokens(["one more"])
    warn_of_other_tokenizer(tokenizer, str(model_dir))
    assert not recwarn.list
    other = byte_level_tokenizer([make_text(300, seed=9).upper()], vocab_size=380)
    with pytest.warns(UserWarning, match=r"\d+ of the 380 tokens .* differ from those of the model .*data.tokenizer"):
        warn_of_other_tokenizer(other, str(model_dir))
