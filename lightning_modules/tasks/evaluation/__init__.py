"""Long-context tasks put to a model: which questions, its answers and their scores, and what is reported of them."""
