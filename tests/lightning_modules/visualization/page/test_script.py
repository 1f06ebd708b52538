"""What the page's script counts and how it cuts the document, run by Node where there is one."""

import json
import math
import re
import shutil
import subprocess
import unicodedata
from dataclasses import replace
from importlib.resources import files

import pytest
import torch

from lightning_modules.functional import key_token_mask, long_perplexity
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.scoring.key_tokens import document_tokens, find_key_tokens
from lightning_modules.visualization.page import ModelScores
from tests.lightning_modules.visualization.page.conftest import NASTY, make_inspection

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no Node to run the script in")

THRESHOLDS = [(2.0, -2.0), (0.0, -0.5), (0.1, -1.7), (3.3, -math.inf), (8.0, -0.05)]

BROWSER = """
const blocksOfPage = JSON.parse(require("fs").readFileSync(0, "utf8"));
globalThis.document = { getElementById: (id) => ({ textContent: blocksOfPage[id], remove() {} }) };
"""


def run(inspection, body):
    """What ``body`` gives, the body of an async function that knows `data` and all functions of the page."""
    page = inspection.html()
    blocks = dict(re.findall(r'<script type="text/plain" id="(\w+)">([^<]*)</script>', page))
    names = ("data.js", "key_tokens.js", "blocks.js", "card.js")
    source = "".join((files("lightning_modules.visualization.page") / name).read_text() for name in names)
    code = f"{BROWSER}{source}\n(async () => {{ const data = await readScores();\n{body}\n}})()"
    code += ".then((result) => console.log(JSON.stringify(result)));"
    found = subprocess.run(["node", "-e", code], input=json.dumps(blocks), capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.parametrize("alignment", ["characters", "tokens"])
def test_key_tokens_are_those_of_torch_for_any_thresholds(alignment, tokenizer, other_tokenizer):
    tokens = document_tokens(encode_document(NASTY, tokenizer if alignment == "tokens" else other_tokenizer))
    log_likelihood = -torch.rand(len(tokens.ids), generator=torch.Generator().manual_seed(5))
    inspection = make_inspection(tokenizer, models=[ModelScores("judged", tokens, log_likelihood, log_likelihood < 0)])
    scores = inspection.scores
    # At the thresholds themselves, which float32 rounds: a comparison in float64 would take or leave other tokens.
    scores.long[200:203] = torch.tensor([-0.5, -1.7, -0.05])
    scores.long[203], scores.short[203] = torch.tensor(-0.01), torch.tensor(-0.11)
    asked = json.dumps([[alpha, None if math.isinf(beta) else beta] for alpha, beta in THRESHOLDS])
    found = run(
        inspection,
        f"""
        return {asked}.map(([alpha, beta]) => {{
          const mask = new Uint8Array(data.count);
          markKeyTokens(data, alpha, beta ?? -Infinity, mask);
          const keys = keyTokens(mask), inside = judgedKeyTokens(data, data.judged[0], keys, alpha, beta ?? -Infinity);
          const longppl = longPerplexity(data.long, keys), model = longPerplexity(data.judged[0].long, inside);
          return {{ keys, inside, longppl, model, share: keyTokenShare(data, keys) }};
        }});""",
    )
    for (alpha, beta), answer in zip(THRESHOLDS, found, strict=True):
        key = key_token_mask(scores.long, scores.short, alpha=alpha, beta=beta)
        assert answer["keys"] == key.nonzero().squeeze(-1).tolist()
        assert answer["share"] == pytest.approx(float(key[1:].double().mean()))  # token 0 is not scored
        inside, _, found_by = find_key_tokens(scores, tokens, alpha=alpha, beta=beta)
        assert found_by == alignment
        inside[0] = False
        assert answer["inside"] == inside.nonzero().squeeze(-1).tolist()
        for name, values, mask in (("longppl", scores.long, key), ("model", log_likelihood, inside)):
            expected = float(long_perplexity(values, mask))
            assert answer[name] == (None if math.isnan(expected) else pytest.approx(expected, rel=1e-12))
    assert len({len(answer["keys"]) for answer in found}) == len(THRESHOLDS)


ASKED = {
    "differences": "return [...data.lsd].map((value) => (Number.isFinite(value) ? value : String(value)));",
    "blocks": """
        const graphemes = new Intl.Segmenter();
        const withText = (part) => ({ ...part, text: data.text.slice(part.from, part.to) });
        return cutBlocks(data).map((block) => (
          { ...withText(block), cells: cellsOf(data, block, graphemes).map(withText) }
        ));""",
    "alternatives": """
        const arrays = await unpack("alternatives");
        return [30, 100].map((token) => ["long", "short"].map((name) => alternativesOf(data, arrays, name, token)));""",
}


@pytest.fixture(scope="module")
def inspection(tokenizer):
    return make_inspection(tokenizer)


@pytest.fixture(scope="module")
def answers(inspection):
    """What the script says of one page, by one process."""
    functions = ", ".join(f"{name}: await (async () => {{{body}}})()" for name, body in ASKED.items())
    return run(inspection, f"return {{{functions}}};")


def test_difference_of_infinities_is_no_key_token_and_a_difference_is_rounded_as_torch_does(inspection, answers):
    expected = [
        value if math.isfinite(value) else str(value)
        for value in (inspection.scores.long - inspection.scores.short).tolist()
    ]
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    assert answers["differences"] == [names.get(value, value) for value in expected]


def test_blocks_and_cells_make_up_the_document(inspection, answers):
    found = answers["blocks"]
    assert "".join(block["text"] for block in found) == NASTY
    cells = [cell for block in found for cell in block["cells"]]
    assert [cell["first"] for cell in cells[1:]] == [cell["last"] for cell in cells[:-1]]
    assert (cells[0]["first"], cells[-1]["last"]) == (0, len(inspection.scores.token_ids))
    assert "".join(cell["text"] for cell in cells) == NASTY
    texts = [cell["text"] for cell in cells]
    assert {"👩\u200d👩\u200d👧\u200d👦", "🙂", "🇨🇭", "日", "\r\n"} <= {text.strip(" ") or text for text in texts}
    assert not any(unicodedata.combining(text[0]) for text in texts)
    assert max(block["last"] - block["first"] for block in found) <= 660
    assert len(found) > 5
    assert all(block["text"].endswith("\n") or block["last"] - block["first"] >= 440 for block in found[:-1])


def test_tokens_without_characters_join_their_neighbours(tokenizer):
    inspection = make_inspection(tokenizer)
    offsets = inspection.scores.offsets
    offsets[300] = offsets[301] = offsets[-1] = torch.tensor([0, 0])
    body = (
        "return cutBlocks(data).flatMap((block) => cellsOf(data, block, null)).map(({ first, last }) => [first, last]);"
    )
    cells = run(inspection, body)
    assert [first for first, _ in cells[1:]] == [last for _, last in cells[:-1]]
    assert next(cell for cell in cells if cell[0] <= 300 < cell[1])[1] >= 302
    assert cells[0] == [0, 2]


def test_alternatives_know_the_token_itself_exactly(inspection, answers):
    early, late = answers["alternatives"]
    assert early[0] == early[1]  # there is no short context yet
    assert late[0] != late[1]
    for context, found in zip(("long", "short"), late, strict=True):
        assert [one["own"] for one in found][1]
        assert found[1]["probability"] == pytest.approx(math.exp(getattr(inspection.scores, context)[100]), rel=1e-12)
        ids = getattr(inspection.alternatives, context).token_ids[100].tolist()
        assert [one["text"] for one in found] == [inspection.token_texts[index] for index in ids]
        likelihood = getattr(inspection.alternatives, context).log_likelihood[100].exp().tolist()
        assert found[2]["probability"] == pytest.approx(likelihood[2], rel=2e-3)


def test_special_tokens_before_the_text_have_no_numbers(tokenizer):
    scores = replace(make_inspection(tokenizer).scores, unscored=2)
    body = """
        document.createElement = () => ({ append() {} });
        const arrays = await unpack("alternatives");
        const card = new Card(data, new Uint8Array(data.count), { childNodes: [] });
        const briefs = [2, 3].map((last) => card.brief({ first: 0, last, from: 0, to: 1 })[1]);
        return { briefs, alternatives: [1, 2].map((token) => alternativesOf(data, arrays, "long", token)) };"""
    found = run(make_inspection(tokenizer, scores=scores), body)
    lsd = float(scores.long[2] - scores.short[2])
    assert found["briefs"] == [
        " not scored",
        f" LSD {lsd:.2f}, LCL {float(scores.long[2]):.2f} ".replace("-", "\N{MINUS SIGN}"),
    ]
    assert found["alternatives"][0] is None
    assert found["alternatives"][1] is not None


def test_distances_to_the_last_equal_token(tokenizer):
    inspection = make_inspection(tokenizer, text="ba ce ba, di 🙂 ba 🙂" + " fo" * 60)
    texts = [inspection.token_texts[index].strip() for index in inspection.scores.token_ids.tolist()]
    distances = run(inspection, "return [...distancesToEqual(data)];")
    for token, (text, distance) in enumerate(zip(texts, distances, strict=True)):
        earlier = [token - other for other in range(token) if texts[other] == text and text]
        assert distance == min(earlier, default=0)
    assert max(distances) > 1
