"""What README and pages say exists: links, files, commands and their options."""

import contextlib
import io
import re
import shlex
from functools import cache

import pytest

from longce.cli.main import main
from tests.support.pages import PAGES, ROOT, blocks

NAMES = [page.name for page in PAGES]


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page):
    """Arguments of each `longce` command of a page, in blocks and in lines of text."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(longce [^`]*)`", page.read_text())
    for line in lines:
        if (found := re.search(r"(?:^|\s)(?:\S*/)?longce (.*)$", line.partition(" #")[0])) is not None:
            yield shlex.split(found[1])


@cache
def help_of(*command):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return out.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)]*)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_exist(page):
    for file in re.findall(r"(?<!tests/)\b((?:configs|benchmarks|notebooks|docs|tests)/[\w/]+\.\w+)", page.read_text()):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_and_options_exist(page):
    for arguments in commands(page):
        if not arguments[0].islower():  # `longce --help`, `longce COMMAND --help`
            continue
        if "--" in arguments:  # options of another command
            arguments = arguments[: arguments.index("--")]
        deep = arguments[0] in ("corpus", "data", "reproduce") and arguments[1].isalnum()
        text = help_of(*arguments[: 2 if deep else 1])
        assert text, arguments
        for option in arguments:
            name = option.partition("=")[0]
            if re.fullmatch(r"--\w+(\.\w+)?\+?", name) and name.count(".") == 0:
                assert re.search(rf"{name}\b", text), f"{option} of {arguments}"
