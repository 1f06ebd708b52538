"""Time and memory of scoring and of a LongCE step, as ratios to full logits and one window at a time.

Scoring is compared with the package of the paper's authors (`longppl` 0.3.0). It has no training step; the baseline of
the step is the same formula written as their training script has it: full logits of the row and of each window.
Both run in this process, in turn, on the same random model and text; medians of the rounds.

    python benchmarks/against_authors.py --lengths 4096 8192 --vocabularies 32000 --rounds 3
"""

import argparse
import contextlib
import io
import platform
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from longppl.longppl import compute_longppl
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lightning_modules.attention import register_document_attention
from lightning_modules.backbone import Backbone
from lightning_modules.batch import PackedBatch
from lightning_modules.evaluator import score_text
from lightning_modules.functional import Weighing, long_perplexity, span_token_mask
from lightning_modules.objectives import LongCE
from lightning_modules.tokenization import encode_document

SHAPES = {
    "S": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8},
    "D": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 24, "num_attention_heads": 8},
}


def build(shape: str, vocabulary: int, seed: int) -> transformers.PreTrainedModel:
    """A random Llama of one of the shapes."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama", **SHAPES[shape], num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=1 << 18
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=register_document_attention()).eval()


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One token per word ``w0``, ``w1``, .., so that the length of a text in tokens is exact."""
    backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def measure(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and MiB that the process's memory rose above where it was."""
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")  # forget the peak of before
    before, started = _status("VmRSS"), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        function()
    return time.perf_counter() - started, _status("VmHWM") - before


def _status(field: str) -> float:
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith(field)) / 1024


def plain_longce_step(model: transformers.PreTrainedModel, ids: Tensor, context_length: int, stride: int) -> None:
    """Loss and gradients with full logits, one window at a time."""
    logits = model(input_ids=ids).logits
    losses = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    weights = torch.ones_like(losses)
    with torch.no_grad():
        for start in range(0, ids.shape[1] - context_length, stride):
            stop = min(start + context_length + stride, ids.shape[1])
            window = model(input_ids=ids[:, start:stop]).logits[0, context_length - 1 : -1]
            target = ids[0, start + context_length : stop]
            short = torch.nn.functional.cross_entropy(window, target, reduction="none")
            long = losses[start + context_length - 1 : stop - 1]
            weights[start + context_length - 1 : stop - 1] = (short - long).exp().clamp(max=5.0)
    (losses * weights).mean().backward()
    model.zero_grad()


def longce_step(backbone: Backbone, batch: PackedBatch, context_length: int, stride: int) -> None:
    """The step as `LongContextLM` makes it."""
    short = backbone.short_log_likelihood(batch, context_length=context_length, stride=stride)
    backbone(batch, Weighing(LongCE().influence, *short)).loss.backward()
    backbone.zero_grad()


def score(
    text: str,
    model: Backbone,
    evaluator: Backbone,
    tokenizer: PreTrainedTokenizerFast,
    context_length: int,
    stride: int,
) -> float:
    """LongPPL as ``longce score`` computes it, at the thresholds of random models."""
    scores = score_text(text, evaluator, tokenizer, context_length=context_length, stride=stride)
    document = encode_document(text, tokenizer)
    with torch.no_grad():
        log_likelihood = model(document)
    return float(long_perplexity(log_likelihood, span_token_mask(document["offsets"], scores.key_spans(beta=-99.0))))


def compare(shape: str, vocabulary: int, length: int, context_length: int, stride: int, rounds: int) -> list[str]:
    """Rows of the table for one setting."""
    model, evaluator = (build(shape, vocabulary, seed) for seed in range(2))
    tokenizer = word_tokenizer(vocabulary)
    ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    text = " ".join(f"w{index}" for index in ids[0].tolist())
    batch = encode_document(text, tokenizer)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ours, judge = Backbone(model), Backbone(evaluator)

    def training(step: Callable[[], None]) -> None:
        model.train()
        step()
        model.eval()

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "score": (
            lambda: compute_longppl(
                text, model, evaluator, tokenizer, tokenizer, None, context_length, stride, beta=-99.0
            ),
            lambda: score(text, ours, judge, tokenizer, context_length, stride),
        ),
        "LongCE step": (
            lambda: training(lambda: plain_longce_step(model, ids, context_length, stride)),
            lambda: training(lambda: longce_step(ours, batch, context_length, stride)),
        ),
    }
    rows = []
    for name, functions in pairs.items():
        results = [[measure(function) for function in functions] for _ in range(rounds)]
        (theirs, their_memory), (mine, my_memory) = (
            [statistics.median(round_[side][value] for round_ in results) for value in range(2)] for side in range(2)
        )
        rows.append(
            f"| {shape} V={vocabulary} n={length} K={context_length} d={stride} | {name} | {theirs:.2f} / {mine:.2f}"
            f" | {mine / theirs:.2f} | {their_memory:.0f} / {my_memory:.0f} | {my_memory / max(their_memory, 1):.2f} |"
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000])
    parser.add_argument("--context_length", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    print(f"{versions}, {torch.get_num_threads()} threads, {platform.machine()}, float32\n")
    print("| setting | what | s: baseline / ours | ratio | MiB above entry: baseline / ours | ratio |")
    print("|---|---|---|---|---|---|")
    for vocabulary in options.vocabularies:
        for length in options.lengths:
            rows = compare(options.shape, vocabulary, length, options.context_length, options.stride, options.rounds)
            print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
