"""Real models, as they are or with a limited, stretched or roughly rounded context: what the studies compare."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from benchmarks.real_models.questions import QuestionSheet
from benchmarks.real_models.texts import Text
from lightning_modules.batch import batch_to
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import DType, ModelConfig
from lightning_modules.models.loading.load import load_frozen
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.tasks.questions.prompter import ForcedAnswer, Prompter
from lightning_modules.tasks.teacher_forcing import teacher_forced
from lightning_modules.utilities.files import write_atomically, write_json

GROUP = 64
"""Weights of a row that share a scale when they are rounded."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class System:
    """A model of `fetch.MODELS`, and what was done to it without training."""

    model: str
    name: str
    context_extension: dict[str, Any] | None = field(default=None, hash=False)
    bits: int | None = None  # of the decoder's weight matrices

    @property
    def path(self) -> str:
        """Name of the system's folder."""
        return f"{self.model}/{self.name}".replace(" ", "_")


class LoadedSystem:
    """A system whose weights are loaded when something has to be scored."""

    def __init__(self, system: System, models: Path, *, dtype: DType = "float32", device: str = "cpu") -> None:
        self.system = system
        self.dtype = dtype
        self.device = device
        self.file = str(models / f"{system.model}.gguf")
        self.tokenizer = load_tokenizer(self.file)
        self._backbone: Backbone | None = None

    @property
    def backbone(self) -> Backbone:
        """The model, loaded once."""
        if self._backbone is None:
            config = ModelConfig(self.file, dtype=self.dtype, context_extension=self.system.context_extension)
            self._backbone = load_frozen(config, self.device)
            if self.system.bits is not None:
                round_weights(self._backbone, self.system.bits)
        return self._backbone

    def use(self, backbone: Backbone) -> None:
        """Score with this model, which was trained, in place of the stored one."""
        self._backbone = backbone

    @torch.no_grad()
    def log_likelihoods(self, text: Text) -> dict[str, Tensor]:
        """Return the ``[N]`` log-likelihoods of a text's tokens in nats, and their ``[N, 2]`` characters."""
        # Gemma is far worse without the special token at the front; the other tokenizers add none.
        document = encode_document(text.text, self.tokenizer, name=text.name, add_special_tokens=True)
        return {
            "log_likelihood": self.backbone(batch_to(document, self.backbone.device))[0].float().cpu(),
            "offsets": document["offsets"][0],
            "token_ids": document["input_ids"][0],
        }

    def answers(self, sheet: QuestionSheet) -> list[bool]:
        """Return which answers of a sheet consist of the likeliest tokens."""
        prompter = Prompter(self.tokenizer)
        forced: ForcedAnswer = prompter.force(sheet.document, sheet.first_prefix, sheet.target, sheet.answers)
        (scores,) = teacher_forced(self.backbone, [forced])
        return scores.right


def round_weights(backbone: Backbone, bits: int) -> None:
    """Round the decoder's weight matrices to ``2**bits`` levels per group of a row, from the smallest to the largest.

    The embedding and the head keep their weights, so that the vocabulary is not what is hurt.
    """
    levels = 2**bits - 1
    for name, module in backbone.decoder.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            weight = module.weight.detach().float()
            groups = weight.view(weight.shape[0], -1, min(GROUP, weight.shape[1]))
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            step = ((high - low) / levels).clamp(min=1e-12)
            rounded = ((groups - low) / step).round() * step + low
            module.weight.data.copy_(rounded.view_as(weight))


def score_system(
    system: System,
    models: Path,
    texts: Sequence[Text],
    sheets: Sequence[QuestionSheet],
    folder: Path,
    *,
    device: str = "cpu",
) -> None:
    """Score texts and question sheets with a system, each into its own file; those that exist are kept."""
    loaded = LoadedSystem(system, models, device=device)
    place = folder / system.path
    for text in texts:
        file = _scores_file(system, text, folder)
        if not file.exists():
            started = time.process_time()
            scores = loaded.log_likelihoods(text)
            _write_scores(file, scores)
            mean = float(scores["log_likelihood"][1:].mean())
            log.info(
                "%s, %s: %.3f nats a token, %.0f CPU s", system.path, text.name, mean, time.process_time() - started
            )
    for sheet in sheets:
        file = place / f"{sheet.name.replace(' ', '_')}.json"
        if not file.exists():
            started = time.process_time()
            right = loaded.answers(sheet)
            write_json(file, {"right": right})
            log.info(
                "%s, %s: %d of %d, %.0f CPU s",
                system.path,
                sheet.name,
                sum(right),
                len(right),
                time.process_time() - started,
            )


def reuse_scores(system: System, texts: Sequence[Text], scores: dict[str, TokenScores], folder: Path) -> None:
    """Store the long-context scores of an evaluator, by the text's name, as those of the same model as a system."""
    for text in texts:
        found = scores[text.name]
        tensors = {"log_likelihood": found.long.float(), "offsets": found.offsets, "token_ids": found.token_ids}
        _write_scores(_scores_file(system, text, folder), tensors)


def _write_scores(file: Path, scores: dict[str, Tensor]) -> None:
    write_atomically(file, save({name: values.contiguous() for name, values in scores.items()}))


def _scores_file(system: System, text: Text, folder: Path) -> Path:
    return folder / system.path / f"{text.name.replace(' ', '_')}.safetensors"


def read_scores(system: System, text: Text, folder: Path) -> dict[str, Tensor]:
    """Return what `score_system` stored of a text."""
    return load_file(_scores_file(system, text, folder))


def read_answers(system: System, sheet: str, folder: Path) -> list[bool]:
    """Return which answers of a sheet, given by name, were right."""
    return json.loads((folder / system.path / f"{sheet.replace(' ', '_')}.json").read_text())["right"]
