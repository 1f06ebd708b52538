"""The README's picture: a real document on the page of `longce inspect`, and which of its words are key.

It needs a real evaluator, and Chromium for playwright (the extra ``dev``).
"""

import re
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from PIL import Image

from lightning_modules.scoring.key_tokens import evaluator_key_tokens
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.utilities.files import writable_folder
from lightning_modules.visualization.page import Inspection

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT, SCALE = 1110, 740, 1.7
"""Window in CSS pixels, and picture pixels in one of them; a README shows pictures about 900 pixels wide."""

COLORS = 256

SHORTEST_WORD = 4
"""In letters: below, the picture would show a syllable or "of"."""

_WORD = re.compile(r"\w+(?:[.,'\u2019-]\w+)*")
_POSSESSIVE = re.compile("['\\u2019]s$")

_POINT = """async (token) => {
  while (performance.getEntriesByName("longce-complete").length === 0)
    await new Promise((done) => setTimeout(done, 20));
  const current = () => document.querySelector(".t.current")?.dataset.token;
  for (let step = 0; step <= 10000 && current() !== String(token); step++)
    document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "n", bubbles: true }));
  document.activeElement.blur();
  return current() === String(token);
}"""


class KeyToken(NamedTuple):
    """A key token: its index and LSD, its word, and how many tokens ago the word was last used; None if never."""

    index: int
    lsd: float
    word: str
    distance: int | None
    starts_word: bool

    @property
    def kind(self) -> str:
        """What the token is a part of."""
        if not self.word:
            return "punctuation"
        if any(letter.isdigit() for letter in self.word):
            return "numbers"
        return "capitalized words" if self.word[0].isupper() else "other words"


def list_key_tokens(text: str, scores: TokenScores, *, alpha: float = 2.0, beta: float = -2.0) -> list[KeyToken]:
    """Return the key tokens of a document in order, each with the word that it is a part of."""
    words = list(_WORD.finditer(text))
    names = [_POSSESSIVE.sub("", word[0]) for word in words]
    starts, spans = [word.start() for word in words], scores.offsets.tolist()
    # The word of each token by the token's first letter; the space before a word belongs to its token.
    places = [_find_word(text, span, starts, words) for span in spans]
    last_use: dict[str, int] = {}
    distances: dict[int, int | None] = {}  # by word
    for index, place in enumerate(places):
        if place is not None and place not in distances:
            word = names[place]
            distances[place] = index - last_use[word] if word in last_use else None
            last_use[word] = index
    found = []
    for index in evaluator_key_tokens(scores, alpha=alpha, beta=beta).nonzero().flatten().tolist():
        place, lsd = places[index], float(scores.long[index] - scores.short[index])
        if place is None:
            found.append(KeyToken(index, lsd, "", None, starts_word=False))
            continue
        found.append(KeyToken(index, lsd, names[place], distances[place], places[index - 1] != place))
    return found


def _find_word(text: str, span: Sequence[int], starts: list[int], words: list[re.Match[str]]) -> int | None:
    """Return which word has the first letter or digit of a character span; None for punctuation and white space."""
    first = next((place for place in range(*span) if text[place].isalnum()), None)
    if first is None:
        return None
    place = bisect_right(starts, first) - 1
    return place if place >= 0 and first < words[place].end() else None


def choose_token(tokens: Sequence[KeyToken], longest_short: int) -> int:
    """Return the index of the token to show: the largest LSD of those that begin a long word from the far context.

    Raises:
        ValueError: If the document has no such key token.
    """
    instructive = [
        token
        for token in tokens
        if token.starts_word and len(token.word) >= SHORTEST_WORD and (token.distance or 0) > longest_short
    ]
    if not instructive:
        raise ValueError("No key token begins a word that only the far context has: choose another text or `--token`.")
    return max(instructive, key=lambda token: token.lsd).index


def describe_key_tokens(tokens: Sequence[KeyToken], longest_short: int) -> str:
    """Return counts of key tokens by kind, and how many repeat a word that only the far context has."""
    counts = Counter(token.kind for token in tokens)
    far = sum((token.distance or 0) > longest_short for token in tokens)
    kinds = ", ".join(f"{count} of {kind}" for kind, count in counts.most_common())
    return f"{len(tokens)} key tokens: {kinds}; {far} of a word last used more than {longest_short:,} tokens before"


def save_pictures(inspection: Inspection, token: int, folder: Path) -> list[Path]:
    """Save the page at a key token as ``inspect.png`` and ``inspect-dark.png``.

    Raises:
        ValueError: If playwright or a browser is not installed.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError as error:
        raise ValueError("Pictures need playwright: install the extra `dev`.") from error
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        raise ValueError("Pictures need Chromium: `apt-get install chromium` installs it on Debian and Ubuntu.")
    writable_folder(folder, remedy="Choose another folder with `--output`.")
    paths = [folder / "inspect.png", folder / "inspect-dark.png"]
    with TemporaryDirectory() as place, sync_playwright() as playwright:
        page_file = inspection.save(Path(place) / "page.html")
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--hide-scrollbars"])
        for path, scheme in zip(paths, ("light", "dark"), strict=True):
            size = {"width": WIDTH, "height": HEIGHT}
            page = browser.new_page(viewport=size, device_scale_factor=SCALE, color_scheme=scheme)
            page.goto(page_file.as_uri())
            assert page.evaluate(_POINT, token), "the key n reaches every key token"
            page.wait_for_timeout(300)  # it scrolls there over several frames
            with Image.open(BytesIO(page.screenshot())) as picture:  # with few colors, so that it loads fast
                picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
        browser.close()
    return paths
