"""Bytes of living tensors, exactly: unlike a process's memory they are the same at every run."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what tensors made within hold, each storage once, and the most that they ever held."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            self._note(leaf, new=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._note(leaf, new=True)
        return result

    def _note(self, leaf, *, new):
        if not isinstance(leaf, torch.Tensor):
            return
        storage = leaf.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        size = storage.nbytes() if new else 0  # an input was there before
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage._cdata, size)

    def _forget(self, key, size):
        self._known.discard(key)
        self.live -= size
