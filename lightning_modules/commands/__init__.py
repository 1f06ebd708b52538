"""The commands of `longce`."""
