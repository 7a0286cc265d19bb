"""HTML pages for tests: a document with everything in it, and what is wrong with a page."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from tests.kit.nasty import hidden
from vitlens.record import Config, Record
from vitlens.report.claims import found
from vitlens.report.document import (
    Document,
    FigureSpec,
    FirstPage,
    ImagePanel,
    Section,
    Sentence,
    Table,
    Tags,
)
from vitlens.report.explorer import Explorer, ExplorerImage
from vitlens.report.html import page
from vitlens.uncertainty import Estimate

LAYERS = 3
HEADS = 2
ROWS = 4
COLUMNS = 5
TOKENS = 1 + ROWS * COLUMNS
_ELEMENTS = {  # that a page may hold
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "a",
    "nav",
    "details",
    "summary",
    "ol",
    "li",
    "main",
    "header",
    "p",
    "h1",
    "h2",
    "h3",
    "section",
    "ul",
    "span",
    "strong",
    "em",
    "code",
    "div",
    "figure",
    "img",
    "figcaption",
    "script",
    "form",
    "label",
    "input",
    "select",
    "option",
    "output",
    "button",
    "table",
    "thead",
    "tr",
    "th",
    "tbody",
    "td",
    "dl",
    "dt",
    "dd",
    "pre",
}


def next_patch_weights() -> NDArray[np.float32]:
    """Return weights (layers, heads, queries, keys) that a reader can check.

    Each token looks at CLS with 0.25, and with 0.75 in head 0 of layer l at the patch l + 1 places
    to the right, in head 1 at the first patch.
    """
    weights = np.zeros((LAYERS, HEADS, TOKENS, TOKENS), np.float32)
    query = np.arange(TOKENS)
    weights[..., 0] = 0.25
    weights[:, 1, :, 1] += 0.75
    for layer in range(LAYERS):
        weights[layer, 0, query, 1 + (np.maximum(query - 1, 0) + layer + 1) % (TOKENS - 1)] += 0.75
    return weights


def explorer(*, name: str = "cat.jpg", label: str = "sink") -> Explorer:
    """Return two images, the second only with layer means."""
    weights = next_patch_weights()
    picture = np.linspace(0, 255, 80 * 100 * 3).reshape(80, 100, 3).astype(np.uint8)
    images = (
        ExplorerImage(
            name,
            picture,
            weights,
            maps={f"relevance for {name}": np.arange(20.0).reshape(4, 5) - 8},
        ),
        ExplorerImage("second.jpg", picture[::-1].copy(), None, layer_weights=weights.mean(1)),
    )
    labels = [["next patch", label]] * LAYERS
    importance = np.array([[0.1, 0.0], [0.02, float("nan")], [0.3, -0.1]])
    return Explorer(
        "tiny",
        images,
        (ROWS, COLUMNS),
        ("CLS",),
        (ROWS, COLUMNS),
        labels,
        importance,
        ("Planted.",),
    )


def document(*, name: str = "tabby") -> Document:
    """Return a report with every part; name: stands wherever a name from outside can stand."""
    rows = tuple(
        (f"{name} {number}", Estimate(0.5, 0.4, 0.6, 100, "fraction")) for number in range(60)
    )
    bars = FigureSpec("bars", f"What {name} shows.", partial(Figure, (1, 1)))
    panels = tuple(
        ImagePanel(
            f"{name} {index}",
            ("true: a", "first: ✓ a", "second: ✗ b"),
            partial(_pictures, index),
            Tags(("both right", "both wrong")[index % 2], f"{name} {index % 3}", "below 0.3"),
        )
        for index in range(6)
    )
    return Document(
        f"Study of {name}",
        (
            Section("How good?", (Sentence(f"The ECE of `{name}` is **low**."),), figures=(bars,)),
            Section("Side by side", (Sentence("Maps."),), panels=panels),
        ),
        FirstPage(
            (Sentence(f"**{name}** wins.", "bars"), Sentence(f"{name} is calibrated.")),
            glance=Table(f"Of {name}", ("metric", name), rows[:2]),
            unknown=(Sentence("One seed."),),
        ),
        folded=(
            Section(
                "In full",
                (Sentence(f"What {name} is."),),
                (Table("All rows", ("class", "accuracy"), rows),),
            ),
        ),
        preface=(Sentence("Robust accuracy under PGD."),),
        explorer=explorer(name=name, label=name),
    )


@dataclass(frozen=True, kw_only=True)
class PageRecord(Record):
    """The record of a run that made a page."""

    command: ClassVar[str] = "study"


def record(folder: Path, *, status: str = "done", **config: object) -> Record:
    return PageRecord(config=Config(**config), folder=folder, status=status, seconds=12.3)  # type: ignore[arg-type]


def written(folder: Path, content: Document, **config: object) -> str:
    """Return the page of a document whose figures are drawn in this folder."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for figure in content.figures:
        Image.new("RGB", (300, 150), "orange").save(
            folder / "figures" / f"{figure.name}.png", dpi=(200, 200)
        )
    return page(content, record(folder, **config))


def said(template: str = "{{ name }}", **values: object) -> str:
    """Return the sentence of a claim."""
    return found("question", "subject", template, given=values).says


def _pictures(index: int) -> tuple[NDArray[np.uint8], ...]:
    return tuple(np.full((8, 8, 3), 40 * index + shade, np.uint8) for shade in range(3))


class Elements(HTMLParser):
    """All elements of a page, its text, and the contents of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.words.append(data)


def page_problems(text: str) -> list[str]:
    """Return what could act, load, leave the page or be empty; nothing for a good page."""
    elements = Elements(text)
    faults = [
        f"control character {one!r}" for one in sorted(set(text)) if one != "\n" and hidden(one)
    ]
    for tag, attributes in elements.found:
        for name in attributes:
            if name.startswith("on") or name in ("style", "srcset"):
                faults.append(f"{tag} with {name}")
        if not attributes.get("href", "#").startswith("#"):
            faults.append(f"{tag} to {attributes['href']}")
        if not attributes.get("src", "data:image/").startswith("data:image/"):
            faults.append(f"{tag} of {attributes['src'][:40]}")
        if tag not in _ELEMENTS:
            faults.append(f"an element {tag}")
        if tag == "img" and not attributes.get("alt"):
            faults.append("an image without words")
    ids = Counter(attributes["id"] for _, attributes in elements.found if "id" in attributes)
    faults += [f"id {one} {times} times" for one, times in ids.items() if times > 1]
    linked = {attributes["href"][1:] for tag, attributes in elements.found if tag == "a"}
    return faults + [f"a link to {one}, which is not there" for one in sorted(linked - set(ids))]
