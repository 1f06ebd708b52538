"""Scores of documents: the pair of log-likelihoods of each token, and the metrics computed from it."""
