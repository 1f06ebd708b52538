"""How the context of a model is extended: RoPE types, EABF and attention patterns."""
