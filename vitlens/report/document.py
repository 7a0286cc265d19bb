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
    """One or more sentences.

    text: the sentences, in which **bold** and `code` are marks.
    place: the name of the figure that shows the result, "" for none.
    lead: the reader's question that is answered, "" for none.
    """

    text: str
    place: str = ""
    lead: str = ""

    @property
    def whole(self) -> str:
        """Return the text, with its question in bold before it if it has one."""
        return f"**{self.lead}** {self.text}" if self.lead else self.text


@dataclass(frozen=True)
class Table:
    """Rows of cells under a caption.

    caption: its heading, "" for none.
    columns: the titles of the columns, with their units.
    rows: the cells of each row, one per column.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Return True for columns with only plain numbers, which are aligned to the right."""
        columns_of_cells = zip(*self.rows)
        return tuple(map(_is_numeric, columns_of_cells))


def _is_numeric(column: tuple[Cell, ...]) -> bool:
    return all(isinstance(cell, (int, float, type(None))) for cell in column)


@dataclass(frozen=True)
class Tags:
    """The tags by which a page filters panels. An unknown tag is "".

    outcome: which models are right, e.g. "both right".
    class_name: the true class.
    agreement: the agreement of two maps, in words.
    """

    outcome: str = ""
    class_name: str = ""
    agreement: str = ""


@dataclass(frozen=True)
class FigureSpec:
    """A figure that is drawn when the report is written.

    name: the name of its file, figures/<name>.png.
    caption: what it shows and what it does not show.
    draw: returns the figure.
    alt: the alternative text.
    chapter: for a figure of a chapter, the folder of the chapter within that of the run, and the
        figure's name there. ("", "") for a figure of the run itself.
    """

    name: str
    caption: str
    draw: "Callable[[], Figure]"
    alt: str = ""
    chapter: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class ImagePanel:
    """One image and its results, for a page that shows panels one by one.

    captions: a line under each picture.
    pictures: returns the pictures (height, width, 3) in uint8, when the page is written.
    tags: the tags by which a page filters panels.
    """

    title: str
    captions: tuple[str, ...]
    pictures: "Callable[[], tuple[NDArray[np.uint8], ...]]"
    tags: Tags = Tags()


@dataclass(frozen=True)
class Section:
    """One part of a report.

    panels: images that are shown one by one.
    step: True for a step of a sequence, which a page shows with a slider.
    status: the judgement with its reason, printed below the title.
    next: hypotheses with the commands that test them.
    more: the path, from the folder of the run, of a file that says more.
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
    """The page that a new reader understands in a minute.

    answer: at most five sentences.
    picture: one figure.
    glance: one table.
    unknown: sentences about what the report does not show.
    next: hypotheses about what fails or surprises, with the commands that test them.
    known_answer: sentences that say if the report recovered a cause that was planted in its data.
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

    first: the first page.
    preface: sentences about the images.
    folded: parts that are closed at first.
    explorer: the data of the HTML page's attention explorer.
    terms: the terms of its columns, for the glossary.
    claims: all claims that it makes.
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
