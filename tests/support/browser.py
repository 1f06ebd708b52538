"""A page in headless Chromium, driven by playwright.

Playwright comes with the extra ``dev``. It downloads no browser of its own: the tests use the installed one.
"""

import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import sync_playwright

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
