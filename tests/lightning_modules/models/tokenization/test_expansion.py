"""A stored tokenizer that makes a billion letters of one is refused before it is loaded, and no common one is."""

import json
import time

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from lightning_modules.models.tokenization.tokenizer import load_tokenizer


def save(folder, normalizer=None, decoder=None, added=None):
    letters = [*map(chr, range(32, 127)), "▁", "<s>"]
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for name, part in (("normalizer", normalizer), ("decoder", decoder)):
        if part is not None:
            content[name] = json.loads(part.__getstate__())
    if added is not None:  # normalized when the file is read
        content["added_tokens"].append({**content["added_tokens"][0], "id": 200, "content": added, "normalized": True})
    file.write_text(json.dumps(content))
    return str(folder)


DOUBLED = [normalizers.Replace("a", "aa")] * 30
BOMBS = {
    "string": DOUBLED,
    "regex": [normalizers.Replace(Regex("[a-z]"), "bc")] * 30,
    "escaped": [normalizers.Replace(Regex(r"\x{0900}"), "\u0900\u0900")] * 30,
    "turns": [normalizers.Replace("a", "bb"), normalizers.Replace("b", "aa")] * 15,
    "pairs": [normalizers.Replace("xy", "xyxy")] * 30,
    "empty": [normalizers.Replace(Regex(""), "q")] * 30,
    "nested": [normalizers.Sequence(DOUBLED[:15]), normalizers.Sequence(DOUBLED[:15])],
    "once": [normalizers.Replace("a", "b" * 1_000_000)],
    "prepended": [normalizers.Prepend("z" * 1_000_000)],
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_normalizer_that_expands_text_without_bound_is_refused_at_once(name, tmp_path):
    folder = save(tmp_path, normalizers.Sequence(BOMBS[name]), added="a" if name == "string" else None)
    started = time.process_time()  # not of a clock, which counts what else the machine does
    with pytest.raises(ValueError, match=r"tokenizer\.json.*characters of one"):
        load_tokenizer(folder)
    assert time.process_time() - started < 2


def test_a_decoder_that_expands_text_without_bound_is_refused(tmp_path):
    folder = save(tmp_path, decoder=decoders.Sequence([decoders.Replace("a", "aa")] * 30))
    with pytest.raises(ValueError, match="characters of one"):
        load_tokenizer(folder)


COMMON = {
    "llama": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "xlnet": normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    ),
    "bert": normalizers.BertNormalizer(),
    "many": normalizers.Sequence([normalizers.Replace(chr(0x2150 + index), f"1/{index}") for index in range(60)]),
    "words": normalizers.Sequence([normalizers.Replace("\n", "<newline>"), normalizers.Replace("\t", "<tab>" * 4)]),
}


@pytest.mark.parametrize("name", COMMON)
def test_common_normalizers_are_accepted(name, tmp_path):
    read = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert load_tokenizer(save(tmp_path, COMMON[name], read))("a b").input_ids
