"""Counts of the operators that run."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class OperatorCounts(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.name()] += 1
        return function(*args, **(kwargs or {}))
