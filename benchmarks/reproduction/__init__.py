"""The paper's experiments, in miniature and at full size."""
