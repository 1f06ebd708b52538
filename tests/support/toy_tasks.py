"""Tasks for tests: short, cheap to make, and for a model that guesses right sometimes right."""

from lightning_modules.tasks.questions.task import Draft, FittedTask, place

WORDS = ("ba", "ce")


class Guess(FittedTask):
    """A word of two, which a model may guess; it follows at once."""

    name = "guess"
    max_new_tokens = 3
    varies_depth = True

    def draft(self, asked):
        word = asked.rng.choice(WORDS)
        depth = asked.rng.random() if asked.depth is None else asked.depth

        def wording(count):
            lines = ["di fo gu."] * count
            lines.insert(place(depth, count), f"The word is {word}.")
            return " ".join(lines) + " What is it?", " It is"

        return Draft(wording, (word,), f" {word}", "first_word", depth=lambda count: place(depth, count) / count)


class Several(FittedTask):
    """Two words in order, at no one depth."""

    name = "several"
    max_new_tokens = 8

    def draft(self, asked):
        words = asked.rng.choices(WORDS, k=2)

        def wording(count):
            return "ka le " * count + f"{words[0]} {words[1]}", "\nAgain:"

        return Draft(wording, tuple(words), f" {words[0]} {words[1]}")


GUESS, SEVERAL = "tests.support.toy_tasks.Guess", "tests.support.toy_tasks.Several"
