"""Model types that each context extension supports; tests compare them with dense formulas in float64."""

ARCHITECTURES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "phi",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "glm4",
    "nemotron",
    "olmo2",
    "olmo3",
    "smollm3",
    "deepseek_v3",
    "qwen3_next",
)
"""Model types whose frequencies are those of `ROPE_INIT_FUNCTIONS`, of all layers or of each kind of layer."""

DYNAMIC_ARCHITECTURES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gpt_neox")
"""Model types that recompute frequencies in each pass, in one buffer."""

EABF_ARCHITECTURES = tuple(name for name in ARCHITECTURES if name not in ("phi3", "gemma2", "gpt_oss", "qwen3_next"))
"""Model types that pass positions to their attention, which has no soft cap and no sinks."""

PATTERN_ARCHITECTURES = tuple(name for name in EABF_ARCHITECTURES if name not in ("glm4", "deepseek_v3"))
"""Model types whose attention also rotates the usual halves of each head."""

FIXED_WINDOWS = ("cohere2", "exaone4", "gpt_oss", "gemma2", "smollm3")
"""Model types whose layers with windows differ from the others, and cannot become layers without a window."""

REFUSED = {
    **dict.fromkeys(("cohere2", "exaone4", "llama4_text"), "whose layers that see the whole text have no positions"),
    "gemma2": "whose attention has a soft cap",
    "gpt_oss": "whose attention has sinks",
    "glm4": "which rotates neighboring components",
    "deepseek_v3": "which rotates the last components of each head",
    "phi3": "which has only the RoPE types 'default' and 'longrope'",
}
"""Why a method is not supported, where it is known."""
