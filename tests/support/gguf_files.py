"""Writes tiny models as GGUF files, as llama.cpp's converter of Hugging Face folders does."""

import json

import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
SIZES = {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def tiny_llama(vocabulary, **settings):
    sizes = {**SIZES, "hidden_size": 64, "head_dim": 16, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **settings)).eval()


def tiny_model(model_type, vocabulary, **settings):
    """A model in which every parameter matters: norms and biases are random as well."""
    sizes = {**SIZES, "hidden_size": 64, "max_position_embeddings": 256, "vocab_size": vocabulary}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **settings})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model


def write_gguf(path, model, tokenizer, *, rule="smollm", kind="F32", architecture=None, values=(), tensors=(), skip=()):
    """Write a model and its tokenizer; ``values`` and ``tensors`` are added, and ``skip`` is left out."""
    architecture = architecture or ARCHITECTURES[model.config.model_type]
    writer = GGUFWriter(path, architecture)
    _add_config(writer, model.config)
    for name in dict(values):  # instead of the model's own
        writer.kv_data[0].pop(name, None)
    add_tokenizer = _add_byte_level if isinstance(tokenizer, PreTrainedTokenizerFast) else _add_sentencepiece
    add_tokenizer(writer, tokenizer, rule)
    for name, value in dict(values).items():
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        {list: writer.add_array, **kinds}[type(value)](name, value)
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    for name, weight in {**weights, **dict(tensors)}.items():
        if not name.startswith(tuple(skip)):
            array = weight.float().numpy()
            if architecture == "llama":
                array = _rotate_neighbors(name, array, model.config)
            if architecture == "gemma3" and "norm" in name:
                array = array + 1
            stored = GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
            writer.add_tensor(_rename(name, architecture), quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_config(writer, config):
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)


def _add_byte_level(writer, tokenizer, rule):
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)


def _add_sentencepiece(writer, processor, rule):
    ids = range(processor.get_piece_size())
    kinds = [(processor.is_byte, 6), (processor.is_unknown, 2), (processor.is_control, 3), (lambda _: True, 1)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([processor.id_to_piece(index) for index in ids])
    writer.add_token_scores([processor.get_score(index) for index in ids])
    writer.add_token_types([next(kind for is_kind, kind in kinds if is_kind(index)) for index in ids])
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_unk_token_id(processor.unk_id())


def _rotate_neighbors(name, array, config):
    """Reorder the rows of queries and keys: llama.cpp rotates neighboring elements instead of halves."""
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if part in name:
            return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array


def _rename(name, architecture):
    names = GEMMA_NAMES if architecture == "gemma3" else NAMES
    stem, _, ending = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{names[part]}.{ending}"
    return f"{names[stem]}.{ending}" if stem in names else name
