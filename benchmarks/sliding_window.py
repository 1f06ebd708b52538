"""Compare short contexts by one sliding window with exact ones, by the depth of the model and by K.

For each model and K (d = K / 4), against exact LongCE on the same rows: cosine of the gradients, precision and recall
of the key tokens, mean token weight, and CPU time of the short pass; the cosines of exact windows with d = K and of
cross entropy are for scale.

    python benchmarks/sliding_window.py --models MODEL_FOLDER.. --files TEXT.. --context_length 64 128 256
"""

import argparse
from pathlib import Path

import torch
from cheaper_weights import Comparison, Outcome, key_token_agreement
from torch.nn.functional import cosine_similarity

from lightning_modules.models.loading.checks import check_attention_window, check_scoring
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", required=True, help="hub ids or folders")
    parser.add_argument("--files", nargs="+", required=True, help="UTF-8 texts, a row each")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text, at most")
    parser.add_argument("--context_length", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--alpha", type=float, default=2.0)
    parser.add_argument("--beta", type=float, default=-2.0)
    options = parser.parse_args()
    lengths = options.context_length
    print(
        "| layers | K | sliding window: cosine | key tokens: precision / recall | mean weight | time | with 4 sinks |",
        end="",
    )
    print(" d = K: cosine | key tokens | time | cross entropy |\n" + "|---" * 11 + "|")
    for name in options.models:
        backbone = load_backbone(ModelConfig(name, dtype="float32")).train()
        check_scoring(backbone)
        check_attention_window(backbone)
        tokenizer = load_tokenizer(name)
        rows = [encode_document(Path(file).read_text(), tokenizer, max_tokens=options.tokens) for file in options.files]
        for options.context_length in lengths:
            options.stride = options.context_length // 4
            comparison = Comparison(backbone, rows, options)
            exact = comparison.outcome()
            sliding, sinks = comparison.sliding(0), comparison.sliding(4)
            coarse = comparison.outcome(stride=options.context_length)
            plain = comparison.stored([torch.ones(batch["labels"].shape) for batch in rows])

            def cosine(outcome: Outcome, exact: Outcome = exact) -> str:
                return f"{cosine_similarity(outcome.gradient, exact.gradient, dim=0):.4f}"

            print(
                f"| {backbone.base_model.config.num_hidden_layers} | {options.context_length} | {cosine(sliding)}"
                f" | {key_token_agreement(sliding, exact)} | {sliding.weight / exact.weight:.3f}"
                f" | {sliding.seconds / exact.seconds:.2f} | {cosine(sinks)} | {cosine(coarse)}"
                f" | {key_token_agreement(coarse, exact)} | {coarse.seconds / exact.seconds:.2f} | {cosine(plain)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
