"""Chat templates are programs of strangers: they leave no sandbox and end in time."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_modules.models.tokenization import chat_templates
from lightning_modules.models.tokenization.chat_templates import check_chat_template, render_chat
from lightning_modules.tasks.questions.prompter import Prompter

MESSAGES = [{"role": "user", "content": "ba ce"}]
FOREVER = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
    "{% macro f(n) %}{% if n < 40 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
]


@pytest.fixture
def with_template(tokenizer):
    def make(template):
        own = copy.deepcopy(tokenizer)
        own.name_or_path, own.chat_template = "some/model", template
        return own

    return make


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{% for %}", "fails"),
        ("{{ messages[9].content.x }}", "fails"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (None, "`chat_template`"),
    ],
)
def test_what_a_template_may_not_do_is_one_line_that_names_the_model(with_template, template, named):
    with pytest.raises(ValueError, match=rf"'some/model'.*{named}") as refused:
        Prompter(with_template(template), chat_template=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("template", FOREVER)
def test_a_template_that_never_ends_is_stopped_in_any_thread(with_template, template, monkeypatch):
    monkeypatch.setattr(chat_templates, "RENDERING_SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"'some/model' takes longer than 0\.2 s"):
        check_chat_template(with_template(template))
    with ThreadPoolExecutor() as pool, pytest.raises(ValueError, match="takes longer"):
        pool.submit(render_chat, with_template(template), MESSAGES).result()


def test_a_debugger_keeps_its_trace_function(with_template):
    before, own = sys.gettrace(), lambda *_: None
    sys.settrace(own)
    try:
        assert render_chat(with_template("{{ messages[0].content }}"), MESSAGES) == "ba ce"
        assert sys.gettrace() is own
    finally:
        sys.settrace(before)
