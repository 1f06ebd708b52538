"""Models in the GGUF files of llama.cpp: each is converted once, into a folder that transformers loads."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_modules.models.loading.config import is_gguf, local_or_hub
from lightning_modules.utilities.files import atomic_folder, default_cache_dir, writable_folder
from lightning_modules.utilities.identity import content_hash
from lightning_modules.utilities.locks import exclusive

FORMAT = 1
"""Version of the conversion: a folder of another version is not used."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16}
"""Dtype of the converted weights by the type of most of them. Quantized ones are rounded to bfloat16, which
changes them by a tenth of the error of 4 bits or less."""

_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Tokenizers of llama.cpp (``tokenizer.ggml.pre``) that split numbers into digits, then by the rule of GPT-2.

transformers does not know this, and then does not merge the white space before a number (``"\\n\\n1"``).
"""

_AS_GPT2 = frozenset({"default", "gpt-2", "mpt", "olmo", "jais", "trillion"})
"""Tokenizers with GPT-2's rule, which transformers uses for all that it does not know."""

_SCALING = {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "finetuned")}
"""Values of a scaled RoPE that are understood. Others, such as DeepSeek's, change the attention's scale."""

_LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}

log = logging.getLogger(__name__)


def model_folder(path_or_id: str, kind: str = "model") -> str:
    """Return the local folder or the hub id of a model or tokenizer; a GGUF file is converted into a folder first."""
    path = local_or_hub(path_or_id, kind)
    return str(convert_gguf(Path(path))) if is_gguf(path) else path


def convert_gguf(file: Path) -> Path:
    """Convert a GGUF file into a folder with config, weights and tokenizer, once, and return the folder.

    It is in ``$LONGCE_CACHE/gguf`` and has 2 bytes per parameter, because quantized weights become bfloat16. Converting
    takes 7 to 12 bytes of main memory per parameter (0.6 and 0.3 billion parameters).

    Raises:
        ValueError: If the file is incomplete, split, or not understood by transformers in every part.
    """
    folder = writable_folder(default_cache_dir() / "gguf") / f"{content_hash(file)}-{FORMAT}"
    # Several processes of a run may start at once; one of them converts.
    with exclusive(folder):
        if not folder.is_dir():
            with atomic_folder(folder) as building:
                _convert(file, building)
    return folder


def _convert(file: Path, folder: Path) -> None:
    reader, values, tensors = _read_header(file)
    # Norms are always float32, so the type of most parameters decides.
    dtype = _DTYPES.get(max(tensors.kinds, key=lambda kind: tensors.kinds[kind], default=""), torch.bfloat16)
    size = file.stat().st_size / 1e9
    log.info("Converting '%s' (%.1f GB) once, into %s: this takes a minute or two per GB.", file, size, folder.parent)
    try:
        # A folder, because transformers also reads a config.json beside the file.
        with TemporaryDirectory() as place, _parsed_once(file, reader):
            (Path(place) / file.name).symlink_to(file.resolve())
            settings: dict[str, Any] = {"gguf_file": file.name}
            tokenizer = AutoTokenizer.from_pretrained(place, **settings)
            if (gguf_config := getattr(transformers, "GgufConfig", None)) is not None:  # not in older versions
                settings["quantization_config"] = gguf_config(dequantize=True)  # otherwise packed, for its GPU kernels
            model, report = AutoModelForCausalLM.from_pretrained(
                place, **settings, dtype=dtype, output_loading_info=True
            )
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # any kind, for an architecture or a quantization that it does not know
        reason = str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
        raise ValueError(
            f"transformers cannot read '{file}': {reason} Use the model's folder of the Hugging Face hub instead."
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"'{file}' lacks {len(missing)} tensors ({', '.join(missing[:3])}, ..): download it again, or join parts by"
            " `llama-gguf-split --merge`."
        )
    _set_rope(model.config, values, tensors, file)
    _restore_digits(tokenizer, values, file)
    # Otherwise transformers takes the weights for quantized ones, and refuses to save them.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _parsed_once(file: Path, reader: Any) -> Iterator[None]:
    """Let transformers use the reader of a file, which it would parse three times, each in 20 s for Gemma."""
    import gguf

    original = gguf.GGUFReader

    def read(path: Any, *arguments: Any, **options: Any) -> Any:
        return reader if Path(path).resolve() == file.resolve() else original(path, *arguments, **options)

    gguf.GGUFReader = read
    try:
        yield
    finally:
        gguf.GGUFReader = original


class _Tensors:
    """Names, types and number of the parameters of a GGUF file, and its factors of the RoPE frequencies."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self.kinds: Counter[str] = Counter()
        self.rope: dict[str, torch.Tensor] = {}
        for tensor in tensors:
            self.kinds[tensor.tensor_type.name] += int(tensor.n_elements)
            if tensor.name.startswith("rope_"):
                self.rope[tensor.name] = torch.from_numpy(tensor.data.astype("float32"))
        self.parameters = self.kinds.total()


def _read_header(file: Path) -> tuple[Any, dict[str, Any], _Tensors]:
    """Return the parsed file, its scalar values without their architecture's name, and facts about its tensors."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ValueError(
            f"'{file}' is a GGUF file, which needs the extra `gguf`: pip install -c constraints.txt -e '.[gguf]'."
        ) from error
    try:
        reader = GGUFReader(file)
        found = {name: field.contents() for name, field in reader.fields.items() if len(field.types) == 1}
        tensors = _Tensors(reader.tensors)
    except Exception as error:  # any kind, for a file that is cut or something else
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"'{file}' is not a complete GGUF file ({reason:.200}): download it again.") from error
    if found.get("split.count", 1) > 1 or not tensors.parameters:
        raise ValueError(
            f"'{file}' has a part of a model, or only its vocabulary: join the parts by `llama-gguf-split --merge`, or"
            " name the file of the model."
        )
    prefix = f"{found.get('general.architecture')}."
    return reader, {name.removeprefix(prefix): value for name, value in found.items()}, tensors


def _set_rope(config: PreTrainedConfig, values: Mapping[str, Any], tensors: _Tensors, file: Path) -> None:
    """Set the scaled frequencies of a model's RoPE, which transformers does not read from a GGUF file."""
    kind = values.get("rope.scaling.type", "none")
    if values.get("general.architecture") == "gpt-oss" or (kind == "none" and not tensors.rope):
        return  # transformers reads it for this one
    parameters = config.rope_parameters or {}
    scaled = parameters.get("full_attention", parameters)  # that of Gemma 3; its local layers are not scaled
    original = values.get("rope.scaling.original_context_length")
    others = {name for name in values if name.startswith("rope.scaling.")} - _SCALING
    if kind in ("linear", "yarn") and not tensors.rope and not others:
        scaled |= {"rope_type": kind, "factor": float(values["rope.scaling.factor"])}
        scaled |= {"original_max_position_embeddings": original} if kind == "yarn" else {}
        return
    if tensors.rope.keys() == {"rope_freqs.weight"}:
        factors = tensors.rope["rope_freqs.weight"]
        scaled |= {**_LLAMA_3, "factor": float(factors.max()), "original_max_position_embeddings": original or 8192}
        width = 2 * len(factors)
        # Llama 3 files have no parameters, only factors, so compare them with those of the parameters.
        unscaled = 1 / scaled["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if frequencies.shape == unscaled.shape and torch.allclose(unscaled / frequencies, factors, rtol=1e-3):
            return
    found = ", ".join([kind, *sorted(others), *tensors.rope])
    raise ValueError(
        f"'{file}' scales RoPE by {found}, which transformers does not read from GGUF files: its long contexts would be"
        " wrong. Use the model's folder of the Hugging Face hub instead."
    )


def _restore_digits(tokenizer: PreTrainedTokenizerFast, values: Mapping[str, Any], file: Path) -> None:
    """Split numbers into digits if the original tokenizer does; warn of a rule that nobody has compared."""
    rule = values.get("tokenizer.ggml.pre", "default")
    known = not isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel)
    if values.get("tokenizer.ggml.model") != "gpt2" or rule in _AS_GPT2 or known:
        return
    if rule not in _DIGITS:
        log.warning(
            "'%s' splits text by the rule '%s', which transformers does not know: its tokens may differ from those that"
            " the model was trained on. Name the original tokenizer (`--model_tokenizer`, `--evaluator_tokenizer`).",
            file,
            rule,
        )
        return
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
