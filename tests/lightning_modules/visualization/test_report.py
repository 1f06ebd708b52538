"""Reports as Markdown and HTML."""

import matplotlib
import pytest
from matplotlib.figure import Figure

from lightning_modules.visualization.images import STYLE, as_svg
from lightning_modules.visualization.report import (
    MAX_ROWS,
    Heading,
    Picture,
    Table,
    as_html,
    as_markdown,
)
from tests.support.browser import check_page, launch_chromium, parse_page

EVIL = '</title><script>alert(1)</script>"[[x]]{{ x }}'


@pytest.fixture(scope="module")
def svg():
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3, 2))
        figure.subplots().plot([1, 2], [3, 4], label="a")
        return as_svg(figure)


def texts(root, tag):
    return ["".join(element.itertext()).strip() for element in root.iter(tag)]


def test_a_page_is_valid_html_with_contents_sections_and_figures(svg):
    blocks = ["Text with `code <b>`.", Heading("One"), Picture("a", "A."), Picture("a", "B."), Heading("Two"), "End."]
    root = parse_page(as_html("Title", blocks, {"a": svg}))
    assert texts(root, "h1") == ["Title"]
    assert texts(root, "h2") == texts(root, "a") == ["One", "Two"]
    assert texts(root, "code") == ["code <b>"]
    assert [len(list(section.iter("img"))) for section in root.iter("section")] == [2, 0]
    (figures,) = (each for each in root.iter("div") if each.get("class") == "figures")
    assert texts(figures, "figcaption") == [image.get("alt") for image in root.iter("img")] == ["A.", "B."]


def test_nothing_in_a_report_is_markup(svg):
    table = Table([EVIL, "b"], [[EVIL, EVIL + "other"]], badges={EVIL: "good"})
    page = as_html(EVIL, [EVIL, Heading(EVIL), table, Heading(EVIL), Picture(EVIL, EVIL)], {EVIL: svg})
    root = parse_page(page)
    assert "<script" not in page
    assert "script-src 'none'" in page
    assert texts(root, "title") == texts(root, "h1") == [EVIL]


@pytest.mark.slow
def test_a_page_is_sound_on_every_screen_and_on_paper(svg, tmp_path):
    rows = [[f"{number}.5", "reproduced" if number % 2 else "not", "nan", "long text " * 9] for number in range(14)]
    table = Table(["number", "verdict", "x", "text"], rows, badges={"reproduced": "good", "not": "bad"})
    blocks = [
        "Text with `code`.",
        Heading("One"),
        table,
        Picture("a", "A."),
        Heading("Two"),
        table._replace(folded=False),
    ]
    path = tmp_path / "page.html"
    path.write_text(as_html("A report with a " + "long" * 30 + " title", blocks, {"a": svg}))
    with launch_chromium() as browser:
        check_page(browser, path)
        page = browser.new_page(color_scheme="dark")
        page.goto(path.as_uri())
        shown = "[...document.querySelectorAll('table')].map((table) => table.checkVisibility())"
        assert page.evaluate(shown) == [False, True]
        page.emulate_media(media="print")
        assert page.evaluate(shown) == [True, True]
        assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(253, 252, 250)"
        assert "light" in page.evaluate("getComputedStyle(document.images[0]).colorScheme").split()
        assert "dark" not in page.evaluate("getComputedStyle(document.images[0]).colorScheme").split()


def test_numbers_that_do_not_exist_are_dashes_and_verdicts_are_badges():
    table = Table(["name", "x"], [["a|b", "nan"], ["None", "inf"], ["c", "1.5"]], badges={"c": "bad"})
    root = parse_page(as_html("T", [table], {}))
    assert texts(root, "td") == ["a|b", "—", "—", "∞", "c", "1.5"]
    assert [cell.get("class") for cell in root.iter("td")][1::2] == ["number"] * 3
    assert [badge.get("class") for badge in root.iter("span")] == ["badge bad"]
    rows = as_markdown("T", [table]).splitlines()[4:]
    assert rows == [r"| a\|b | — |", "| — | ∞ |", "| c | 1.5 |"]


def test_long_tables_are_folded_and_say_what_they_hold():
    def details(rows, folded=None):
        return list(
            parse_page(as_html("T", [Table(["a", "", "b"], [["1", "", "2"]] * rows, folded=folded)], {})).iter(
                "details"
            )
        )

    assert details(MAX_ROWS) == details(MAX_ROWS + 1, folded=False) == []
    (fold,) = details(MAX_ROWS + 1)
    assert texts(fold, "summary") == [f"Show {MAX_ROWS + 1} rows: a, b"]
    assert len(details(1, folded=True)) == 1


def test_many_figures_are_folded(svg):
    for count, folded in ((6, []), (8, ["Show 2 more figures"])):
        root = parse_page(as_html("T", [Picture("a", str(number)) for number in range(count)], {"a": svg}))
        assert texts(root, "summary") == folded
        assert [image.get("alt") for image in root.iter("img")] == [*map(str, range(count))]
