"""Lost in the Middle's key-value retrieval: one value out of a long JSON object."""

from typing import Literal

from typing_extensions import override

from lightning_modules.tasks.questions.haystacks import Drawn
from lightning_modules.tasks.questions.task import Draft, FittedTask, Request, place
from lightning_modules.tasks.questions.words import uuid

Query = Literal["before", "after", "both"]

INSTRUCTION = "Extract the value corresponding to the specified key in the JSON object below.\n\n"


class KeyValues(FittedTask):
    """Which value has this key in the JSON object?

    Key-value retrieval of *Lost in the Middle* (Liu et al. 2023, section 3, https://arxiv.org/abs/2307.03172), with the
    words of its public code: keys and values are UUIDs, and the answer is right if it holds the value, ignoring case.
    Unlike there, the budget decides the number of pairs, instead of 75, 140 or 300 fixed ones, and the place of the
    pair is given as a depth.

    Args:
        query: Where the key is asked for: ``after`` the object, as the paper does by default; ``both`` before and after
            it, its query-aware contextualization; or only ``before`` it, which is not in the paper.
    """

    max_new_tokens = 100
    varies_depth = True

    def __init__(self, query: Query = "after") -> None:
        if query not in ("before", "after", "both"):
            raise ValueError(f"`query` is where the key is asked for: before, after or both, got '{query}'.")
        self.query = query
        self.name = "key_values" if query == "after" else f"key_values_query_{query}"

    @override
    def draft(self, asked: Request) -> Draft:
        rng = asked.rng
        key, value, drawn_depth = uuid(rng), uuid(rng), rng.random()
        depth = drawn_depth if asked.depth is None else asked.depth
        others = Drawn(lambda: f'"{uuid(rng)}": "{uuid(rng)}"')
        question = f'Key: "{key}"\n'
        before = "" if self.query == "after" else f"{question}\n"
        after = "" if self.query == "before" else question

        def wording(count: int) -> tuple[str, str]:
            pairs = others.first(count)
            pairs.insert(place(depth, count), f'"{key}": "{value}"')
            data = "{" + ",\n ".join(pairs) + "}"
            return f"{INSTRUCTION}{before}JSON data:\n{data}\n\n{after}Corresponding value:", ""

        return Draft(wording, (value,), f' "{value}', "any", depth=lambda count: place(depth, count) / count)
