"""The README's picture: a real document on the page of `longce inspect`, and which of its words are key.

It needs a real evaluator, and Chromium for playwright (the extra ``dev``).
"""

import shutil
from io import BytesIO
from pathlib import Path

import pandas as pd
from PIL import Image

from lightning_modules.utilities.files import writable_folder
from lightning_modules.visualization.page import Inspection

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT, SCALE = 1110, 740, 1.7
"""Window in CSS pixels, and picture pixels in one of them; a README shows pictures about 900 pixels wide."""

COLORS = 256

SHORTEST_WORD = 4
"""In letters: below, the picture would show a syllable or "of"."""

_POINT = """async (token) => {
  while (performance.getEntriesByName("longce-complete").length === 0)
    await new Promise((done) => setTimeout(done, 20));
  const current = () => document.querySelector(".t.current")?.dataset.token;
  for (let step = 0; step <= 10000 && current() !== String(token); step++)
    document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "n", bubbles: true }));
  document.activeElement.blur();
  return current() === String(token);
}"""


def choose_token(tokens: pd.DataFrame, longest_short: int) -> int:
    """Return the index of the token to show: the largest LSD of those that begin a long word from the far context.

    Raises:
        ValueError: If the document has no such key token.
    """
    instructive = tokens[
        tokens["key"]
        & tokens["starts_word"]
        & (tokens["word"].str.len() >= SHORTEST_WORD)
        & (tokens["distance"] > longest_short)
    ]
    if instructive.empty:
        raise ValueError("No key token begins a word that only the far context has: choose another text or `--token`.")
    return int(instructive.loc[instructive["lsd"].idxmax(), "token"])


def describe_key_tokens(tokens: pd.DataFrame, longest_short: int) -> str:
    """Return counts of key tokens by kind, and how many repeat a word that only the far context has."""
    key = tokens[tokens["key"]]
    kinds = ", ".join(f"{count} of {kind}" for kind, count in key["kind"].value_counts().items())
    far = int((key["distance"] > longest_short).sum())
    return f"{len(key)} key tokens: {kinds}; {far} of a word last used more than {longest_short:,} tokens before"


def save_pictures(inspection: Inspection, token: int, folder: Path) -> list[Path]:
    """Save the page as ``inspect.html``, which the site has, and at a key token as pictures, light and dark.

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
    page_file = inspection.save(folder / "inspect.html")
    paths = [folder / "inspect.png", folder / "inspect-dark.png"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--hide-scrollbars"])
        for path, scheme in zip(paths, ("light", "dark"), strict=True):
            size = {"width": WIDTH, "height": HEIGHT}
            page = browser.new_page(viewport=size, device_scale_factor=SCALE, color_scheme=scheme)
            page.goto(page_file.resolve().as_uri())
            assert page.evaluate(_POINT, token), "the key n reaches every key token"
            page.wait_for_timeout(300)  # it scrolls there over several frames
            with Image.open(BytesIO(page.screenshot())) as picture:  # with few colors, so that it loads fast
                picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
        browser.close()
    return [page_file, *paths]
