"""How many pieces of text fill a budget of tokens."""

from collections.abc import Callable

SPARE = 1000
"""Pieces beyond one per token, behind which a text is given up that hardly grows: it would do so for ever."""


def most_units(
    tokens: Callable[[int], int], limit: int, *, least: int = 1, most: int | None = None, guess: int | None = None
) -> int:
    """The largest number of pieces whose text has at most ``limit`` tokens.

    As tokens grow about linearly with the pieces, interpolation finds the number in a handful of tries, each of which
    tokenises the whole text.

    Args:
        tokens: Tokens of the text of that many pieces; must not fall when pieces are added.
        limit: Tokens to fill.
        least: Fewest pieces that make sense.
        most: All pieces that there are; without it there are as many as one likes.
        guess: About how many it will be.

    Returns:
        A number ``n >= least`` with ``tokens(n) <= limit < tokens(n + 1)``, or ``most`` if all pieces fit.

    Raises:
        ValueError: If not even ``least`` pieces fit, or the text hardly grows with its pieces.

    Example:
        >>> most_units(lambda n: 10 + 7 * n, 100)
        12
    """
    low, low_tokens = least, tokens(least)
    if low_tokens > limit:
        raise ValueError(f"The shortest question takes {low_tokens} tokens, more than {limit}.")
    high, high_tokens = 0, 0  # the fewest pieces known to be too many, once there are any
    step = max(1, guess - low if guess is not None else low)
    while high == 0:
        if low == most:
            return low
        tried = low + step if most is None else min(low + step, most)
        count = tokens(tried)
        if count > limit:
            high, high_tokens = tried, count
        else:
            rate = (count - low_tokens) / (tried - low)
            low, low_tokens = tried, count
            if low - least > limit + SPARE:
                raise ValueError(
                    f"{low:,} pieces of text are only {count:,} tokens: the tokenizer does not tell them apart."
                )
            step = max(1, 2 * step if rate <= 0 else min(100 * step, int((limit - count) / rate) + 1))
    halve = False
    while high - low > 1:
        share = 0.5 if halve else (limit - low_tokens) / (high_tokens - low_tokens)
        tried = min(high - 1, max(low + 1, low + round(share * (high - low))))
        count = tokens(tried)
        halve = not halve  # interpolation alone may creep towards one end
        if count > limit:
            high, high_tokens = tried, count
        else:
            low, low_tokens = tried, count
    return low
