"""Time and memory of scoring and of a LongCE step, compared with the code of the paper's authors."""
