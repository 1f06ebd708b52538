"""FLOPs, time and memory of training and scoring, computed from a config without weights."""
