"""Export of trained models to folders that transformers loads, merged or with separate adapters."""
