"""Load a model: config, files, dtype, adapters, and identity."""
