"""A page in headless Chromium, driven by playwright.

Playwright comes with the extra ``dev``. It downloads no browser of its own: the tests use the installed one.
"""

import re
import shutil
import warnings
from contextlib import contextmanager

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of TensorBoard's copy
    from tensorboard._vendor.bleach._vendor import html5lib

SCREENS = {"phone": (360, 740), "tablet": (768, 1024), "desktop": (1440, 900)}
EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def launch_chromium():
    """Yield a running Chromium, or skip the test where none is installed."""
    executable = next((path for path in map(shutil.which, EXECUTABLES) if path), None)
    if executable is None:
        pytest.skip("Chromium is not installed: `apt-get install chromium` installs it on Debian and Ubuntu")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def run_in_page(browser, path, script):
    """Run the body of an async function in a page, and record what the page requests, logs and opens.

    Returns:
        ``result`` of the script, the page's ``title``, its ``dialogs``, its console ``messages`` with uncaught errors,
        and the addresses of its ``requests``.
    """
    seen = {"messages": [], "dialogs": [], "requests": []}
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.on("console", lambda message: seen["messages"].append(message.text))
    page.on("pageerror", lambda error: seen["messages"].append(str(error)))
    page.on("dialog", lambda dialog: (seen["dialogs"].append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: seen["requests"].append(request.url))
    page.goto(path.as_uri())
    result = page.evaluate(f"async () => {{ {script} }}")
    title = page.title()
    page.close()
    return {**seen, "result": result, "title": title}


def parse_page(page):
    """Return the elements of a page, which must be valid HTML with unique ids and working links to them."""
    root = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    identifiers = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(identifiers) == len(set(identifiers))
    assert all(link.get("href")[1:] in identifiers for link in root.iter("a") if link.get("href").startswith("#"))
    return root


def check_page(browser, path):
    """Check a page on each screen, light and dark, with everything unfolded.

    It is valid, fits the screen, loads nothing, shows all figures, shows no value that does not exist, logs nothing and
    has no accessibility problem that axe-core calls serious or critical, such as a low contrast.
    """
    parse_page(path.read_text(encoding="utf-8"))
    for screen, (width, height) in SCREENS.items():
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            messages, requests = [], []
            page.on("console", lambda message, found=messages: found.append(message.text))
            page.on("pageerror", lambda error, found=messages: found.append(str(error)))
            page.on("request", lambda request, found=requests: found.append(request.url[:5]))
            page.goto(path.as_uri())
            page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
            where = f"{path.name} on a {scheme} {screen}"
            assert page.evaluate("document.documentElement.scrollWidth") <= width, where
            assert page.evaluate("[...document.images].every((image) => image.naturalWidth > 0)"), where
            assert not re.search(r"\b(nan|undefined|None|null)\b", page.inner_text("body")), where
            found = Axe().run(page).response["violations"] if screen != "tablet" else ()
            assert not [each for each in found if each["impact"] in ("serious", "critical")], where
            assert messages == [], where
            assert set(requests) <= {"file:", "data:"}, where
            page.close()
