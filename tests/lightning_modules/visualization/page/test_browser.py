"""The page in a real browser."""

import pytest

from lightning_modules.functional import key_token_mask, long_perplexity
from tests.conftest import make_text
from tests.lightning_modules.visualization.page.conftest import NASTY, make_inspection
from tests.support.browser import check_page, launch_chromium, run_in_page

COMPLETE = 'performance.getEntriesByName("longce-complete").length > 0'
WAIT = "while (!({})) await new Promise((done) => setTimeout(done, 5));"
LOADED = WAIT.format(COMPLETE)


def wait_until(page, condition):
    """Wait in the page, whose policy forbids playwright's own way, which evaluates text."""
    page.evaluate(f"async () => {{ {WAIT.format(condition)} }}")


@pytest.fixture(scope="module")
def browser():
    with launch_chromium() as browser:
        yield browser


def test_the_document_is_shown_and_nothing_of_it_is_run(browser, tokenizer, tmp_path):
    path = make_inspection(tokenizer, name="<script>alert(3)</script>").save(tmp_path / "page.html")
    found = run_in_page(
        browser,
        path,
        LOADED
        + """
        const article = document.getElementById("document");
        document.getElementById("next").click();
        const elements = article.querySelectorAll("script, img").length;
        return [article.textContent, elements, document.activeElement.className];""",
    )
    text, elements, focused = found["result"]
    assert text == NASTY
    assert elements == 0
    assert {"t", "k", "current"} <= set(focused.split())
    assert found["title"] == "<script>alert(3)</script>: key tokens"
    assert found["dialogs"] == found["messages"] == []
    assert found["requests"] == [path.as_uri()]


def test_sliders_and_keys_move_through_key_tokens(browser, tokenizer, tmp_path):
    inspection = make_inspection(tokenizer, text=make_text(400))
    path = inspection.save(tmp_path / "page.html")
    found = run_in_page(
        browser,
        path,
        LOADED
        + """
        const slider = document.getElementById("alpha-slider");
        const text = (id) => document.getElementById(id).textContent;
        const later = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
        slider.value = 4.5;
        slider.dispatchEvent(new Event("input"));
        await later();
        const counted = [text("count"), text("longppl"), document.getElementById("alpha").value];
        const places = [];
        for (const key of ["n", "n", "n", "p"]) {
          document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
          await later();
          const current = document.querySelector(".current");
          places.push([text("place"), Number(current.dataset.token), text("card").includes("key token")]);
        }
        return [counted, places];""",
    )
    (count, longppl, alpha), places = found["result"]
    key = key_token_mask(inspection.scores.long, inspection.scores.short, alpha=4.5)
    assert (count, alpha) == (f"{int(key.sum()):,}", "4.5")
    assert longppl == f"{long_perplexity(inspection.scores.long, key):.3f}"
    tokens = key.nonzero().squeeze(-1).tolist()
    assert [place for place, _, _ in places] == [f"{number} of {len(tokens)}" for number in (1, 2, 3, 2)]
    assert [token for _, token, _ in places] == [tokens[0], tokens[1], tokens[2], tokens[1]]
    assert all(is_key for _, _, is_key in places)


def test_the_frame_of_a_notebook_shows_the_page(browser, tokenizer, tmp_path):
    frame = tmp_path / "notebook.html"
    frame.write_text(f"<!doctype html><meta charset=utf-8>{make_inspection(tokenizer)._repr_html_()}", encoding="utf-8")
    found = run_in_page(browser, frame, "return document.querySelector('iframe').contentDocument === null;")
    assert found["result"] is True  # an origin of its own: it cannot reach the notebook
    assert found["messages"] == []


@pytest.mark.slow
@pytest.mark.limit(3)
def test_the_page_is_sound_on_every_screen(browser, tokenizer, tmp_path):
    check_page(browser, make_inspection(tokenizer, name="a" * 200).save(tmp_path / "page.html"))


def test_everything_can_be_done_from_the_keyboard(browser, tokenizer, tmp_path):
    path = make_inspection(tokenizer, text=make_text(400)).save(tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(path.as_uri())
    wait_until(page, COMPLETE)
    focused = "document.activeElement.id || document.activeElement.className"
    walk = []
    for _ in range(9):
        page.keyboard.press("Tab")
        walk.append(page.evaluate(focused))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    fields = ["alpha-slider", "alpha", "beta-slider", "beta", "reset"]
    assert walk == [*fields, "previous", "next", "help-open", "document"]
    page.keyboard.press("ArrowRight")
    first = page.inner_text("#card .where >> nth=0")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#card .where >> nth=0") != first
    page.keyboard.press("?")
    assert page.is_visible("#help")
    assert page.evaluate(focused) == "help-close"
    page.keyboard.press("n")  # does nothing behind the list of keys
    page.keyboard.press("Escape")
    assert not page.is_visible("#help")
    page.keyboard.press("n")
    assert " of " in page.inner_text("#place")
    page.focus("#alpha-slider")
    counted = page.inner_text("#count")
    page.keyboard.press("End")
    wait_until(page, f"document.getElementById('count').textContent !== '{counted}'")
    page.focus("#reset")
    page.keyboard.press("Enter")
    wait_until(page, f"document.getElementById('count').textContent === '{counted}'")
