"""Writes tiny Llama models as GGUF files, as llama.cpp's converter of Hugging Face folders does."""

import json

from gguf import GGMLQuantizationType, GGUFWriter, quantize
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama(vocabulary, **settings):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **heads, **settings)).eval()


def write_gguf(
    path, model, tokenizer, *, rule="smollm", kind="F32", architecture="llama", values=(), tensors=(), skip=()
):
    """Write a model and its byte-level tokenizer; ``values`` and ``tensors`` are added, and ``skip`` is left out."""
    writer = GGUFWriter(path, architecture)
    _add_config(writer, model.config)
    _add_tokenizer(writer, tokenizer, rule)
    for name, value in dict(values).items():
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        kinds[type(value)](name, value)
    for name, weight in {**model.state_dict(), **dict(tensors)}.items():
        if not name.startswith(tuple(skip)):
            array = _rotate_neighbors(name, weight.float().numpy(), model.config)
            stored = GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
            writer.add_tensor(_rename(name), quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_config(writer, config):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer, tokenizer, rule):
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)


def _rotate_neighbors(name, array, config):
    """Reorder the rows of queries and keys: llama.cpp rotates neighboring elements instead of halves."""
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if part in name:
            return array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return array


def _rename(name):
    stem, _, ending = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{NAMES[part]}.{ending}"
    return f"{NAMES[stem]}.{ending}" if stem in NAMES else name
