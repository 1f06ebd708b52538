"""TensorBoard panels: a table of tokens, and figures over all documents."""
