"""``longce serve``: a model's log-likelihoods over HTTP."""
