"""Documents to scores: the pair of log-likelihoods of each token, and what follows from it."""
