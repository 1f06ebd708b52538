"""Special tokens and chat templates around questions: each token once, and none behind the question."""

import copy

import pytest
from tokenizers import processors

from lightning_modules.tasks.questions.prompter import Prompter


@pytest.fixture
def chat(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = (
        "<s>{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    return Prompter(own, chat_template=True)


def test_the_first_token_is_added_once(tokenizer, chat):
    first = tokenizer.bos_token_id
    assert Prompter(tokenizer).encode("ba ce", " di").count(first) == 1
    assert Prompter(tokenizer, add_special_tokens=False).encode("ba ce", " di").count(first) == 0
    assert chat.encode("ba ce", " di").count(first) == 1
    assert chat.tokenizer.decode(chat.encode("ba ce", " di")) == "<s>[ba ce]: di"


def test_a_system_instruction_is_a_turn_or_a_paragraph(tokenizer, chat):
    own = Prompter(chat.tokenizer, chat_template=True, system_instruction="fo")
    assert own.text("ba", " di") == "<s>[fo][ba]: di"
    assert Prompter(tokenizer, system_instruction="fo").text("ba", " di") == "fo\n\nba di"
    strict = copy.deepcopy(chat.tokenizer)
    strict.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with pytest.raises(ValueError, match="system_instruction"):
        Prompter(strict, chat_template=True, system_instruction="fo")
    with pytest.raises(ValueError, match="chat_template"):
        Prompter(tokenizer, chat_template=True)


def test_a_final_end_token_is_removed(tokenizer):
    ending = copy.deepcopy(tokenizer)
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    plain, ended = Prompter(tokenizer), Prompter(ending)
    assert ended.encode("ba ce", " di") == plain.encode("ba ce", " di")
    assert ended.force("ba ce", " di", " fo", ["fo"]) == plain.force("ba ce", " di", " fo", ["fo"])


def test_spans_have_only_tokens_of_answers(tokenizer):
    prompter = Prompter(tokenizer)
    forced = prompter.force("ba ce 4711", " It is", " 4711, and 12", ["4711", "12"])
    assert forced.input_ids[: forced.answer_start] == prompter.encode("ba ce 4711", " It is")
    texts = [tokenizer.decode(forced.input_ids[start:stop]) for start, stop in forced.spans]
    assert [text.strip() for text in texts] == ["4711", "12"]


def test_a_response_is_what_follows_the_prompt(tokenizer, chat):
    forced = Prompter(tokenizer).force("ba ce", " It is", " di, and fo", ["di", "fo"])
    assert tokenizer.decode(forced.input_ids[forced.response_start :]) == " It is di, and fo"
    is_answer = zip(forced.input_ids[forced.response_start :], forced.is_answer, strict=True)
    assert tokenizer.decode([token for token, inside in is_answer if inside]) == " di fo"
    forced = chat.force("ba", "", " It is ce", ["ce"])
    assert chat.tokenizer.decode(forced.input_ids[forced.response_start :]) == "It is ce"
    assert forced.response_start == forced.answer_start


def test_a_chat_turn_begins_without_a_space(chat, tokenizer):
    """No chat model would begin its turn with one, so that a right answer would count as wrong."""
    forced = chat.force("ba", "", " ce", ["ce"])
    assert chat.tokenizer.decode(forced.input_ids) == "<s>[ba]:ce"
    assert chat.tokenizer.decode(chat.force("ba", " It is", " ce", ["ce"]).input_ids) == "<s>[ba]: It is ce"
    assert tokenizer.decode(Prompter(tokenizer).force("ba", "", " ce", ["ce"]).input_ids) == "<s>ba ce"
