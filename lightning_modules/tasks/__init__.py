"""Long-context tasks: their questions, prompts, lengths and scoring."""
