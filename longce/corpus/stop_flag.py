"""Flag that stops the tasks of a Ray cluster, in a module of its own: its process must not import torch for it."""


class StopFlag:
    """Whether tasks must stop. Ray's `cancel` does not wait for their last writes, and not always for their reply."""

    def __init__(self) -> None:
        self.wanted = False

    def set(self) -> None:
        """Stop all tasks."""
        self.wanted = True

    def is_set(self) -> bool:
        """Return whether tasks must stop."""
        return self.wanted
