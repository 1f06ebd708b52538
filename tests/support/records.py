"""Records of measurements that nobody has measured."""

import math

from lightning_modules.scoring.records import Definition, Record, Source, Sums

MODEL = Source("hub/M", f"sha256:{'c' * 64}", "t", "float32", "sdpa", "none")
EVALUATOR = Source("hub/E", f"sha256:{'a' * 64}", "t", "float32", "sdpa", "none", special_tokens=True)
DEFINITION = Definition(context_length=64, stride=16)


def make_record(document, longppl, perplexity, *, key_tokens=10, tokens=100, text=None, **fields):
    """A record with these numbers, of a text that is named by default as the document is."""
    sums = Sums(
        documents=1,
        tokens=tokens,
        unscored=1,
        nll=tokens * math.log(perplexity),
        key_tokens=key_tokens,
        key_nll=key_tokens * math.log(longppl) if key_tokens else 0.0,
    )
    about = {"model": MODEL, "evaluator": EVALUATOR, "definition": DEFINITION, "alignment": "tokens", **fields}
    return Record(document=document, text_sha256=text or f"text of {document}", sums=sums, **about)
