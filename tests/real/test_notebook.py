"""The notebook on key tokens with the model that it names."""

import pytest

from tests.support.notebooks import key_tokens_of_models, run

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_longppl_notices_a_limited_context_and_perplexity_hardly(model, tmp_path):
    output = run("key_tokens", tmp_path, MODEL=str(model), LONGCE_CACHE=str(tmp_path / "cache"))
    found = key_tokens_of_models(output)
    longppl, perplexity = found["whole context"]
    limited_longppl, limited_perplexity = found["last 128 tokens"]
    assert limited_longppl > 10 * longppl
    assert limited_perplexity < 1.3 * perplexity
