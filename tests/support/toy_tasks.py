"""Tasks for tests: short, cheap to make, and for a model that guesses right sometimes right."""

from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.task import Task, place

WORDS = ("ba", "ce")


class Guess(Task):
    """A word of two, which a model may guess; it follows at once."""

    name = "guess"
    max_new_tokens = 3
    varies_depth = True

    def example(self, prompter, length, index, *, seed=0, depth=None):
        rng = self.random(length, index, seed)
        word, depth = rng.choice(WORDS), rng.random() if depth is None else depth

        def wording(count):
            lines = ["di fo gu."] * count
            lines.insert(place(depth, count), f"The word is {word}.")
            return " ".join(lines) + " What is it?", " It is"

        count = self.fit(prompter, length, wording)
        prompt, prefix = wording(count)
        return Example(
            task=self.name,
            length=length,
            index=index,
            prompt=prompt,
            answer_prefix=prefix,
            answers=(word,),
            target=f" {word}",
            max_new_tokens=self.max_new_tokens,
            match="first_word",
            depth=place(depth, count) / count,
        )


class Several(Task):
    """Two words in order, at no one depth."""

    name = "several"
    max_new_tokens = 8

    def example(self, prompter, length, index, *, seed=0, depth=None):
        words = self.random(length, index, seed).choices(WORDS, k=2)

        def wording(count):
            return "ka le " * count + f"{words[0]} {words[1]}", "\nAgain:"

        count = self.fit(prompter, length, wording)
        return Example(
            self.name, length, index, *wording(count), tuple(words), f" {words[0]} {words[1]}", self.max_new_tokens
        )


GUESS, SEVERAL = "tests.support.toy_tasks.Guess", "tests.support.toy_tasks.Several"
