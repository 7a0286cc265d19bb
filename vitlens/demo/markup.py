"""Pieces of the page's HTML; every name is escaped, every picture has an alternative text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from vitlens.charts.overlay import OPACITY, overlaid
from vitlens.demo.pictures import Example
from vitlens.display import visible
from vitlens.report.html import pictures
from vitlens.report.html.text import Words
from vitlens.report.numbers import percent

Pixels = NDArray[np.floating[Any]] | NDArray[np.uint8]


@dataclass(frozen=True)
class Card:
    """A picture with a caption. pixels: (height, width, 3), in [0, 1] or uint8; alt: what it shows, in words."""

    pixels: Pixels
    caption: str
    alt: str
    note: str = ""


def map_card(image: Pixels, values: Pixels, what: str, of: str, *, signed: bool, opacity: float = OPACITY) -> Card:
    """A map (rows, columns) over an image (3, height, width), as the figures of reports draw it."""
    pixels, flaw = overlaid(
        np.asarray(image, np.float64), np.asarray(values, np.float64), signed=signed, opacity=opacity
    )
    return Card(pixels, what, f"{what} {of}", f"{of}; the map is {flaw}" if flaw else of)


def sentence(text: str, kind: str = "") -> Markup:
    """A paragraph of plain text; kind: "warning" or "quiet"."""
    return Markup('<p class="vl-say {}">{}</p>').format(kind, visible(text))


def said(text: str, kind: str = "", *, live: bool = True) -> Markup:
    """A sentence of a report (report/prose.py) as a paragraph; live: a screen reader reads it when it changes."""
    role = Markup(' role="status" aria-live="polite"') if live else ""
    return Markup('<p class="vl-say {}"{}>{}</p>').format(kind, role, Words().bare(text))


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


def as_bytes(pixels: Pixels) -> NDArray[np.uint8]:
    """Pixels as uint8."""
    if pixels.dtype == np.uint8:
        return pixels  # type: ignore[return-value]
    return np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)


def _card(card: Card) -> Markup:
    embedded = pictures.photograph(as_bytes(card.pixels))
    alt, caption, note = map(visible, (card.alt, card.caption, card.note))
    return Markup(
        '<figure class="vl-card"><img src="{}" alt="{}" width="{}" height="{}">'
        "<figcaption><strong>{}</strong> {}</figcaption></figure>"
    ).format(embedded.uri, alt, embedded.width, embedded.height, caption, note)


def classes_table(classes: Sequence[tuple[Any, ...]], caption: str) -> Markup:
    """Classes, (name, probability) or (name, before, after), with their probabilities as bars."""
    heads = ("class", "before", "after") if len(classes[0]) > 2 else ("class", "probability")
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(each) for each in heads)
    bar = Markup('<td><span class="vl-bar" style="--share:{:.4f}"></span>{}</td>')
    rows = Markup("").join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            visible(name), Markup("").join(bar.format(share, percent(share, 1)) for share in shares)
        )
        for name, *shares in classes
    )
    return Markup(
        '<table class="vl-classes"><caption>{}</caption><thead><tr>{}</tr></thead><tbody>{}</tbody></table>'
    ).format(caption, head, rows)


def examples_html(examples: Sequence[Example]) -> str:
    """A row of buttons, one for each example."""
    button = Markup(
        '<button type="button" class="vl-example" data-example="{}" title="{}" aria-label="take the example {}">'
        '<img src="{}" alt=""></button>'
    )
    buttons = Markup("").join(
        button.format(number, visible(each.name), visible(each.name), pictures.photograph(each.pixels, most=96).uri)
        for number, each in enumerate(examples)
    )
    return str(Markup('<div class="vl-examples" role="group" aria-label="Examples">{}</div>').format(buttons))


def frame(document: str, title: str) -> Markup:
    """A standalone document in a frame of its own, whose height follows its contents."""
    return Markup('<iframe class="vl-frame" sandbox="allow-scripts" title="{}" srcdoc="{}"></iframe>').format(
        title, escape(document)
    )


def joined(*parts: Markup) -> str:
    """The parts one after the other, as a component takes them."""
    return str(Markup("").join(parts))
