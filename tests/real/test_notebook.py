"""The notebook on key tokens with the model that it names."""

import pytest

from tests.support.notebooks import FOLDER, key_tokens_of_models, run

pytestmark = [pytest.mark.real, pytest.mark.slow]

CHARACTERS = 5_000  # of the text; the notebook reads 14,000, which take three times as long


def test_longppl_notices_a_limited_context_and_perplexity_hardly(model, tmp_path):
    text = tmp_path / "start.txt"
    text.write_text((FOLDER / "constitution.txt").read_text(encoding="utf-8")[:CHARACTERS], encoding="utf-8")
    output = run("key_tokens", tmp_path, MODEL=str(model), TEXT=str(text), LONGCE_CACHE=str(tmp_path / "cache"))
    found = key_tokens_of_models(output)
    longppl, perplexity = found["whole context"]
    limited_longppl, limited_perplexity = found["last 128 tokens"]
    assert limited_longppl > 10 * longppl
    assert limited_perplexity < 1.3 * perplexity
