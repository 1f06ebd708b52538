import json

import pytest

from datamodules import TextDataModule
from datamodules.packing.positions import PoSE
from lightning_modules.batch import IGNORE_INDEX

RECORDS = [
    {"prompt": "a b ", "text": "c d", "id": "one"},
    {"prompt": "", "text": "h", "id": "t\two"},
    {"prompt": "e f g h ", "text": "a b c", "id": "three"},
]


@pytest.fixture
def module(word_tokenizer, tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))

    def make(**settings):
        settings = {"prompt_field": "prompt", "name_field": "id", "sequence_length": 5, **settings}
        path, cache = str(tmp_path / "x.jsonl"), str(tmp_path / "cache")
        return TextDataModule(word_tokenizer, train=path, cache_dir=cache, **settings)

    return make


def test_a_report_written_out(module):
    report = module(packing="best_fit", loss_on_prompt=False, pose=PoSE(1000)).inspect([2, 1], names=True)
    assert (
        report
        == """\
packing      best_fit, documents isolated
documents    3 of 15 tokens: median 5, longest 8, 0 empty
packed into  3 sequences of 5 tokens; documents cut: 1, tokens dropped: 0 (0.00%), padding: 0 (0.00%)
positions    in 2 chunks of each document, up to 1,000
scored       7 tokens (46.67% of all positions), not counting prompts

sequence 2   tokens 5, documents 1, padding 0
  0 to 5: document 2 (three), tokens 0 to 5 of 8, cut at the end
    prompt   | e f g h
    response | a

sequence 1   tokens 5, documents 2, padding 0
  0 to 2: document 1 (t\\two), whole
    | h <eos>
  2 to 5: document 2 (three), tokens 5 to 8 of 8, cut at the start
    | b c <eos>
"""
    )


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize(("loss_on_prompt", "isolate"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("length", [1, 3])
def test_scored_tokens_are_those_with_labels(module, packing, loss_on_prompt, isolate, length):
    settings = {"packing": packing, "loss_on_prompt": loss_on_prompt, "isolate_documents": isolate}
    data = module(sequence_length=length, **settings)
    rows = data.training_rows()
    scored = sum(int((rows[number]["labels"] != IGNORE_INDEX).sum()) for number in range(len(rows)))
    assert f"\nscored       {scored} tokens ({scored / (len(rows) * length):.2%} of all positions)" in data.inspect()


@pytest.mark.parametrize(
    ("options", "numbers"),
    [({}, [0, 1, 2]), ({"count": 1}, [0]), ({"count": 0}, []), ({"rows": [6]}, [6]), ({"count": 99}, [*range(7)])],
)
def test_the_rows_that_are_asked_for_are_shown(module, options, numbers):
    lines = module(sequence_length=2).inspect(**options).splitlines()
    assert [int(line.split()[1]) for line in lines if line.startswith("sequence ")] == numbers
    for rows in ([7], [0, -1]):
        with pytest.raises(ValueError, match="`rows`"):
            module(sequence_length=2).inspect(rows)
