"""Models behind an HTTP server: token ids are sent, and log-likelihoods of the scored tokens come back."""
