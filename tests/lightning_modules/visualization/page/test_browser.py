"""The page in a real browser."""

import re
import textwrap
from dataclasses import replace

import pytest
import torch

from lightning_modules.functional import key_token_mask, long_perplexity
from lightning_modules.scoring.key_tokens import Tokens
from lightning_modules.visualization.page import ModelScores
from tests.conftest import make_text
from tests.lightning_modules.visualization.page.conftest import NASTY, make_inspection, unpacked
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
    (opened,) = key_token_mask(inspection.scores.long, inspection.scores.short).nonzero()[:1, 0].tolist()
    first = next(number for number, token in enumerate(tokens) if token > opened)  # where the page opens, without alpha
    order = [first, first + 1, first + 2, first + 1]
    assert [place for place, _, _ in places] == [f"{number + 1} of {len(tokens)} key tokens" for number in order]
    assert [token for _, token, _ in places] == [tokens[number] for number in order]
    assert all(is_key for _, _, is_key in places)


@pytest.mark.parametrize(("token", "shown"), [("7", 7), ("99999", None), ("x", None)])
def test_a_link_leads_to_a_token_and_a_wrong_one_to_the_first_key_token(browser, tokenizer, tmp_path, token, shown):
    inspection = make_inspection(tokenizer, text=make_text(400))
    path = inspection.save(tmp_path / "page.html")
    first = key_token_mask(inspection.scores.long, inspection.scores.short).nonzero()[0].item()
    page = browser.new_page()
    page.goto(f"{path.as_uri()}#token-{token}")
    wait_until(page, COMPLETE)
    assert page.evaluate("Number(document.querySelector('.current').dataset.token)") == (shown or first)
    page.close()


def test_the_frame_of_a_notebook_shows_the_page(browser, tokenizer, tmp_path):
    frame = tmp_path / "notebook.html"
    frame.write_text(f"<!doctype html><meta charset=utf-8>{make_inspection(tokenizer)._repr_html_()}", encoding="utf-8")
    found = run_in_page(browser, frame, "return document.querySelector('iframe').contentDocument === null;")
    assert found["result"] is True  # an origin of its own: it cannot reach the notebook
    assert found["messages"] == []


@pytest.mark.slow
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


def test_lines_that_a_text_wraps_are_joined_on_the_page_only(browser, tokenizer, tmp_path):
    words = make_text(300).replace("\n", " ")
    paragraph = textwrap.fill(words, 70)
    verse = "Roses are red\nviolets are blue\n"
    text = f"{paragraph}\n\n{verse}\n{paragraph}\n"
    inspection = make_inspection(tokenizer, text=text)
    found = run_in_page(
        browser,
        inspection.save(tmp_path / "page.html"),
        f"{LOADED} return document.getElementById('document').textContent;",
    )["result"]
    joined = paragraph.replace("\n", " ")
    assert len(found) == len(text)
    assert found == f"{joined}\n\n{verse}\n{joined}\n"
    assert unpacked(inspection.html(), "scores")["text"].tobytes().decode() == text


def test_models_are_shown_side_by_side(browser, tokenizer, tmp_path):
    inspection = make_inspection(tokenizer, text=make_text(400))
    scores = replace(inspection.scores, long=inspection.scores.long.clamp(min=-10.0))  # otherwise both are infinite
    inspection = replace(inspection, scores=scores)
    tokens = Tokens(inspection.scores.token_ids, inspection.scores.offsets)
    key = key_token_mask(inspection.scores.long, inspection.scores.short)
    likelihoods = [torch.full((len(key),), probability).log() for probability in (0.25, 0.75)]
    models = [ModelScores(f"hub/model-{n}", tokens, each, key) for n, each in enumerate(likelihoods)]
    path = replace(inspection, models=models).save(tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(path.as_uri())
    wait_until(page, COMPLETE)
    card = page.inner_text("#card")
    assert re.search(r"model-0\s+\S*\s*.*25\.0 %\s+model-1\s+\S*\s*.*75\.0 %", card)
    shown = [float(cell) for cell in page.locator("#models tbody tr").first.locator("td").all_inner_texts()]
    losses = -scores.long[1:]
    assert shown == pytest.approx([float(losses[key[1:]].mean().exp()), float(losses.mean().exp())], rel=1e-3)
    assert page.inner_text("#model-longppl-0") == "4.000"
    assert page.inner_text("#model-longppl-1") == "1.333"
