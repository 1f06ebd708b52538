"""What one can watch of a run: its identity in loggers, its costs, and its progress line."""
