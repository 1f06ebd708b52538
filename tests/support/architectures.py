"""Tiny configs of all causal language models of the installed transformers."""

from dataclasses import fields

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_modules.models.loading.probes import WINDOWS

SIZES = {
    "vocab_size": 120,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length"), 512),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("n_groups", "index_block_size"), 2),
    "index_n_heads": 16,  # with few heads, many tokens have the same score, and which ones are chosen is arbitrary
    "rotary_dim": 4,
    # Random models must have opinions, or a leak would hardly show.
    "initializer_range": 0.3,
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    "eos_token_id": 1,
    # Shorter than the documents of tests.
    **dict.fromkeys(WINDOWS, 9),
}
"""Sizes by the names that configs use, where the default is a number."""

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}

OVERRIDES = {
    "bamba": MAMBA,
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 8},
    "gemma4_text": {"vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": MAMBA,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "chunk_size": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What else a config needs to be tiny and valid."""

NOT_BUILT = {
    **dict.fromkeys(("gemma3", "git", "got_ocr2", "phi4_multimodal"), "has a vision tower"),
    **dict.fromkeys(("dots3_note_text", "roc_bert", "xlm"), "has large tables of other names"),
    "blt": "has embeddings of byte groups",
    "moss_transcribe_diarize": "has an audio tower",
    "cohere_compass_text": "needs RoPE parameters of each kind of layer",
    "dots3_note": "needs a vision tower of matching size",
    "gemma3n": "needs timm",
    "gemma4_assistant": "needs the model that it assists",
    "gemma4_unified_assistant": "needs the model that it assists",
    "musicgen": "generates audio",
    "musicgen_melody": "generates audio",
    "qwen4_exp": "needs sizes of its sparse attention",
    "qwen4_exp_text": "needs sizes of its sparse attention",
    "reformer": "needs axial positions of matching size",
}
"""Architectures that these configs cannot build."""

NAMES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_BUILT))


def tiny_config(name, **overrides):
    """Return a config of a few layers, one of each kind, in which windows are shorter than the documents of tests."""
    config_class = CONFIG_MAPPING[name]
    overrides = {**OVERRIDES.get(name, {}), **overrides}
    if "text_config" in (config_class.sub_configs or {}):
        text_class = type(config_class().get_text_config(decoder=True))
        return config_class(text_config={**_sizes(text_class, OVERRIDES.get(text_class.model_type, {})), **overrides})
    return config_class(**_sizes(config_class, overrides))


def _sizes(config_class, overrides):
    default = vars(config_class())
    names = {field.name for field in fields(config_class)}
    numbers = {name for name in names if type(default.get(name)) in (int, float)}
    settings = {name: size for name, size in SIZES.items() if name in numbers}
    if isinstance(default.get("layer_types"), list) and "layer_types" in names:
        kinds = list(dict.fromkeys(default["layer_types"]))
        layers = max(2, len(kinds))
        settings["layer_types"] = (kinds * 2)[:layers]
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if name in settings:
                settings[name] = layers
    if "kv_lora_rank" in names:  # multi-head latent attention expands to all heads
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return {**settings, **overrides}


ROPE = {
    "gemma": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
}
"""Settings of tiny models whose rotation is not that of Llama."""
