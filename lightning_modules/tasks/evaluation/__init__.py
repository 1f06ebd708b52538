"""Evaluation of a model on long-context tasks: questions, answers, scores and reports."""
