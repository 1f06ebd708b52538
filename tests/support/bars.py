"""A stand-in for progress bars, which keeps what it is told."""

"""Of a model for the made-up language."""


class Bar:
    """A bar: ``lines`` are its descriptions, the first of which is its ``name``; ``seen`` is what it has counted."""

    ncols = None

    def __init__(self, name, *, total=None, initial=0, **_):
        self.name, self.total, self.n, self.seen, self.lines = name, total, initial, [], []

    def set_description(self, line, refresh=True):
        self.lines.append(line)

    set_description_str = set_description

    def set_postfix_str(self, line, refresh=True):
        pass

    def update(self, count=1):
        self.n += count
        self.seen.append(self.n)

    def refresh(self):
        pass

    def close(self):
        self.seen.append("closed")


def replace_bars(monkeypatch, module):
    """Replace the progress bars that a module makes; return the list of those that it makes."""
    made = []
    monkeypatch.setattr(module, "progress_bar", lambda *args, **kwargs: made.append(Bar(*args, **kwargs)) or made[-1])
    return made
