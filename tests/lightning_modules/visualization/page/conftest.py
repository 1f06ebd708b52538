import base64
import json
import re
import zlib

import pytest
import torch
from safetensors.numpy import load

from lightning_modules.functional import LikeliestTokens
from lightning_modules.models.tokenization.detokenization import token_texts
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.scoring.token_scores import TokenScores, text_sha256
from lightning_modules.visualization.page import Inspection
from lightning_modules.visualization.page.alternatives import Alternatives
from tests.conftest import make_text

NASTY = (
    '<script>document.title = "RUN"; alert(1)</script> </SCRIPT ><!-- <img src=x onerror="alert(2)"> -->\n'
    "line\u2028separator, NUL \0, escape \x1b, zero\u200bwidth, soft\u00adhyphen, \u202eturned\u202c, BOM \ufeff\n"
    "🙂 👩\u200d👩\u200d👧\u200d👦 🇨🇭 e\u0301 naïve 日本語 مرحبا בית\n"
    "\ttabs\t[[script]] [[name]] ${x} \\n &lt; &amp;\r\n" + "unbroken" * 200 + "\n\n" + make_text(400) + "\n"
)


def make_inspection(tokenizer, text=NASTY, count=4, seed=0, **changes):
    """With made-up likelihoods, of which some are infinite."""
    batch = encode_document(text, tokenizer, add_special_tokens=True)
    ids, offsets = batch["input_ids"][0], batch["offsets"][0]
    generator = torch.Generator().manual_seed(seed)
    long = -torch.rand(len(ids), generator=generator) * 5
    short = long - torch.randn(len(ids), generator=generator) * 3
    long[0] = 0.0
    short[:48] = long[:48]
    short[60], long[61], short[61], long[62] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    found = []
    for _ in range(2):
        others = torch.randint(len(tokenizer), (len(ids), count), generator=generator)
        likelihood = (torch.rand(len(ids), count, generator=generator) * -9).sort(descending=True).values
        found.append(LikeliestTokens(others, likelihood))
    alternatives = Alternatives(*found)
    for part in alternatives:  # the token itself is among them
        part.token_ids[:, 1] = ids
    alternatives.long.log_likelihood[5, 3] = -torch.inf
    used = torch.cat([ids, *(part.token_ids.flatten() for part in alternatives)]).unique().tolist()
    settings = {
        "name": "nasty.txt",
        "text": text,
        "evaluator": "an evaluator",
        "scores": TokenScores(text_sha256(text), "identity", 32, 16, ids, offsets, long, short),
        "token_texts": dict(zip(used, token_texts(tokenizer, used), strict=True)),
        "alternatives": alternatives,
    }
    return Inspection(**{**settings, **changes})


def unpacked(page, name):
    """The arrays in a data block of the page."""
    block = re.search(rf'<script type="text/plain" id="{name}">([A-Za-z0-9+/=]*)</script>', page)[1]
    return load(zlib.decompress(base64.b64decode(block, validate=True)))


def as_json(array):
    return json.loads(array.tobytes())


@pytest.fixture
def inspection(tokenizer):
    return make_inspection(tokenizer)
