"""Questions over long contexts, with answers that are known."""
