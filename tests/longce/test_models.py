"""Names of the results of several models."""

import pytest

from longce import models


def test_models_have_different_names(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "check_model", lambda *_: None)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert models._name_models([".", "org/M/"]) == ["here", "M"]
    assert models._name_models(["a/M", "b/M"]) == ["a__M", "b__M"]
    with pytest.raises(ValueError, match="`model` names a model twice"):
        models._name_models(["a/M", "a/M"])


def test_extensions_of_one_method_are_named_by_what_differs(monkeypatch):
    monkeypatch.setattr(models, "check_model", lambda *_: None)
    lengths = {"original_length": 8192, "target_length": 16384}
    narrow, wide = ({"method": "streaming_llm", "sinks": 4, "window": window, **lengths} for window in (252, 508))
    yarn, longer = ({"method": "yarn", "original_length": 8192, "target_length": size} for size in (16384, 32768))
    variants = models._list_variants(["M"], {"other_extensions": [narrow, wide, yarn, longer]})
    assert [variant.name for variant in variants] == [
        "M",
        "M-streaming_llm-16384-window252",
        "M-streaming_llm-16384-window508",
        "M-yarn-16384",
        "M-yarn-32768",
    ]
    with pytest.raises(ValueError, match="give each extension once"):
        models._list_variants(["M"], {"other_extensions": [yarn, yarn]})
