"""Which curves stand side by side on TensorBoard's page of custom scalars."""

from typing import Any


def custom_scalars() -> dict[str, Any]:
    """LongPPL beside perplexity, and what training and tasks log; for ``SummaryWriter.add_custom_scalars``.

    Tags are regular expressions; charts without a curve stay empty, such as those of a test that was never made.
    """
    return {
        "validation": {
            "LongPPL (key tokens)": _lines("val/longppl"),
            "perplexity (all tokens)": _lines("val/perplexity"),
            "soft LongPPL (all tokens, weighted)": _lines("val/longppl_soft"),
        },
        "training": {
            "loss": _lines("train/loss"),
            "weights: mean": _lines("train/weight_mean"),
            "weights: shares of tokens": _lines(
                "train/weight_above_1", "train/weight_at_cap", "train/weight_effective_share"
            ),
        },
        "tasks": {"average by length": ["Multiline", ["^tasks/average/.*$"]]},
        "test": {
            "LongPPL (key tokens), test": _lines("test/longppl"),
            "perplexity (all tokens), test": _lines("test/perplexity"),
            "soft LongPPL, test": _lines("test/longppl_soft"),
        },
    }


def _lines(*tags: str) -> list[Any]:
    return ["Multiline", [f"^{tag}$" for tag in tags]]
