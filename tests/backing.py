"""Whether the sentences of a report are backed: results name their rows, and their numbers stand in these rows."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from decimal import Decimal
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.report.document import Document, Sentence

# what is no measured number: code, epsilons' denominators, citations, the level of intervals, names of layers and heads
_NO_NUMBERS: Final = re.compile(
    r"`[^`]*`|/255|\([^()]*\b(19|20)\d\d\b[^()]*\)|95 %|(?<!\w)[A-Za-z][\w-]*\d[\w-]*(\.H\d+)?"
)
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
_TIME: Final = re.compile(r"(\d+) (min|h) (\d+) (s|min)\b")  # of report/numbers.in_time
_SCALES: Final = (1.0, 100.0, 255.0)  # a fraction is printed in per cent, an epsilon in 255ths


def unbacked(document: Document) -> Iterator[str]:
    """The result sentences without rows, and the numbers that none of a sentence's rows hold; one line each."""
    parts = [*document.preface, *document.limits, *(each.claim for each in document.findings)]
    parts += [each for section in (*document.sections, *document.appendix) for each in section.sentences]
    for sentence in parts:
        if sentence.says == "result":
            yield from _unbacked(sentence)


def _unbacked(sentence: Sentence) -> Iterator[str]:
    if not sentence.rows:
        yield f"no rows: {sentence.text}"
        return
    held, words = _held(sentence.rows)
    text = sentence.text
    for word in sorted(words, key=len, reverse=True):  # names of classes and methods may hold digits
        text = _without(text, word)
    for time in _TIME.finditer(text):
        first, last = int(time[1]), int(time[3])
        low, high = 60 * first + last - 0.5, 60 * first + last + 0.5
        if time[2] == "h":  # minutes are rounded down
            low, high = 60 * (60 * first + last) - 0.5, 60 * (60 * first + last + 1) - 0.5
        if not bool(((held >= low) & (held <= high)).any()):
            yield f"{time[0]} stands in none of its rows: {sentence.text}"
    text = _TIME.sub("", text)
    for printed in _NUMBER.findall(_NO_NUMBERS.sub("", text)):
        number = Decimal(printed.replace(",", ""))
        counted = number == int(number) and 0 <= number <= len(sentence.rows)
        if not counted and not _near(number, held):
            yield f"{printed} stands in none of its rows: {sentence.text}"


def _without(text: str, name: str) -> str:
    """A text without a name; one of a single character, as of the digits' classes, is removed only where it stands
    alone."""
    if len(name) > 1:
        return text.replace(name, "")
    return re.sub(rf"(?<![\w.,]){re.escape(name)}(?!\w|[.,]\d)", "", text) if name else text


def _near(number: Decimal, held: NDArray[np.float64]) -> bool:
    """Whether a number is one of these but for its sign, rounded as it is printed."""
    step = 10.0 ** int(number.as_tuple().exponent)
    return bool((np.abs(np.abs(held) - abs(float(number))) <= 0.5001 * step).any())


def _held(rows: object) -> tuple[NDArray[np.float64], set[str]]:
    """All numbers in these rows, at every scale, and all texts."""
    numbers: list[float] = []
    words: set[str] = set()
    waiting = [rows]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            words.add(each)
        elif isinstance(each, (bool, int, float, np.number)):
            numbers.append(float(each))
        elif is_dataclass(each) and not isinstance(each, type):
            waiting += [getattr(each, field.name) for field in fields(each)]
        elif isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, (tuple, list)):
            waiting += each
        elif isinstance(each, np.ndarray):
            numbers += each.astype(float).ravel().tolist()
    return np.array([scale * number for number in numbers for scale in _SCALES]), words
