"""A Hugging Face causal language model: how it is loaded, extended and asked for log-likelihoods."""
