"""The tables of the paper at full size."""
