"""The words of reports: one-line templates. `finalize` formats every number and escapes every name.

    {{ accuracy }}                    an Estimate: "83.7 % (83.2 to 84.1, n = 300)"
    {{ share|percent }}               "45 %"
    {{ gain|points }}                 a difference of fractions: "3.1 points (1.0 to 5.2, n = 300)"
    {{ heads|names }} {{ heads|are }} "**L0.H1** and **L0.H3** are"
    {{ labels|counts }}               a mapping from names to numbers: "9 mixed, 5 uniform"
    {{ p|frequency }}                 a p-value: "about 5 of 1,000"
    {{ note|whole }}                  a remark of a measurement, escaped and not shortened

A template may only test if a value exists, and count values. Arithmetic and rules are in Python
(tests/contracts/test_sections.py).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import lru_cache, partial
from typing import Any, Final

from jinja2 import Environment, StrictUndefined, Template

from vitlens.display import protected, shorten, visible
from vitlens.report.numbers import frequency, in_ranges, in_words, number, percent
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond, in_points

NAMED: Final = 5  # most names of a list in a sentence


class Marked(str):
    """Text that vitlens wrote, with **bold** and `code`, which is not escaped again."""

    __slots__ = ()


def say(template: str, **values: Any) -> str:
    """Fill a template and return it as one line."""
    return " ".join(_template(template).render(**values).split())


def finalize(value: Any) -> str:
    """Format a value for a sentence: numbers in words, names escaped, None as a dash."""
    if isinstance(value, Marked):
        return value
    if value is None or isinstance(value, Estimate | int | float):
        return in_words(value)
    return protected(shorten(visible(str(value))))


def names(values: Iterable[Any], most: int = NAMED) -> Marked:
    """Return values, or rows by their `name`, in bold: "**L0.H1**, **L2.H3** and 2 more"."""
    in_bold = [f"**{finalize(getattr(value, 'name', value))}**" for value in values]
    parts = in_bold[:most]
    if len(in_bold) > most:
        parts.append(f"{len(in_bold) - most} more")
    return listed(parts)


def listed(parts: Sequence[str], word: str = "and") -> Marked:
    """Join finished parts: "a, b and c", or "a, 1; b, 2; and c" if a part has a comma."""
    if len(parts) < 3:
        return Marked(f" {word} ".join(parts) or "none")
    if any(", " in part for part in parts):
        return Marked(f"{'; '.join(parts[:-1])}; {word} {parts[-1]}")
    return Marked(f"{', '.join(parts[:-1])} {word} {parts[-1]}")


def counts(numbers: Mapping[str, int]) -> Marked:
    """Return counts with their names, the highest first: "9 mixed, 5 uniform"."""
    ordered = sorted(numbers.items(), key=lambda name_and_count: -name_and_count[1])
    return Marked(", ".join(f"{count} {finalize(name)}" for name, count in ordered))


def value_of(estimate: Estimate | None, digits: int | None = None) -> str:
    """Return an estimate without its interval: "93.1 %"."""
    if estimate is None:
        return in_words(None)
    if estimate.unit == "fraction" and digits is not None:
        return percent(estimate.value, digits)
    return in_words(Estimate(estimate.value, unit=estimate.unit))


def _by_count(singular: str, plural: str) -> Callable[[Sized | int], str]:
    """Return a filter that chooses a word by a number, or by the length of a collection."""

    def choose(value: Sized | int) -> str:
        count = value if isinstance(value, int) else len(value)
        return singular if count == 1 else plural

    return choose


def borderline(difference: Estimate, p: float) -> Marked:
    """Return a remark if an interval and a test of the same difference disagree, else "".

    p: the p-value of the test, which is exact or corrected and therefore decides.
    """
    excludes_zero = beyond(difference, 0.0) is not Side.UNDECIDED
    if difference.low is None or excludes_zero == (p <= LEVEL):
        return Marked("")
    if excludes_zero:
        return Marked(" (borderline: the interval excludes 0, the test does not)")
    return Marked(" (borderline: the test excludes 0, the interval does not)")


_FILTERS: Final = {
    "alone": partial(in_words, with_n=False),
    "are": _by_count("is", "are"),
    "borderline": borderline,
    "counts": counts,
    "frequency": frequency,
    "have": _by_count("has", "have"),
    "names": names,
    "number": number,
    "percent": percent,
    "points": in_points,
    "ranges": in_ranges,
    "s": _by_count("", "s"),
    "value": value_of,
    "whole": lambda text: Marked(protected(visible(str(text)))),
}


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Return the one environment of all templates."""
    templates = Environment(undefined=StrictUndefined, finalize=finalize, autoescape=False)
    templates.filters.update(_FILTERS)
    return templates


@lru_cache(maxsize=1024)
def _template(text: str) -> Template:
    return environment().from_string(text)
