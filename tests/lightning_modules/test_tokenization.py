import json
import re

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from lightning_modules.tokenization import load_tokenizer, tokenizer_hash, vocabulary_size


def test_stored_truncation_is_dropped_and_the_hash_stays(model_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.backend_tokenizer.enable_truncation(max_length=3)
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"]
    loaded = load_tokenizer(str(tmp_path))
    before = tokenizer_hash(loaded)
    assert len(loaded("the cat sat on the mat")["input_ids"]) > 3
    assert tokenizer_hash(loaded) == before == tokenizer_hash(load_tokenizer(str(model_dir)))


def test_hash_tells_tokenizers_apart(model_dir, evaluator_dir):
    assert len({tokenizer_hash(load_tokenizer(name)) for name in (str(model_dir), str(evaluator_dir))}) == 2


def test_vocabulary_size_is_one_more_than_the_largest_id(model_dir):
    tokenizer = load_tokenizer(str(model_dir))
    assert vocabulary_size(tokenizer) == 400
    tokenizer.add_tokens(["new"])
    assert vocabulary_size(tokenizer) == 401


def test_unknown_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"No tokenizer at '{tmp_path / 'none'}'")):
        load_tokenizer(str(tmp_path / "none"))


def test_slow_tokenizer_is_refused(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no character offsets"):
        load_tokenizer(str(tmp_path))
