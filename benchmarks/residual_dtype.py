"""Measure the rounding errors of mixed precision with both residual streams, and of bfloat16 weights, on your model.

Each is compared with float64 on the same rows: log-likelihoods, LSD and LongCE weights of all tokens with a short
context (root mean square of the errors, in nats for the first two), and the gradients of LongCE and cross entropy.

    python benchmarks/residual_dtype.py --model MODEL_FOLDER --files TEXT.. --context_length 128 --stride 64
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_modules.batch import PackedBatch
from lightning_modules.functional import long_cross_entropy
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.short_context import short_log_likelihood
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.objectives import CrossEntropy, LongCE

SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "bf16-mixed, `residual_dtype: float32`": ({"dtype": "float32", "residual_dtype": "float32"}, True),
    "bf16-mixed, `residual_dtype: bfloat16`": ({"dtype": "float32"}, True),
    "bf16-true": ({"dtype": "bfloat16"}, False),
}


def measure(backbone: Backbone, batch: PackedBatch, autocast: bool, sizes: tuple[int, int]) -> list[Tensor]:
    """Return log-likelihoods, LSD, weights, and gradients of LongCE and cross entropy, in float64."""
    gradients = []
    for objective in (CrossEntropy(), LongCE()):
        backbone.zero_grad()
        with torch.autocast(backbone.device.type, torch.bfloat16, enabled=autocast):
            short = short_log_likelihood(backbone, batch, context_length=sizes[0], stride=sizes[1])
            long = backbone(batch)
            weights = objective(long.detach(), short, batch)
            long_cross_entropy(long, weights, batch["labels"]).backward()
        gradients.append(torch.cat([parameter.grad.double().flatten() for parameter in backbone.parameters()]))
    known, kept = long.detach().double(), short.has_short_context
    lsd = known - short.log_likelihood.double()
    return [known[kept], lsd[kept], weights.double()[kept], *reversed(gradients)]


def compare(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the errors of one row, as in the table."""
    errors = [(a - e).square().mean().sqrt() for a, e in zip(actual[:3], expected[:3], strict=True)]
    for a, e in zip(actual[3:], expected[3:], strict=True):
        errors += [1 - F.cosine_similarity(a, e, dim=0), (a - e).norm() / e.norm()]
    return [float(error) for error in errors]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--files", nargs="+", required=True, help="UTF-8 texts, a row each")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text, at most")
    parser.add_argument("--context_length", type=int, default=128)
    parser.add_argument("--stride", type=int, default=64)
    options = parser.parse_args()
    tokenizer, sizes = load_tokenizer(options.model), (options.context_length, options.stride)
    rows = [encode_document(Path(file).read_text(), tokenizer, max_tokens=options.tokens) for file in options.files]
    exact = load_backbone(ModelConfig(options.model, dtype="float64")).train()
    expected = [measure(exact, batch, False, sizes) for batch in rows]
    print("| precision | log-likelihood | LSD | weight | LongCE gradient: 1 - cosine / relative | CE gradient |")
    print("|---|---|---|---|---|---|")
    for name, (settings, autocast) in SETTINGS.items():
        backbone = load_backbone(ModelConfig(options.model, **settings), autocast=autocast).train()
        actual = [measure(backbone, batch, autocast, sizes) for batch in rows]
        means = torch.tensor([compare(*pair) for pair in zip(actual, expected, strict=True)]).mean(0).tolist()
        first, (long_cosine, long_norm, cosine, norm) = " | ".join(f"{each:.2e}" for each in means[:3]), means[3:]
        print(f"| {name} | {first} | {long_cosine:.1e} / {long_norm:.2e} | {cosine:.1e} / {norm:.2e} |", flush=True)


if __name__ == "__main__":
    main()
