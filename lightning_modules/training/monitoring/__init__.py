"""Identity, costs and progress of a run, for loggers and terminals."""
