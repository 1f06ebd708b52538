"""The layout of TensorBoard's CUSTOM SCALARS, importable without matplotlib."""

CUSTOM_SCALARS = {
    "validation": {
        "LongPPL (key tokens)": ["Multiline", [r"^val/(.+/)?longppl$"]],
        "perplexity (all tokens)": ["Multiline", [r"^val/(.+/)?perplexity$"]],
        "soft LongPPL (all tokens, weighted)": ["Multiline", [r"^val/(.+/)?longppl_soft$"]],
    },
    "training": {
        "loss": ["Multiline", ["^train/loss$"]],
        "weights: mean": ["Multiline", ["^train/weight_mean$"]],
        "weights: shares of tokens": ["Multiline", ["^train/weight_(above_1|at_cap|effective_share)$"]],
    },
    "tasks": {"average by length": ["Multiline", ["^tasks/average/.*$"]]},
    "test": {
        "LongPPL (key tokens), test": ["Multiline", [r"^test/(.+/)?longppl$"]],
        "perplexity (all tokens), test": ["Multiline", [r"^test/(.+/)?perplexity$"]],
        "soft LongPPL, test": ["Multiline", [r"^test/(.+/)?longppl_soft$"]],
    },
}
"""Layout for ``SummaryWriter.add_custom_scalars``: LongPPL next to perplexity, a curve for each set, evaluator and
thresholds. Charts without data stay empty."""
