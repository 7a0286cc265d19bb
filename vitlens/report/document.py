"""A report before it is rendered: plain dataclasses that every renderer takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from vitlens.report.explorer import Explorer
from vitlens.report.glossary import Term
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from vitlens.report.claims import Claim
    from vitlens.report.verdicts import Verdict

Cell: TypeAlias = Estimate | str | int | float | None
State: TypeAlias = Literal["pass", "warn", "fail", "inconclusive", "not tested"]


@dataclass(frozen=True)
class Sentence:
    """One or more sentences in which **bold** and `code` are marks.

    place: the figure that shows it, "" for none.
    lead: the reader's question that it answers, "" for none.
    """

    text: str
    place: str = ""
    lead: str = ""

    @property
    def whole(self) -> str:
        """Return the text after its question in bold, where it has one."""
        return f"**{self.lead}** {self.text}" if self.lead else self.text


@dataclass(frozen=True)
class Table:
    """Rows of cells under a caption; columns: their titles, with the unit where there is one."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Return which columns hold only plain numbers, which are aligned to the right."""
        return tuple(map(_is_numeric, zip(*self.rows)))


def _is_numeric(column: tuple[Cell, ...]) -> bool:
    return all(isinstance(cell, (int, float, type(None))) for cell in column)


@dataclass(frozen=True)
class Tags:
    """The tags by which a page filters panels, "" for one that is not known.

    outcome: who is right ("both right").
    class_name: the true class.
    agreement: how well two maps agree, in words.
    """

    outcome: str = ""
    class_name: str = ""
    agreement: str = ""


@dataclass(frozen=True)
class FigureSpec:
    """A figure by its name (figures/<name>.png), to be drawn when the report is written.

    caption: what it shows and what it does not.
    alt: the alternative text.
    chapter: the folder below the run's own of the chapter whose figure this is, and its name there
        ("" and "" for a figure of the run itself).
    """

    name: str
    caption: str
    draw: "Callable[[], Figure]"
    alt: str = ""
    chapter: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class ImagePanel:
    """One image and what models make of it, for a page that shows panels one by one.

    captions: a line under each picture.
    pictures: (height, width, 3) uint8 each, drawn when the page is written.
    """

    title: str
    captions: tuple[str, ...]
    pictures: "Callable[[], tuple[NDArray[np.uint8], ...]]"
    tags: Tags = Tags()


@dataclass(frozen=True)
class Section:
    """One part of a report.

    panels: images one by one.
    step: whether it is one of a sequence, through which a page leads with a slider.
    status: the judgement with its reason, printed below the title.
    next: hypotheses with the commands that test them.
    more: the file, from the folder of the run, that says more.
    level: the level of its heading, 2 for a part of the whole report.
    """

    title: str
    sentences: tuple[Sentence, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[FigureSpec, ...] = ()
    panels: tuple[ImagePanel, ...] = ()
    step: bool = False
    status: "Verdict | None" = None
    next: tuple[Sentence, ...] = ()
    more: str = ""
    level: int = 2


@dataclass(frozen=True)
class FirstPage:
    """The page that a stranger reads in a minute: at most five sentences, one picture, one table,
    what is not known.

    next: hypotheses with the commands that test them, of what fails or surprises.
    known_answer: whether the report recovered a cause that was planted in its data.
    """

    answer: tuple[Sentence, ...]
    picture: FigureSpec | None = None
    glance: Table | None = None
    unknown: tuple[Sentence, ...] = ()
    next: tuple[Sentence, ...] = ()
    known_answer: tuple[Sentence, ...] = ()


@dataclass(frozen=True)
class Document:
    """A whole report.

    first: its first page.
    preface: the images.
    folded: parts that are closed at first.
    explorer: what the attention explorer of its HTML page shows.
    terms: the terms of its columns, for the glossary.
    claims: all that it makes.
    """

    title: str
    sections: tuple[Section, ...]
    first: FirstPage
    preface: tuple[Sentence, ...] = ()
    folded: tuple[Section, ...] = ()
    explorer: Explorer | None = None
    terms: tuple[Term, ...] = ()
    claims: "tuple[Claim, ...]" = ()

    @property
    def figures(self) -> tuple[FigureSpec, ...]:
        """Return all figures in the order in which they are shown, without repetition."""
        figures = {}
        if self.first.picture is not None:
            figures[self.first.picture.name] = self.first.picture
        for section in self.sections:
            for figure in section.figures:
                figures[figure.name] = figure
        return tuple(figures.values())
