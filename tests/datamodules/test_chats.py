"""Chats: the loss is that of the tokens which the chat template marks, wherever sequences cut them."""

import json
import pickle
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from tokenizers import normalizers

from datamodules import MixtureDataModule, StreamingTextDataModule, TextDataModule
from datamodules.packing.evaluation_documents import ValidationSet
from lightning_modules.batch import IGNORE_INDEX as NO
from lightning_modules.models.tokenization.chat_templates import tokenize_chats
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from tests.support.trainers import seen_trainer

TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '\n' }}{% endfor %}"
)
PLAIN = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
ALTERNATING = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('No assistant first') }}{% endif %}" + TEMPLATE
)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CHATS = [
    [turn("system", "Be brief."), turn("user", "the cat?"), turn("assistant", "sat on the mat")],
    [
        turn("user", "naïve café, 日本"),
        turn("assistant", "🙂 smiles"),
        turn("user", "and some years ago?"),
        turn("assistant", ""),
        turn("assistant", " Call me Ishmael."),
    ],
    [turn("user", "no answer")],
    [turn("assistant", "first"), turn("user", "x" * 40), turn("assistant", "日")],
]


@pytest.fixture
def folder(tmp_path, byte_tokenizer):
    """A tokenizer with a chat template, and the chats as JSON lines and parquet."""
    tokenizer = load_tokenizer(byte_tokenizer)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    write(tmp_path / "chats.jsonl", CHATS)
    table = pyarrow.Table.from_pylist([{"messages": [{**each, "name": None} for each in chat]} for chat in CHATS])
    pyarrow.parquet.write_table(table, tmp_path / "chats.parquet")
    return tmp_path


def write(path, chats):
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def module(folder, train="chats.jsonl", kind=TextDataModule, **settings):
    settings = {"sequence_length": 7, "messages_field": "messages", "cache_dir": str(folder / "cache"), **settings}
    path = str(folder / train) if isinstance(train, str) else train
    return kind(settings.pop("tokenizer", str(folder / "tokenizer")), train=path, **settings)


def slow_tokens(tokenizer, chat):
    """Tokens of a chat with whether one of their characters is between the marks, of which the text has signs here."""
    signs = TEMPLATE.replace("{% generation %}", "\ue000").replace("{% endgeneration %}", "\ue001")
    text, written, inside = "", [], False
    for character in tokenizer.apply_chat_template(chat, chat_template=signs, tokenize=False):
        if character in "\ue000\ue001":
            inside = character == "\ue000"
        else:
            text += character
            written.append(inside)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [(token, any(written[start:stop])) for token, (start, stop) in pairs]


def test_an_accent_that_the_tokenizer_joins_marks_nothing_behind_it(folder):
    """transformers takes a marked character without a token for the end of the chat."""
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    tokenizer.chat_template = TEMPLATE.replace("{{ eos_token }}", "")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    chat = [turn("user", "a"), turn("assistant", "cafe\u0301"), turn("user", "the cat"), turn("assistant", "")]
    (found,) = tokenize_chats(tokenizer, [chat], offsets=True)
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    written = {text[slice(*span)] for span, own in zip(found.offsets, found.by_assistant, strict=True) if own}
    assert 0 < sum(found.by_assistant) < len(found.ids) / 2
    assert all(piece in "cafe\u0301" for piece in written)


def slow_labels(tokenizer, chats, length, isolate):
    """Sequences and labels of `concat` by the words of the documentation: one chat and one token at a time."""
    ids, labels = [], []
    for chat in chats:
        for place, (token, by_assistant) in enumerate(slow_tokens(tokenizer, chat)):
            ids.append(token)
            labels.append(token if by_assistant and not (isolate and place == 0) else NO)
    starts = range(0, len(ids) - length + 1, length)
    return [(ids[start : start + length], [NO, *labels[start + 1 : start + length]]) for start in starts]


@pytest.mark.parametrize("train", ["chats.jsonl", "chats.parquet"])
@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("length", [2, 7, 31])
def test_labels_are_those_of_a_slow_loop_over_the_template(folder, train, isolate, length, monkeypatch):
    monkeypatch.setattr("datamodules.token_store.tokenize.BATCH_DOCUMENTS", 3)
    data = prepared(folder, train, sequence_length=length, isolate_documents=isolate, batch_size=3)
    rows = [data.rows[number] for number in range(len(data.rows))]
    found = [(row["input_ids"].tolist(), row["labels"].tolist()) for row in rows]
    expected = slow_labels(load_tokenizer(str(folder / "tokenizer")), CHATS, length, isolate)
    assert found == expected
    assert any(label != NO for _, labels in expected for label in labels)
    for batch in data.train_dataloader():
        pairs = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        assert all(pair in expected for pair in pairs)
        assert batch["scored"].tolist() == batch["labels"].ne(NO).tolist()
    copy = pickle.loads(pickle.dumps(data.rows))
    assert torch.equal(copy[0]["labels"], data.rows[0]["labels"])


def test_fields_that_are_null_are_those_of_other_rows(folder):
    lines, rows = (list(module(folder, f"chats.{kind}").source("train")) for kind in ("jsonl", "parquet"))
    assert [document.messages for document in lines] == CHATS
    assert [document.messages for document in rows] == CHATS
    assert [document.content() for document in lines] == [document.content() for document in rows]


def test_one_store_serves_both_losses_and_the_settings_have_their_own(folder):
    masked, whole = (module(folder, loss_on_prompt=choice).training_rows() for choice in (None, True))
    assert masked.store.folder == whole.store.folder
    assert (whole[0]["labels"][1:] == whole[0]["input_ids"][1:]).all()
    (folder / "other.jinja").write_text(TEMPLATE.replace("'<'", "'['"))
    other = module(folder, chat_template=str(folder / "other.jinja")).training_rows()
    records = [{"messages": json.dumps(chat)} for chat in CHATS]
    (folder / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = module(folder, "text.jsonl", messages_field=None, text_field="messages").training_rows()
    assert len({each.store.folder for each in (masked, other, text)}) == 3
    assert masked.checksum() != other.checksum()


def test_training_that_resumes_has_the_same_labels(folder):
    loader = prepared(folder).train_dataloader()
    batches = list(loader)
    again = prepared(folder).train_dataloader()
    first = [batch for batch, _ in zip(again, range(3), strict=False)]
    assert torch.equal(first[0]["labels"], batches[0]["labels"])
    resumed = prepared(folder).train_dataloader()
    resumed.load_state_dict({**again.state_dict(), "batches": 3})
    rest = list(resumed)
    assert len(rest) == len(batches) - 3
    for one, other in zip(rest, batches[3:], strict=True):
        assert torch.equal(one["labels"], other["labels"])
        assert torch.equal(one["input_ids"], other["input_ids"])


def prepared(folder, train="chats.jsonl", stage="fit", **settings):
    data = module(folder, train, **{"validation": str(folder / "chats.jsonl"), **settings})
    data.trainer = seen_trainer(stage, limit_val_batches=1.0)
    data.prepare_data()
    data.setup(stage)
    return data


def test_validation_scores_what_the_assistant_says(folder):
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    for length in ("whole", 12, 5):
        batches = list(prepared(folder, validation_length=length).val_dataloader())
        assert len(batches) == len(CHATS)
        for chat, batch in zip(CHATS, batches, strict=True):
            encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            end = batch["input_ids"].shape[1]
            assert text.startswith(batch["text"][0])
            if length == "whole":
                assert batch["text"][0] == text
                assert end == len(encoded["input_ids"])
            kept = end if length == "whole" else end - 2  # the last tokens of a text that was cut may differ
            expected = [
                token if mark else NO
                for token, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
            ]
            expected[0] = NO
            assert batch["labels"][0, :kept].tolist() == expected[:kept]
    (everything, *_) = prepared(folder, validation_length="whole", loss_on_prompt=True).val_dataloader()
    assert (everything["labels"][0, 1:] == everything["input_ids"][0, 1:]).all()


def test_predictions_score_all_tokens(folder):
    """Of a prompt between two answers as well: its tokens would be stored as certain."""
    documents = {"test": str(folder / "chats.jsonl"), "validation_length": "whole"}
    for stage, scores_all in (("test", False), ("predict", True)):
        batches = list(prepared(folder, stage=stage, **documents).predict_dataloader())
        assert len(batches) == len(CHATS)
        assert all(bool(batch["scored"][0, 1:].all()) for batch in batches) == scores_all


def test_a_template_without_marks_is_refused_before_work_unless_all_tokens_have_the_loss(folder, monkeypatch):
    (folder / "plain.jinja").write_text(PLAIN)
    settings = {"chat_template": str(folder / "plain.jinja")}
    rows = module(folder, loss_on_prompt=True, **settings).training_rows()
    marked = module(folder, loss_on_prompt=True).training_rows()
    assert rows.store.prompt_spans is None
    assert np.array_equal(rows.store.tokens, marked.store.tokens)
    monkeypatch.setattr("datamodules.token_store.store._write_store", None)
    with pytest.raises(ValueError, match=r"tokenizer.*generation.*`data\.chat_template`.*`data\.loss_on_prompt`"):
        module(folder, **settings).training_rows()
    with pytest.raises(ValueError, match=r"`data\.chat_template`"):
        prepared(folder, stage="validate", **settings)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "base")
    (folder / "base" / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"base'.*no chat template.*`data\.chat_template`"):
        module(folder, tokenizer=str(folder / "base"), loss_on_prompt=True).training_rows()


@pytest.mark.parametrize(
    ("chat", "named"),
    [
        ("Hello", "list of messages.*str"),
        (None, "list of messages.*NoneType"),
        ([], "empty list"),
        (["Hello"], "message 0 is str"),
        ([turn("user", "a"), {"content": "b"}], "message 1 .*'role'"),
        ([turn("user", "a"), {"role": "assistant"}], "message 1 .*'content'"),
        ([turn("user", [{"type": "text", "text": "a"}])], "message 0 .*'content', got list"),
        ([turn("user", "half \ud83d pair")], "message 0.*surrogate"),
        ([turn("assistant", "a")], "No assistant first"),
    ],
)
def test_a_broken_chat_is_named_by_file_and_row(folder, chat, named):
    (folder / "strict.jinja").write_text(ALTERNATING)
    write(folder / "bad.jsonl", [CHATS[0], chat, CHATS[1]])
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2.*{named}"):
        module(folder, "bad.jsonl", chat_template=str(folder / "strict.jinja")).training_rows()
    settings = {"validation": str(folder / "bad.jsonl"), "chat_template": str(folder / "strict.jinja")}
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2.*{named}"):
        list(prepared(folder, stage="validate", **settings).val_dataloader())


def test_the_template_of_the_example_marks_an_answer_with_its_end(folder):
    example = Path(__file__).parents[2] / "configs" / "experiments" / "chat.yaml"
    template = yaml.safe_load(example.read_text())["data"]["init_args"]["chat_template"]
    data = module(folder, chat_template=template)
    ids, by_assistant, offsets = tokenize_chats(data.tokenizer, [CHATS[0]], offsets=True)[0]
    text = data.tokenizer.decode(ids)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe cat?<|im_end|>\n"
        "<|im_start|>assistant\nsat on the mat<|im_end|>\n"
    )
    marked = [text[start:end] for (start, end), mark in zip(offsets, by_assistant, strict=True) if mark]
    assert "".join(marked) == "sat on the mat<|im_end|>"


def test_chats_without_an_assistant_leave_nothing_to_train_on(folder):
    write(folder / "users.jsonl", [CHATS[2]] * 3)
    with pytest.raises(ValueError, match="nothing to train on"):
        module(folder, "users.jsonl").training_rows()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prompt_field": "p"}, "`prompt_field`, `messages_field`"),
        ({"token_column": "ids"}, "`messages_field` and `token_column`"),
        ({"messages_field": None, "chat_template": "x"}, "`messages_field`"),
        ({"chat_template": "none.jinja"}, r"none\.jinja"),
        ({"messages_field": None, "tokenizer": None}, "`tokenizer`"),
        ({"train": "x.txt"}, "`messages_field`"),
        ({"kind": StreamingTextDataModule}, "StreamingTextDataModule"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(folder, settings, named):
    (folder / "x.txt").write_text("text")
    with pytest.raises(ValueError, match=named):
        module(folder, **settings).training_rows()


def test_chats_may_be_one_of_several_validation_sets(folder):
    (folder / "text.jsonl").write_text(json.dumps({"text": "the cat sat on the mat " * 9}) + "\n")
    sets = {
        "chats": ValidationSet(str(folder / "chats.jsonl"), messages_field="messages"),
        "texts": ValidationSet(str(folder / "text.jsonl")),
    }
    settings = {
        "messages_field": None,
        "validation_sets": sets,
        "validation_length": "whole",
        "chat_template": TEMPLATE,
    }
    batches = list(prepared(folder, "text.jsonl", **settings).val_dataloader())
    alone = list(prepared(folder, validation_length="whole").val_dataloader())
    assert [batch["sets"] for batch in batches] == [["chats"]] * len(CHATS) + [["texts"]]
    assert all(torch.equal(one["labels"], other["labels"]) for one, other in zip(batches[:-1], alone, strict=True))
    assert (batches[-1]["labels"] == NO).sum() == 1


def test_a_report_shows_who_writes(folder):
    report = module(folder, sequence_length=200).inspect(count=1)
    assert "    response | sat on the mat<eos>\n    prompt   | \\n" in report
    scored = sum(int((row["labels"] != NO).sum()) for row in [module(folder, sequence_length=200).training_rows()[0]])
    assert f"scored       {scored} tokens" in report


def test_a_mixture_has_chats_with_and_texts_without_prompts(folder):
    (folder / "text.jsonl").write_text(json.dumps({"text": "the cat sat on the mat " * 9}) + "\n")
    files = {"chats": {"train": f"{folder}/chats.jsonl", "messages_field": "messages"}}
    files["texts"] = {"train": f"{folder}/text.jsonl"}
    sources = {
        name: {
            "class_path": "datamodules.TextDataModule",
            "init_args": {**settings, "validation": settings["train"]},
        }
        for name, settings in files.items()
    }
    tokenizer, cache = str(folder / "tokenizer"), str(folder / "cache")
    data = MixtureDataModule(tokenizer, sources=sources, sequence_length=7, cache_dir=cache)
    data.trainer = seen_trainer()
    data.prepare_data()
    data.setup("fit")
    alone = module(folder).training_rows()
    assert [row["labels"].tolist() for row in data.mixed_rows["chats"]] == [row["labels"].tolist() for row in alone]
    assert (data.mixed_rows["texts"][0]["labels"][1:] != NO).all()
    validation = list(data.val_dataloader())
    assert len(validation) == len(CHATS) + 1
    assert (validation[0]["labels"] == NO).sum() > 1
    assert (validation[-1]["labels"] == NO).sum() == 1


# ------------------------------------------------------------------------------------------------- token ids

TEXTS = ["the cat sat", "naïve café, 日本", "on the mat"]


def write_ids(folder, byte_tokenizer, rows=None):
    """Ids of `TEXTS` as JSON lines and parquet, and the texts."""
    tokenizer = load_tokenizer(byte_tokenizer)
    rows = rows or [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    (folder / "ids.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in rows))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"ids": ids} for ids in rows]), folder / "ids.parquet")
    datasets.Dataset.from_list([{"ids": ids} for ids in rows]).to_parquet(folder / "hub" / "train.parquet")
    return rows


IDS = {"messages_field": None, "token_column": "ids"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_token_ids_give_the_batches_of_their_text(folder, byte_tokenizer, kind, with_tokenizer):
    rows = write_ids(folder, byte_tokenizer)
    train = datasets.Dataset.from_list([{"ids": ids} for ids in rows]) if kind == "dataset" else f"ids.{kind}"
    tokenizer = byte_tokenizer if with_tokenizer else None
    validation = train if kind == "dataset" else str(folder / train)
    whole = {"validation_length": "whole"}
    ids = prepared(folder, train, tokenizer=tokenizer, validation=validation, **whole, **IDS)
    text = prepared(folder, "text.jsonl", validation=f"{folder}/text.jsonl", messages_field=None, **whole)
    for one, other in zip(ids.train_dataloader(), text.train_dataloader(), strict=True):
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(one[name], other[name])
        assert one["document_boundaries"] == other["document_boundaries"]
    for one, other in zip(ids.val_dataloader(), text.val_dataloader(), strict=True):
        end = other["input_ids"].shape[1]
        assert torch.equal(one["input_ids"][:, :end], other["input_ids"])
        assert one["input_ids"].shape[1] == end + (not with_tokenizer)  # which knows the end-of-text token
        assert ("text" in one) == with_tokenizer
        if with_tokenizer:
            assert one["text"] == other["text"]
            assert torch.equal(one["labels"], other["labels"])
            assert torch.equal(one["offsets"], other["offsets"])
    assert ids.largest_token == max(map(max, rows))


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([1, 2, 300], "id 300.*vocabulary of 300 tokens"),
        ([1, -1], "id -1"),
        ([2**31], "id 2147483648"),
        ([2**70], "list of integers"),
        ([1, 2.5], "list of integers"),
        ([[1], [2]], "list of integers"),
        ([True], "list of integers"),
        ("1 2", "list of integers"),
        (None, "list of integers"),
    ],
)
def test_ids_that_are_none_are_named_by_file_and_row(folder, byte_tokenizer, ids, named):
    (folder / "bad.jsonl").write_text(json.dumps({"ids": [1, 2]}) + "\n" + json.dumps({"ids": ids}) + "\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2.*{named}"):
        module(folder, "bad.jsonl", tokenizer=byte_tokenizer, **IDS).training_rows()
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2.*{named}"):
        prepared(folder, stage="validate", tokenizer=byte_tokenizer, validation=str(folder / "bad.jsonl"), **IDS)


def test_the_column_is_part_of_what_identifies_a_store(folder, byte_tokenizer):
    rows = [{"ids": [1, 2, 3, 4], "other": [4, 3, 2, 1]}] * 2
    (folder / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stores = [
        module(folder, "ids.jsonl", messages_field=None, token_column=column, tokenizer=tokenizer).training_rows().store
        for column, tokenizer in (("ids", None), ("other", None), ("ids", byte_tokenizer))
    ]
    assert [store.tokens[:4].tolist() for store in stores] == [[1, 2, 3, 4], [4, 3, 2, 1], [1, 2, 3, 4]]
    assert stores[0].folder == stores[2].folder != stores[1].folder


def test_held_out_ids_and_streams_are_as_those_of_texts(folder, byte_tokenizer):
    rows = [[number, number + 1, number + 2] for number in range(60)]
    write_ids(folder, byte_tokenizer, rows)
    splits = [
        module(folder, "ids.jsonl", tokenizer=None, holdout=4, **IDS).source(s) for s in ("train", "validation", "test")
    ]
    found = [[document.tokens.tolist() for document in split] for split in splits]
    assert sorted(chain.from_iterable(found)) == rows
    assert all(found)
    stream = module(folder, "ids.jsonl", StreamingTextDataModule, tokenizer=None, **IDS)
    stream.trainer = seen_trainer(max_steps=3, accumulate_grad_batches=1)
    batches = [batch["input_ids"][0].tolist() for batch in stream.train_dataloader()]
    assert list(chain.from_iterable(batches)) == list(chain.from_iterable(rows))[:21]


@pytest.mark.parametrize(
    ("train", "named"),
    [
        (datasets.Dataset.from_list([{"x": [1]}]), "no column 'ids'"),
        (datasets.Dataset.from_list([{"ids": [1]}]).to_iterable_dataset(), "map-style.*IterableDataset"),
        (3, "map-style.*int"),
    ],
)
def test_datasets_that_cannot_be_read_are_refused(folder, train, named):
    with pytest.raises(ValueError, match=named):
        module(folder, train, tokenizer=None, **IDS).training_rows()


def test_a_dataset_in_memory_is_tokenized_again_when_it_changes(folder):
    chats = datasets.Dataset.from_list([{"messages": chat} for chat in CHATS])
    store = module(folder, chats).training_rows().store
    assert np.array_equal(store.tokens, module(folder).training_rows().store.tokens)
    equal = datasets.Dataset.from_list([{"messages": chat} for chat in CHATS])
    assert module(folder, equal).training_rows().store.folder == store.folder
    assert module(folder, chats.select([1, 0, 2, 3])).training_rows().store.folder != store.folder
