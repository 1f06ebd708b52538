"""Tokenizers of three kinds, and readers who answer from the prompt alone, written without a look at the generators."""

import random
import re
from collections import Counter

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightning_modules.tasks.questions.prompter import Prompter
from tests.conftest import byte_level_tokenizer


def prompters(corpus):
    """A byte-level BPE that begins with a special token, whole words, and single characters."""
    word_level = Tokenizer(models.WordLevel(unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    word_level.train_from_iterator(corpus, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    characters = Tokenizer(models.BPE())
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    nothing = trainers.BpeTrainer(vocab_size=len(alphabet), initial_alphabet=alphabet, show_progress=False)
    characters.train_from_iterator([], nothing)
    return {
        "bytes": Prompter(byte_level_tokenizer(corpus, vocab_size=600)),
        "words": Prompter(PreTrainedTokenizerFast(tokenizer_object=word_level, unk_token="<unk>")),
        "characters": Prompter(PreTrainedTokenizerFast(tokenizer_object=characters)),
    }


def track_variables(prompt):
    """Follows every assignment of the last text."""
    text = prompt[prompt.rindex("Memorize and track") :]
    asked = re.search(r"assigned the value (\d+) in the text above\.$", text)[1]
    values = {}
    for name, value in re.findall(r"^VAR ([A-Z]+) = (?:VAR )?(\w+) ?$", text, re.MULTILINE):
        values[name] = values.get(value, value)
    return " ".join(name for name, value in values.items() if value == asked)


def count_words(prompt):
    """The ten most common words of the last list, numbered."""
    text = prompt[prompt.rindex("Below is a numbered list") :]
    counts = Counter(re.findall(r"\d+\. (\S+)", text))
    return " ".join(f"{n}. {word}" for n, (word, _) in enumerate(counts.most_common(10), 1))


def count_coded_words(prompt):
    """The three most frequent coded words."""
    text = re.search(r"most frequently appeared coded words\. (.*)\nQuestion: ", prompt)[1]
    return ", ".join(word for word, _ in Counter(text.split()).most_common(4) if word != "...")


def read_lives(prompt):
    """Finds the life of whom the question names, and in it what is asked."""
    question = re.search(r"Question: (.*)\n", prompt)[1]
    name = re.search(r"[A-Z]\w+ [A-Z]\w+", question)[0]
    life = re.search(rf"\(Title: {name}\) (.*)\n", prompt)[1]
    kinds = {"town": r"the town of (\w+)", "ship": r"on the (\w+), a ship", "taught": r"was taught by (\w+)"}
    return next(re.search(pattern, life)[1] for kind, pattern in kinds.items() if kind in question)


def squad_file(articles=8, paragraphs=6):
    """SQuAD in miniature: of each paragraph one thing can be asked."""
    rng = random.Random(0)
    data = []
    for article in range(articles):
        made = []
        for paragraph in range(paragraphs):
            key, value = f"item{article}x{paragraph}", f"colour{rng.randrange(10**6)}"
            filler = " ".join(rng.choices(["sea", "wind", "rope", "night", "city"], k=20 + 3 * paragraph))
            asked = [
                {"question": f"What colour is {key}?", "answers": [{"text": value}, {"text": f"the {value}"}]},
                {"question": f"How heavy is {key}?", "answers": [], "is_impossible": True},
            ]
            made.append({"context": f"About {filler}. The colour of {key} is {value}.", "qas": asked})
        data.append({"title": f"Article {article}", "paragraphs": made})
    return {"version": "v2.0", "data": data}


def hotpot_file(questions=12):
    """HotpotQA in miniature: the answer takes two of ten documents."""
    rng = random.Random(1)
    made = []
    for number in range(questions):
        colour = f"colour{rng.randrange(10**6)}"
        context = [
            [f"Owner {number}", [f"Owner {number} keeps bird{number}.", " It sings."]],
            [f"Bird {number}", [f"The colour of bird{number} is {colour}."]],
            *[[f"Other {number} {other}", ["It says nothing.", " Nor does this."]] for other in range(8)],
        ]
        question = f"What colour is the bird of Owner {number}?"
        made.append({"question": question, "answer": colour, "context": context})
    return made


def nq_open_record(number, distractors=5):
    """A question of Lost in the Middle in miniature; the gold passage stands in the middle of the file's list."""
    found = [
        {"title": f"Distractor {number} {n}", "text": f"A wind blew in the {n}.", "hasanswer": False, "isgold": False}
        for n in range(distractors)
    ]
    gold = {"title": f"Gold {number}", "text": f"The Dr. Who of {number} is Winner{number}.", "hasanswer": True}
    found.insert(2, {**gold, "isgold": True})
    return {"question": f"who is the dr who of {number}", "answers": [f"Winner{number}"], "ctxs": found}
