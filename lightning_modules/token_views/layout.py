"""Which curves stand side by side on TensorBoard's page of custom scalars."""

from typing import Any


def custom_scalars() -> dict[str, Any]:
    """LongPPL beside perplexity, then tasks, then training; for ``SummaryWriter.add_custom_scalars``.

    Tags are regular expressions; charts without a curve stay empty, such as those of a test that was never made.
    """
    return {
        "validation": {
            "LongPPL (key tokens)": _lines("val/longppl", "val/longppl_soft"),
            "perplexity (all tokens)": _lines("val/perplexity"),
            "share of key tokens": _lines("val/key_token_share"),
            "loss by context, (a/c)^b + g: exponent b": _lines("val/power_law_b"),
        },
        "tasks": {"accuracy by length": ["Multiline", ["^tasks/average/.*$"]]},
        "training": {
            "loss": _lines("train/loss"),
            "weights: mean": _lines("train/weight_mean"),
            "weights: shares of tokens": _lines(
                "train/weight_above_1", "train/weight_at_cap", "train/weight_effective_share"
            ),
            "learning rate": ["Multiline", ["^lr-.*$"]],
        },
        "test": {
            "LongPPL (key tokens), test": _lines("test/longppl", "test/longppl_soft"),
            "perplexity (all tokens), test": _lines("test/perplexity"),
        },
    }


def _lines(*tags: str) -> list[Any]:
    return ["Multiline", [f"^{tag}$" for tag in tags]]
