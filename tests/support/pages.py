"""Pages of the documentation, and what their commands mean on the machine of a test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def stand_in(words, replaced):
    for word, replacement in replaced.items():
        words = re.sub(rf"(?<![\w/.]){re.escape(word)}(?![\w/.])", replacement, words)
    return words
