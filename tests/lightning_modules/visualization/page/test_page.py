import base64
import hashlib
import html
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import torch

from lightning_modules.functional import key_token_mask, long_perplexity
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.scoring.key_tokens import document_tokens, find_key_tokens
from lightning_modules.visualization.page import ModelScores
from tests.lightning_modules.visualization.page.conftest import NASTY, as_json, make_inspection, unpacked


class Outline(HTMLParser):
    """What a browser would make of the page: its elements, the text between them, and the scripts."""

    def __init__(self):
        super().__init__()
        self.elements, self.text, self.scripts, self.open = [], "", [], None

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.open = tag if tag in ("script", "style") else None
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        if self.open == "script":
            self.scripts[-1] += data
        elif self.open is None:
            self.text += data


def outline(page):
    parsed = Outline()
    parsed.feed(page)
    return parsed


def test_numbers_in_the_page_are_those_of_the_scores_to_the_bit(inspection):
    page = inspection.html()
    arrays, scores = unpacked(page, "scores"), inspection.scores
    assert arrays["long"].dtype == arrays["short"].dtype == np.float32
    assert np.array_equal(arrays["long"], scores.long.numpy())
    assert np.array_equal(arrays["short"], scores.short.numpy())
    vocabulary = as_json(arrays["vocabulary"])
    assert [vocabulary[number] for number in arrays["token"]] == [
        inspection.token_texts[index] for index in inspection.scores.token_ids.tolist()
    ]
    key = key_token_mask(scores.long, scores.short)
    assert 20 < key.sum() < len(key)
    shown = outline(page).text
    assert f"key tokens{int(key.sum()):,} {100 * key[1:].double().mean():.2f}%" in re.sub(r"\n", "", shown)
    assert f"LongPPL{long_perplexity(scores.long, key):.3f}" in shown.replace("\n", "")
    assert f"tokens{len(key):,}key" in shown.replace("\n", "")
    assert inspection.summary().startswith(f"nasty.txt: {len(key):,} tokens, {int(key.sum()):,} key tokens (")
    facts = as_json(arrays["facts"])
    assert (facts["context_length"], facts["stride"], facts["first_short"]) == (32, 16, 48)
    assert (facts["alpha"], facts["beta"], facts["models"]) == (2.0, -2.0, [])


def test_share_of_key_tokens_is_that_of_the_scored_tokens(inspection):
    scores = replace(inspection.scores, unscored=48)  # many special tokens
    share = 100 * key_token_mask(scores.long, scores.short)[48:].double().mean()
    other = replace(inspection, scores=scores)
    assert f" key tokens ({share:.2f}%)" in other.summary()
    assert f">{share:.2f}%</small>" in other.html()


def test_spans_are_those_of_the_characters_as_a_script_counts_them(inspection):
    arrays = unpacked(inspection.html(), "scores")
    assert arrays["text"].tobytes().decode() == NASTY
    units = NASTY.encode("utf-16-le")
    start = arrays["advance"].astype(np.int64).cumsum()
    for token, (first, last) in enumerate(inspection.scores.offsets.tolist()):
        if first == last:
            assert arrays["length"][token] == 0
        else:
            stretch = units[2 * start[token] : 2 * (start[token] + int(arrays["length"][token]))]
            assert stretch.decode("utf-16-le") == NASTY[first:last]


def test_alternatives_are_exact_to_a_five_hundredth_of_a_nat(inspection):
    page = inspection.html()
    arrays, vocabulary = unpacked(page, "alternatives"), as_json(unpacked(page, "scores")["vocabulary"])
    for name, first, found in (("long", 0, inspection.alternatives.long), ("short", 48, inspection.alternatives.short)):
        texts = [inspection.token_texts[index] for index in found.token_ids[first:].flatten().tolist()]
        assert [vocabulary[number] for number in arrays[f"{name}_token"].flatten()] == texts
        expected = found.log_likelihood[first:].numpy()
        finite = np.isfinite(expected)
        assert np.abs(arrays[f"{name}_steps"] / -512 - expected)[finite].max() <= 0.5 / 512
        assert (arrays[f"{name}_steps"][~finite] == 65535).all()
    assert (~np.isfinite(inspection.alternatives.long.log_likelihood.numpy())).sum() == 1


def test_nothing_of_the_document_or_of_a_name_is_markup(tokenizer):
    evil = '</title><script>alert("name")</script>&"\'[[script]]'
    page = make_inspection(tokenizer, name=evil, evaluator=evil).html()
    parsed, plain = outline(page), outline(make_inspection(tokenizer).html())
    assert [tag for tag, _ in parsed.elements] == [tag for tag, _ in plain.elements]
    assert parsed.text.count(evil) == 3  # title, heading and evaluator
    assert parsed.scripts[-1] == plain.scripts[-1]
    assert all(re.fullmatch(r"[A-Za-z0-9+/=]*", data) for data in parsed.scripts[:-1])
    assert "alert(1)" not in page


def test_the_page_allows_its_own_script_and_nothing_else(inspection):
    parsed = outline(inspection.html())
    metas = [attributes for tag, attributes in parsed.elements if tag == "meta"]
    policy = next(meta["content"] for meta in metas if meta.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(parsed.scripts[-1].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    for _, attributes in parsed.elements:
        assert not {"src", "href", "style", "srcset", "action"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    own = re.sub(r'(<script type="text/plain"[^>]*>)[^<]*', r"\1", inspection.html())
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|import\(|XMLHttp|WebSocket|innerHTML", own)


def test_lone_surrogates_become_replacement_characters(tokenizer, tmp_path):
    inspection = make_inspection(tokenizer, text="ba ce di fo gu " * 20)
    broken = replace(inspection, text=inspection.text.replace("fo", "\ud83d\ude42"))  # two, not one character
    arrays = unpacked(broken.html(), "scores")
    assert arrays["text"].tobytes().decode() == inspection.text.replace("fo", "\ufffd\ufffd")
    assert np.array_equal(arrays["advance"], unpacked(inspection.html(), "scores")["advance"])
    path = replace(broken, name="\ud83d.txt").save(tmp_path / "page.html")
    assert '<h1 dir="auto">?.txt</h1>' in path.read_text(encoding="utf-8")


def test_a_dropped_beta_is_null_and_counts_without_it(tokenizer):
    inspection = make_inspection(tokenizer, beta=-math.inf)
    assert as_json(unpacked(inspection.html(), "scores")["facts"])["beta"] is None
    key = key_token_mask(inspection.scores.long, inspection.scores.short, beta=-math.inf)
    assert f"{int(key.sum()):,} key tokens" in inspection.summary()


def test_a_judged_model_has_figures_of_its_own(tokenizer, other_tokenizer):
    text = NASTY.replace("<", "ba")
    tokens = document_tokens(encode_document(text, other_tokenizer))
    log_likelihood = -torch.rand(len(tokens.ids), generator=torch.Generator().manual_seed(5))
    inside = find_key_tokens(make_inspection(tokenizer, text=text).scores, tokens).mask
    model = ModelScores("<b>judged</b>", tokens, log_likelihood, inside)
    inspection = make_inspection(tokenizer, text=text, models=[model, model._replace(name="hub/other")])
    assert inside[1:].sum() > 5
    expected = long_perplexity(log_likelihood[1:], inside[1:])
    page = inspection.html()
    assert f'<td id="model-longppl-0" class="key">{expected:.3f}</td>' in page
    assert f"&lt;b&gt;judged&lt;/b&gt;: LongPPL {expected:.3f}" in html.escape(inspection.summary())
    assert "&lt;b&gt;judged&lt;/b&gt;" in page
    assert '<th scope="row">other</th>' in page
    alone = make_inspection(tokenizer, text=text, models=[model]).html()
    assert f'<dd id="model-longppl-0">{expected:.3f}</dd>' in alone
    for number in range(2):
        assert np.array_equal(unpacked(page, "scores")[f"model_{number}_long"], log_likelihood.numpy())


def test_special_tokens_may_say_that_they_stand_anywhere(inspection):
    offsets = inspection.scores.offsets.clone()
    offsets[100] = offsets[-1] = torch.tensor([0, 0])
    arrays = unpacked(replace(inspection, scores=replace(inspection.scores, offsets=offsets)).html(), "scores")
    assert (arrays["advance"] < 1000).all()
    assert arrays["length"][100] == arrays["length"][-1] == 0
