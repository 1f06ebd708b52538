"""Tokenizers of every common kind, and texts that bring out how they cover characters."""

import random

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lightning_modules.batch import with_scored

_TEXTS = {
    "english": "the report says that long context helps Alice find her old key in the harbor, didn't it? 1,234 yes",
    "latex": r"\begin{equation} \alpha_{ij} = \sum_{k=1}^{n} x_k^2 \label{eq:one} \end{equation} where $\beta$ is",
    "cjk": "今天 天気 我们 在 图书馆 読んだ 本 ですか 漢字 한국어 문장 。 、 學習 龘 靐",
    "emoji": "ok 🙂 👩‍👩‍👧‍👦 🇨🇭 party 🎉🎉 ❤️ thumbs 👍🏽 so 🫠 nice",
    "arabic": "السلام عليكم كتاب قديم في المكتبة שלום עולם ספר ישן فارسی می‌خوانم ١٢٣",
}
WORDS = {language: text.split() for language, text in _TEXTS.items()}
LANGUAGES = (*WORDS, "mixed")


def text_of(language, words=60, seed=0):
    """Words of a language in random order with white space of every kind, so that some come back from afar."""
    generator = random.Random(f"{language} {seed}")
    lexicon = [word for part in WORDS.values() for word in part] if language == "mixed" else WORDS[language]
    spaces = ["" if language == "cjk" else " ", " ", "  ", "\n", "\n\n", "\t", "   "]
    chosen = ((generator.choice(lexicon), generator.choices(spaces, [12, 4, 1, 1, 1, 1, 1])[0]) for _ in range(words))
    return "".join(word + space for word, space in chosen).strip()


def write_books(folder, **splits):
    """Write PG-19 in its original layout, of texts by split; books are numbered through all splits."""
    folder.mkdir(exist_ok=True)
    count = 0
    for split, texts in splits.items():
        (folder / split).mkdir()
        for text in texts:
            (folder / split / f"{count}.txt").write_text(text)
            count += 1
    rows = [f"{number},Book {number},1900,http://example.org\n" for number in range(count)]
    (folder / "metadata.csv").write_text("".join(rows))


def write_key_spans(path, spans):
    """Write ``[M, 2]`` character spans in the text format of the paper's authors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(";".join(f"[{start}, {end}]" for start, end in spans.tolist()))


def _corpus():
    """Half of the words only: the characters of the others are split into bytes, or unknown."""
    return [" ".join(words[::2]) * 3 for words in WORDS.values()]


def _fast(tokenizer, **special):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _byte_level(*, trim=False, roberta=False, split=None):
    tokenizer = Tokenizer(models.BPE(ignore_merges=split is not None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=roberta)
    if split is not None:
        parts = [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim), template])
    if roberta:
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=trim)
    return _fast(tokenizer, bos_token="<s>", eos_token="</s>")


def _known_words():
    """Words and letters in a fixed order: the trainers of these two kinds give another vocabulary in each process."""
    words = sorted({word for words in WORDS.values() for word in words[::2]})
    return words, sorted({letter for word in words for letter in word})


def _word_piece():
    words, letters = _known_words()
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters), *words]
    numbers = {piece: number for number, piece in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return _fast(tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


def _unigram():
    words, letters = _known_words()
    pieces = dict.fromkeys(["<unk>", "</s>", "▁", *letters, *(f"▁{word}" for word in words)])
    tokenizer = Tokenizer(models.Unigram([(piece, -10.0 / len(piece)) for piece in pieces], unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return _fast(tokenizer, unk_token="<unk>", eos_token="</s>")


def _byte_fallback():
    """Like Llama 2's: characters that are no tokens become their bytes, and spaces are letters."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizer
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=special, max_token_length=8, show_progress=False)
    trained.train_from_iterator(_corpus(), trainer)
    state = trained.model.__getstate__()
    model = models.BPE.__new__(models.BPE)
    model.__setstate__(state.replace(b'"byte_fallback":false', b'"byte_fallback":true'))
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _fast(tokenizer, unk_token="<unk>", bos_token="<s>")


TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

TOKENIZERS = {
    "byte_level": _byte_level,
    "byte_level_trimmed": lambda: _byte_level(trim=True),
    "roberta_trimmed": lambda: _byte_level(trim=True, roberta=True),
    "word_piece": _word_piece,
    "unigram": _unigram,
    "byte_fallback": _byte_fallback,
    "tiktoken": lambda: _byte_level(split=TIKTOKEN),
}


def pad_documents(rows):
    """A batch of documents, one in each sequence."""
    padded = {
        name: torch.nn.utils.rnn.pad_sequence([row[name][0] for row in rows], batch_first=True)
        for name in ("input_ids", "labels", "position_ids", "offsets")
    }
    return with_scored(padded | {name: [row[name][0] for row in rows] for name in ("document_boundaries", "text")})


def sentencepiece_like(corpus):
    """Like Llama-2's: unknown characters become bytes, and decoding drops the first space."""
    letters = sorted(set("".join(corpus)) - {" "})
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, "▁a", "an", "▁an"]
    model = models.BPE(
        {token: index for index, token in enumerate(dict.fromkeys(vocabulary))},
        [("▁", "a"), ("a", "n"), ("▁", "an")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
