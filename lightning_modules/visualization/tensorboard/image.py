"""A document as a picture: tokens coloured by what the long context does for them, key tokens in boxes."""

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lightning_modules.visualization.tensorboard.scored_document import ScoredDocument, printable

WIDTH, MARGIN, LINE, SIZE = 1000, 16, 23, 15
MOST_LINES = 80
FULL = 4.0
"""Long-short difference of the strongest colour, in nats."""

_HELPED, _HARMED = np.array([240, 120, 20]), np.array([40, 110, 200])  # told apart by colour-blind people, too
_INK, _GREY, _BOX = (25, 25, 25), (120, 120, 120), (150, 0, 60)


def token_image(document: ScoredDocument, *, tokens: int, title: str) -> np.ndarray:
    """The parts of a document around its key tokens, as an image.

    Its font has Latin, Greek and Cyrillic letters, and a box for others.

    Args:
        document: With the scores of one model.
        tokens: Of all parts together, at most; no more than 80 lines are drawn.
        title: What stands above.

    Returns:
        ``[height, 1000, 3]`` uint8.
    """
    lines = _lines(document, document.excerpts(tokens))
    height = 2 * MARGIN + (len(lines) + 2) * LINE
    image = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, MARGIN), printable(title), fill=_INK, font=_font("DejaVuSans-Bold.ttf", SIZE))
    _draw_legend(draw, MARGIN + LINE)
    for number, line in enumerate(lines, start=2):
        _draw_line(draw, document, line, MARGIN + number * LINE)
    return np.asarray(image)


_Word = tuple[int | None, str, float]
"""Index of the token (None for what is none), its characters, and where on the line they begin."""


class _Page:
    """Lines of words, broken where one is full or the text has a break."""

    def __init__(self) -> None:
        self.lines: list[list[_Word]] = []
        self._line: list[_Word] = []
        self._x = float(MARGIN)

    def put(self, owner: int | None, text: str) -> None:
        """Characters of a token, or those between two tokens."""
        breaks, text = "\n" in text, printable(text.replace("\n", " "))
        if self._line and self._x + _length(text) > WIDTH - MARGIN:
            self.end_line()
            text = text.lstrip()
        if text:
            self._line.append((owner, text, self._x))
            self._x += _length(text)
        if breaks:
            self.end_line()

    def end_line(self) -> None:
        """Begin a new one, unless this one is empty."""
        if self._line:
            self.lines.append(self._line)
        self._line, self._x = [], float(MARGIN)


def _lines(document: ScoredDocument, parts: list[tuple[int, int]]) -> list[list[_Word]]:
    page = _Page()
    for start, stop in parts:
        if len(parts) > 1:
            page.put(None, f"tokens {start:,} to {stop - 1:,}\n")
        for index, gap, piece in document.pieces(start, stop):
            page.put(None, gap)
            page.put(index, piece)
        page.end_line()
    cut = page.lines[:MOST_LINES]
    return cut if len(cut) == len(page.lines) else [*cut, [(None, "..", float(MARGIN))]]


def _draw_line(draw: ImageDraw.ImageDraw, document: ScoredDocument, line: list[_Word], y: int) -> None:
    for index, text, x in line:
        # Spaces before and after are not coloured: the eye looks for words.
        if index is not None and (word := text.strip()):
            left = x + _length(text[: text.index(word)])
            box = (left - 1, y, left + _length(word), y + LINE - 3)
            key = bool(document.key[index])
            colours: dict[str, Any] = {"outline": _BOX, "width": 2} if key else {}
            draw.rounded_rectangle(box, radius=3 if key else 0, fill=_colour(float(document.lsd[index])), **colours)
    ink = _GREY if all(index is None for index, *_ in line) else _INK
    draw.text((MARGIN, y + 2), "".join(text for _, text, _ in line), fill=ink, font=_font("DejaVuSans.ttf", SIZE))


def _draw_legend(draw: ImageDraw.ImageDraw, y: int) -> None:
    font = _font("DejaVuSans.ttf", SIZE - 3)
    x = float(MARGIN)
    draw.text((x, y + 3), "LSD in nats:", fill=_GREY, font=font)
    x += 84
    for value in (-4, -2, -1, 0, 1, 2, 4):
        text = f"{value:+d}" if value else "0"
        draw.rectangle((x, y + 1, x + 30, y + 18), fill=_colour(value), outline=(225, 225, 225))
        draw.text((x + 15, y + 3), text, fill=_INK, font=font, anchor="ma")
        x += 31
    draw.rounded_rectangle((x + 14, y + 1, x + 84, y + 18), radius=3, outline=_BOX, width=2)
    draw.text((x + 49, y + 3), "key token", fill=_INK, font=font, anchor="ma")


def _colour(lsd: float) -> tuple[int, ...]:
    strength = min(abs(lsd) / FULL, 1.0) * 0.85
    end = _HELPED if lsd > 0 else _HARMED
    return tuple(int(part) for part in 255 * (1 - strength) + end * strength)


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)  # 10 times as fast as the other


@lru_cache(maxsize=2**14)
def _length(text: str) -> float:
    """Of a line of text, in pixels."""
    return _font("DejaVuSans.ttf", SIZE).getlength(text)
