"""The site of `docs`, as the command of README and CONTRIBUTING builds it."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.support.browser import launch_chromium
from tests.support.pages import ROOT

pytest.importorskip("material", reason="the site needs the extra `docs`")
pytestmark = pytest.mark.slow

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "link": "href"}
API = {
    "functional": "lightning_modules.functional.equations.long_perplexity",
    "metrics": "lightning_modules.metrics.long_perplexity.LongPerplexity",
    "objectives": "lightning_modules.objectives.LongCE",
    "score": "lightning_modules.scoring.score.score",
    "page": "lightning_modules.visualization.page.document.inspect_document",
    "callbacks": "callbacks.external_evaluator.ExternalEvaluator",
    "datamodules": "datamodules.corpora.PG19DataModule",
}


class Loads(HTMLParser):
    """Collects the addresses that a page loads when it is opened."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag in LOADED and attributes.get("rel") != "canonical" and (target := attributes.get(LOADED[tag])):
            self.found.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser():
    with launch_chromium() as browser:
        yield browser


def test_all_pages_are_there_and_load_nothing_from_elsewhere(site):
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} | {"index.html"} <= set(pages)
    assert not list((site / "site").glob("*.py"))
    for name, text in pages.items():
        assert not [target for target in Loads(text).found if re.match(r"(\w+:)?//", target)], name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", path.read_text()), path


@pytest.mark.parametrize("page", API)
def test_public_names_have_signature_and_docstring(site, page):
    text = (site / "api" / f"{page}.html").read_text()
    assert f'id="{API[page]}"' in text
    assert "doc-signature" in text
    assert ".. math::" not in text
    assert ":class:" not in text


@pytest.mark.parametrize("page", ["index", "api/functional"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_pages_opened_as_files_are_accessible_on_every_screen(browser, site, page, scheme, width):
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    messages, requests = [], []
    opened.on("console", lambda message: messages.append(message.text))
    opened.on("pageerror", lambda error: messages.append(str(error)))
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto((site / f"{page}.html").as_uri())
    opened.wait_for_selector(".md-code__nav[aria-label]")  # the theme's script has run
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert messages == []
    assert Axe().run(opened).response["violations"] == []  # logs messages about the frame
    assert not [url for url in requests if not re.match("file:|data:|blob:", url)]
    opened.close()
