"""Correctness of a device, compared with float32 on the CPU: likelihoods, gradients, key tokens, resuming, evaluators.

`benchmarks/on_gpu.py` runs these before it times anything. Models are random and tiny, tokenizers and texts made up.
"""

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from typing_extensions import override

from callbacks import ExternalEvaluator, StepCheckpoint
from lightning_modules.batch import PackedBatch, batch_to, pack_sequence
from lightning_modules.functional import key_token_mask, long_cross_entropy
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.training.checkpoints.io import CheckedCheckpointIO, newest_checkpoint

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 600,
    "initializer_range": 0.06,  # the long context must matter, or no token is a key token
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
WINDOWS: dict[str, Any] = {"context_length": 128, "stride": 32}
THRESHOLDS: dict[str, Any] = {"alpha": 0.5, "beta": -6.0}
STEPS = 24


class NotAvailableError(Exception):
    """This version or machine lacks an option, a package or the memory that a row needs."""


def build_module(device: str, *, autocast: bool = False, optional: bool = False, **settings: Any) -> LongContextLM:
    """Build a random model on the device, as training loads it; ``optional`` settings may not exist."""
    try:
        module = LongContextLM(**settings)
        with torch.device(device):
            module.backbone = load_backbone(module.loading, device=device, autocast=autocast)
    except (TypeError, ValueError, ImportError, OSError) as error:
        if optional:
            raise NotAvailableError(str(error)) from error
        raise
    return module.to(device).train()


def half_precision(device: str, *, autocast: bool) -> Any:
    """Return what `trainer.precision: bf16-mixed` runs a step in."""
    return torch.autocast(device, torch.bfloat16) if autocast else nullcontext()


# ------------------------------------------------------------------------------------------------- one step of LongCE


def step_checks(device: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield functions that compare a LongCE step to the CPU in float32, for each precision and attention."""
    torch.manual_seed(0)
    reference = build_module("cpu", model_config=SIZES, **WINDOWS)
    for parameter in reference.parameters():
        parameter.data = parameter.data.bfloat16().float()  # so that bfloat16 weights are the same weights
    weights = reference.backbone.state_dict()
    documents = [torch.randint(SIZES["vocab_size"], (length,)) for length in (300, 210, 514)]
    batches = {"single": pack_sequence([torch.cat(documents)]), "packed": pack_sequence(documents)}
    expected = {name: _run_step(reference, batch) for name, batch in batches.items()}
    for attention in ("sdpa", "flash_attention_2", "flash_attention_3"):
        for precision in ("float32", "bfloat16", "autocast") if attention == "sdpa" else ("bfloat16", "autocast"):
            for name, batch in batches.items():
                dtype, autocast = "bfloat16" if precision == "bfloat16" else "float32", precision == "autocast"
                settings = {"dtype": dtype, "attn_implementation": attention, "gradient_checkpointing": "selective"}

                def check(
                    settings: dict[str, Any] = settings,
                    autocast: bool = autocast,
                    name: str = name,
                    batch: PackedBatch = batch,
                ) -> dict[str, Any]:
                    optional = settings["attn_implementation"] != "sdpa"
                    settings = {"model_config": SIZES, **WINDOWS, **settings}
                    module = build_module(device, autocast=autocast, optional=optional, **settings)
                    module.backbone.load_state_dict(weights)
                    with half_precision(device, autocast=autocast):
                        actual = _run_step(module, batch_to(batch, torch.device(device)))
                    return _compare(actual, expected[name], exact=settings["dtype"] == "float32" and not autocast)

                yield f"step: {attention}, {precision}, {name}", check


def _run_step(module: LongContextLM, batch: PackedBatch) -> dict[str, Tensor]:
    """Return log-likelihoods, key tokens and gradients of a LongCE step."""
    module.zero_grad()
    short = module.short_context.score(module.backbone, batch)
    long = module.log_likelihood(batch)
    weights = module.objective(long.detach(), short, batch)
    long_cross_entropy(long, weights, batch["labels"]).backward()
    filled = short.fill_missing(long.detach())
    gradients = [parameter.grad.detach().float().cpu().flatten() for parameter in module.parameters()]
    return {
        "long": long.detach().float().cpu(),
        "short": filled.float().cpu(),
        "key": key_token_mask(long.detach(), filled, **THRESHOLDS).cpu(),
        "gradient": torch.cat(gradients),
    }


def _compare(actual: dict[str, Tensor], expected: dict[str, Tensor], *, exact: bool) -> dict[str, Any]:
    """Measure differences. In bfloat16, a rounded log-likelihood may cross a threshold: at most 1 of 10 key tokens."""
    nats = {name: (actual[name] - expected[name]).abs() for name in ("long", "short")}
    gradient = (actual["gradient"] - expected["gradient"]).norm() / expected["gradient"].norm()
    either = (actual["key"] | expected["key"]).sum().item()
    other = (actual["key"] != expected["key"]).sum().item()
    limits = (1e-3, 1e-3, 0) if exact else (0.02, 0.1, either / 10)
    mean = max(each.mean().item() for each in nats.values())
    return {
        "passed": mean <= limits[0] and gradient.item() <= limits[1] and other <= limits[2] and either > 20,
        "mean_difference_nats": mean,
        "max_difference_nats": max(each.max().item() for each in nats.values()),
        "gradient_relative_error": gradient.item(),
        "key_tokens": expected["key"].sum().item(),
        "other_key_tokens": other,
    }


# ---------------------------------------------------------------------------------------------------- kill and resume


class EpochPerBatch(LightningDataModule):
    """One random sequence per epoch, so that a run can resume after any of them."""

    @override
    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(self.trainer.current_epoch)
        batch = pack_sequence([torch.randint(SIZES["vocab_size"], (512,), generator=generator)])
        return DataLoader([batch], batch_size=None)


class LossLog(StepCheckpoint):
    """Saves the run, and writes the loss of each step to a file."""

    @override
    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *batch: Any) -> None:
        with open(Path(trainer.default_root_dir) / "losses.txt", "a") as stream:
            stream.write(f"{trainer.global_step} {outputs['loss'].item()!r}\n")
        super().on_train_batch_end(trainer, module, outputs, *batch)


def train(folder: Path, device: str) -> None:
    """Train, or resume from the newest checkpoint of the folder."""
    seed_everything(0, verbose=False)
    module = LongContextLM(model_config=SIZES, gradient_checkpointing=True, **WINDOWS)
    save = LossLog(folder, filename="step-{step}", every_n_train_steps=3, monitor="step", mode="max", save_top_k=2)
    trainer = make_trainer(folder, device, callbacks=[save], max_steps=STEPS)
    trainer.fit(module, EpochPerBatch(), ckpt_path=newest_checkpoint(folder))


def make_trainer(folder: Path, device: str, **settings: Any) -> Trainer:
    """Return a trainer that prints and logs nothing."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        default_root_dir=folder,
        plugins=[CheckedCheckpointIO()],
        reload_dataloaders_every_n_epochs=1,
        deterministic="warn",
        **quiet,
        **settings,
    )


def resume_check(device: str) -> dict[str, Any]:
    """Kill a training with SIGKILL, resume it, and compare its losses with an undisturbed run."""
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / name for name in ("undisturbed", "killed")]
        runs = [_start_training(folder, device) for folder in folders]
        deadline = time.monotonic() + 120
        while len(_read_losses(folders[1])) < 5 and runs[1].poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        runs[1].kill()
        runs[1].wait()
        killed_after = len(_read_losses(folders[1]))
        runs[1] = _start_training(folders[1], device)
        for folder, run in zip(folders, runs, strict=True):
            if code := run.wait(timeout=180):
                raise RuntimeError(f"A training ended with {code}: {(folder / 'errors.txt').read_text()[-500:]}")
        undisturbed, resumed = map(_read_losses, folders)
    difference = max(abs(loss - resumed[step]) for step, loss in undisturbed.items())
    resumes = len(undisturbed) == len(resumed) == STEPS and killed_after < STEPS
    return {"passed": resumes and difference <= 1e-5, "killed_after_step": killed_after, "loss_difference": difference}


def _start_training(folder: Path, device: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    with open(folder / "errors.txt", "w") as errors:
        command = [sys.executable, "-m", "benchmarks.gpu.checks", str(folder), device]
        return subprocess.Popen(command, stderr=errors, stdout=subprocess.DEVNULL)


def _read_losses(folder: Path) -> dict[int, float]:
    """Return the last loss of each step; a line may be incomplete."""
    file = folder / "losses.txt"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return {int(step): float(loss) for step, loss in map(str.split, lines)}


# --------------------------------------------------------------------------------------------------------- evaluators


class OneText(LightningDataModule):
    """One document as validation data."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.document = encode_document(text, tokenizer, name="text")

    @override
    def val_dataloader(self) -> DataLoader:
        return DataLoader([self.document], batch_size=None)


def evaluator_check(device: str, *, same_tokenizer: bool) -> dict[str, Any]:
    """Compare LongPPL by an evaluator, with the trained model's tokenizer or another one, to the CPU."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(1, 5))) for _ in range(90)]
    text = " ".join(generator.choices(words, k=700))
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / name for name in ("model", "evaluator")]
        for seed, folder in enumerate(folders):
            pieces = words if same_tokenizer or seed == 0 else sorted("abcdefgh")
            _save_model(folder, pieces, split=not (same_tokenizer or seed == 0), seed=seed)
        model, evaluator = folders
        values = [_validate(text, model, evaluator, where, Path(root)) for where in ("cpu", device)]
    difference = abs(values[1]["val/longppl"] / values[0]["val/longppl"] - 1)
    keys = [value["val/key_tokens"] for value in values]
    passed = difference < 1e-3 and keys[0] == keys[1] > 20
    return {"passed": passed, "relative_difference": difference, "key_tokens": keys[1], **values[1]}


def _save_model(folder: Path, pieces: list[str], *, split: bool, seed: int) -> None:
    """Save a random model with a tokenizer of words, or of characters if words are split."""
    backend = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(["?", *pieces])}, unk_token="?"))
    splits = [pre_tokenizers.WhitespaceSplit(), *([pre_tokenizers.Split(Regex("."), "isolated")] if split else [])]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {**SIZES, "vocab_size": len(pieces) + 1}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).save_pretrained(folder)


def _validate(text: str, model: Path, evaluator: Path, device: str, root: Path) -> dict[str, float]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    callback = ExternalEvaluator(str(evaluator), **WINDOWS, **THRESHOLDS, cache_dir=str(root / f"scores_{device}"))
    trainer = make_trainer(root, device, callbacks=[callback])
    trainer.validate(LongContextLM(str(model), **WINDOWS), OneText(text, tokenizer), verbose=False)
    return {name: value.item() for name, value in trainer.callback_metrics.items() if "ppl" in name or "key_t" in name}


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
