"""Extension of a model's context: RoPE types, EABF and attention patterns."""
