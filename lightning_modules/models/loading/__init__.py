"""How a model gets into memory: config, files, dtype, adapters, and what identifies it."""
