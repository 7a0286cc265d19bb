"""Pieces of the page's HTML; every name is escaped, every picture has an alternative text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from vitlens.demo.pictures import Example
from vitlens.display import visible
from vitlens.report.html import pictures
from vitlens.report.numbers import percent


@dataclass(frozen=True)
class Card:
    """A picture with a caption. pixels: (height, width, 3), in [0, 1] or uint8; alt: what it shows, in words."""

    pixels: NDArray[np.floating] | NDArray[np.uint8]
    caption: str
    alt: str
    note: str = ""


@dataclass(frozen=True)
class Share:
    """A class with its probability, and where something was changed its probability after that."""

    name: str
    probability: float
    after: float | None = None


def sentence(text: str, kind: str = "") -> Markup:
    """A paragraph; kind: "warning" or "quiet"."""
    return Markup('<p class="vl-say {}">{}</p>').format(kind, visible(text))


def said(text: str) -> Markup:
    """A paragraph that a screen reader reads when it changes."""
    return Markup('<p class="vl-say" role="status" aria-live="polite">{}</p>').format(visible(text))


def badge(words: str, state: str) -> Markup:
    """A short mark; state: of a verdict, "pass", "warn", "fail" or "inconclusive", or "not tested"."""
    return Markup('<span class="vl-badge vl-{}">{}</span>').format(state.replace(" ", "-"), words)


def cards(shown: Iterable[Card], *, large: bool = False) -> Markup:
    """Pictures beside each other, as many as there is room for."""
    kind = "vl-cards vl-large" if large else "vl-cards"
    return Markup('<div class="{}">{}</div>').format(kind, Markup("").join(map(_card, shown)))


def beside(*parts: Markup) -> Markup:
    """Parts beside each other where there is room."""
    return Markup('<div class="vl-beside">{}</div>').format(Markup("").join(parts))


def as_bytes(pixels: NDArray[np.floating] | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pixels as uint8."""
    if pixels.dtype == np.uint8:
        return pixels  # type: ignore[return-value]
    return np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)


def _card(card: Card) -> Markup:
    embedded = pictures.photograph(as_bytes(card.pixels))
    return Markup(
        '<figure class="vl-card"><img src="{}" alt="{}" width="{}" height="{}">'
        "<figcaption><strong>{}</strong> {}</figcaption></figure>"
    ).format(
        embedded.uri, visible(card.alt), embedded.width, embedded.height, visible(card.caption), visible(card.note)
    )


def classes_table(shares: Sequence[Share], caption: str) -> Markup:
    """Classes with their probabilities as bars; before and after where something was changed."""
    changed = any(each.after is not None for each in shares)
    heads = ("class", "before", "after") if changed else ("class", "probability")
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(each) for each in heads)
    rows = Markup("").join(map(_row, shares))
    return Markup(
        '<table class="vl-classes"><caption>{}</caption><thead><tr>{}</tr></thead><tbody>{}</tbody></table>'
    ).format(caption, head, rows)


def _row(share: Share) -> Markup:
    values = [share.probability, *([] if share.after is None else [share.after])]
    cells = Markup("").join(
        Markup('<td><span class="vl-bar" style="--share:{:.4f}"></span>{}</td>').format(value, percent(value, 1))
        for value in values
    )
    return Markup('<tr><th scope="row">{}</th>{}</tr>').format(visible(share.name), cells)


def examples_html(examples: Sequence[Example]) -> str:
    """A row of buttons, one for each example."""
    buttons = Markup("").join(
        Markup(
            '<button type="button" class="vl-example" data-example="{}" title="{}" aria-label="take the example {}">'
            '<img src="{}" alt=""></button>'
        ).format(number, visible(each.name), visible(each.name), pictures.photograph(_small(each), most=96).uri)
        for number, each in enumerate(examples)
    )
    return str(Markup('<div class="vl-examples" role="group" aria-label="Examples">{}</div>').format(buttons))


def _small(example: Example) -> NDArray[np.uint8]:
    return np.asarray(example.image.convert("RGB"))


def frame(document: str, title: str) -> Markup:
    """A standalone document in a frame of its own, whose height follows its contents."""
    return Markup('<iframe class="vl-frame" sandbox="allow-scripts" title="{}" srcdoc="{}"></iframe>').format(
        title, escape(document)
    )


def joined(*parts: Markup) -> str:
    """The parts one after the other, as a component takes them."""
    return str(Markup("").join(parts))
