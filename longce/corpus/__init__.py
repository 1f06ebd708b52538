"""Commands on corpora: `longce corpus score` and `longce corpus select`."""
