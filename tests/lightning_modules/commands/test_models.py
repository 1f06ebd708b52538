"""Names of the results of several models."""

import pytest

from lightning_modules.commands import models


def test_models_have_different_names(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "check_model", lambda *_: None)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert models._name_models([".", "org/M/"]) == ["here", "M"]
    assert models._name_models(["a/M", "b/M"]) == ["a__M", "b__M"]
    with pytest.raises(ValueError, match="`model` names a model twice"):
        models._name_models(["a/M", "a/M"])
