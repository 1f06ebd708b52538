"""FLOPs, time, memory and cost of training and scoring, computed from a config without weights."""
