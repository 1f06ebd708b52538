"""Cache of tokenized corpora on disk."""
