"""Models whose tokenizers add special tokens in different places, and what a text means to them."""

import copy

from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer

TEMPLATES = {
    "none": "$A",
    "start": "<s> $A",
    "end": "$A </s>",
    "both": "<s> $A </s>",
    "two at the start": "<s> </s> $A </s>",
}
"""Templates of post-processors, by where they add special tokens."""

STARTS = {"none": [], "start": [0], "end": [], "both": [0], "two at the start": [0, 1]}
"""Ids of the special tokens before a text."""


def write_models(model_dir, tokenizer, folder):
    """Write a folder of the model for each of the templates."""
    for name, template in TEMPLATES.items():
        own = copy.deepcopy(tokenizer)
        own.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(folder / name)
        own.save_pretrained(folder / name)
    return folder


def load_reference(folder):
    """Return the model in float64, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder).double().eval().requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(folder)


def plain_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids
