"""Models on HTTP servers: token ids are sent, and log-likelihoods of the scored tokens are returned."""
