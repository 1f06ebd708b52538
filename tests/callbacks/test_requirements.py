import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from callbacks import HuggingFaceExport, KeyTokenInspector
from callbacks.requirements import require_long_context_lm


@pytest.mark.parametrize("callback", [HuggingFaceExport, KeyTokenInspector])
def test_another_module_is_refused_by_name(callback, tmp_path):
    with pytest.raises(ValueError, match=f"`{callback.__name__}` needs a `LongContextLM`, got a `BoringModel`"):
        require_long_context_lm(BoringModel(), callback.__new__(callback))
