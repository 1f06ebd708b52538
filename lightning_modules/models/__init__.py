"""A Hugging Face causal language model: loading, context extension and log-likelihoods."""
