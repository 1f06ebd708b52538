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
    ("template", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "does what its sandbox forbids (access to attribute '__class__' of 'str'"),
        ("{{ raise_exception('Roles must alternate') }}", "fails (Roles must alternate)"),
        ("{% for %}", "fails (Expected"),
        ("{{ messages[9].content.x }}", "fails ("),
        ("{{ 1 / 0 }}", "fails (division by zero)"),
        ("{{ 1 + 'a' }}", "fails (unsupported operand"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails (maximum recursion depth exceeded"),
        (None, "has no chat template, as is usual for a base model: set `chat_template` to false"),
    ],
)
def test_what_a_template_may_not_do_is_one_line_that_names_the_model(with_template, template, words):
    with pytest.raises(ValueError, match="'some/model'") as refused:
        Prompter(with_template(template), chat_template=True)
    assert words in str(refused.value)
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
