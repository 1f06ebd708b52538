"""Models in the GGUF files of llama.cpp."""
