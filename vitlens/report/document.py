"""What a report says, before it is rendered: plain dataclasses that every renderer takes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from vitlens.report.explorer import Explorer
from vitlens.report.glossary import Term
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from vitlens.report.claims import Claim

Cell: TypeAlias = Estimate | str | int | float | None
State: TypeAlias = Literal["pass", "warn", "fail", "inconclusive", "not tested"]
Support: TypeAlias = Literal["two methods agree", "one method", "methods disagree"]
Says: TypeAlias = Literal["result", "method", "setting", "filled"]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Sentence:
    """One or more sentences in which **bold** and `code` are marks.

    rows: the typed rows and estimates that back them; says: a result states what was measured and needs rows; a method
    defines a metric or says how to read something; a setting repeats what config.json holds; a filled template has its
    numbers from the record by itself.
    """

    text: str
    rows: tuple[object, ...] = ()
    says: Says = "result"


@dataclass(frozen=True)
class Table:
    """Rows of cells under a caption; columns: their titles, with the unit where there is one."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, caption: str, items: Iterable[Item], columns: Mapping[str, Callable[[Item], Cell]]) -> "Table":
        """One row for each item; columns: title -> what an item shows there."""
        rows = tuple(tuple(cell(item) for cell in columns.values()) for item in items)
        return cls(caption, tuple(columns), rows)


@dataclass(frozen=True)
class Tags:
    """What figures and panels can be filtered by on a page, "" where it is not known.

    outcome: who is right ("both right"); class_name: the true class; agreement: how well two maps agree, in words.
    """

    outcome: str = ""
    class_name: str = ""
    agreement: str = ""


@dataclass(frozen=True)
class FigureSpec:
    """A figure by its name (figures/<name>.png), to be drawn when the report is written.

    caption: what it shows and what it does not; alt: the alternative text; chapter: the folder below the run's own of
    the chapter whose figure this is, and its name there ("" and "" for a figure of the run itself); tags: what it can
    be found by; sheet: whether it is a sheet of the section's panels, which a page shows one by one instead.
    """

    name: str
    caption: str
    draw: "Callable[[], Figure]"
    alt: str = ""
    chapter: tuple[str, str] = ("", "")
    tags: Tags = Tags()
    sheet: bool = False


@dataclass(frozen=True)
class ImagePanel:
    """One image and what models make of it, for a page that shows panels one by one.

    captions: a line under each picture; pictures: (height, width, 3) uint8 each, drawn when the page is written.
    """

    title: str
    captions: tuple[str, ...]
    pictures: "Callable[[], tuple[NDArray[np.uint8], ...]]"
    tags: Tags = Tags()


@dataclass(frozen=True)
class Finding:
    """One fact of the first page: the effect, its interval, n and p, the figure that shows it, and its support."""

    claim: Sentence
    effect: Estimate
    p: float | None = None
    figure: str = ""
    support: Support = "one method"
    rank: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """One judgement of the first page: of what, its state, the value and the threshold it was held against."""

    subject: str
    state: State
    value: Estimate | None
    threshold: str
    because: str


@dataclass(frozen=True)
class Section:
    """One part of a report.

    question: the one that it answers; leading: whether its sentences come before its figures (as in a summary) or
    after; panels: images one by one, of which some of the figures are sheets; step: whether it is one of a sequence,
    through which a page leads with a slider; status: the judgement that stands beside its title; more: the file, from
    the folder of the run, that says more.
    """

    title: str
    sentences: tuple[Sentence, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[FigureSpec, ...] = ()
    question: str = ""
    leading: bool = False
    panels: tuple[ImagePanel, ...] = ()
    step: bool = False
    status: State | Literal[""] = ""
    more: str = ""


@dataclass(frozen=True)
class FirstPage:
    """What a stranger reads in a minute: at most five sentences, one picture, one table, and what is not known."""

    answer: tuple[Sentence, ...]
    picture: FigureSpec | None = None
    glance: Table | None = None
    unknown: tuple[Sentence, ...] = ()


@dataclass(frozen=True)
class Document:
    """A whole report.

    limits: what could overturn it; appendix: tables and figures in full; preface: what to know before any number;
    explorer: what the attention explorer of its HTML page shows; command_line: what makes it again, where that is not
    the command of the run ("" for that); first: its first page, which stands in the place of verdicts and findings;
    folded: parts that are closed at first; terms: of its columns, for the glossary; claims: all that it makes.
    """

    title: str
    sections: tuple[Section, ...]
    limits: tuple[Sentence, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    findings: tuple[Finding, ...] = ()
    appendix: tuple[Section, ...] = ()
    preface: tuple[Sentence, ...] = ()
    explorer: Explorer | None = None
    command_line: str = ""
    first: FirstPage | None = None
    folded: tuple[Section, ...] = ()
    terms: tuple[Term, ...] = ()
    claims: "tuple[Claim, ...]" = ()

    @property
    def figures(self) -> tuple[FigureSpec, ...]:
        """All figures in the order in which they are shown, each once."""
        picture = () if self.first is None or self.first.picture is None else (self.first.picture,)
        others = (figure for section in (*self.sections, *self.appendix) for figure in section.figures)
        return tuple({figure.name: figure for figure in (*picture, *others)}.values())


def sentences(*texts: str | None, rows: Sequence[object] = (), says: Says = "result") -> tuple[Sentence, ...]:
    """Texts as sentences that the same rows back; empty ones and None are left out."""
    return tuple(Sentence(text, tuple(rows), says) for text in texts if text)
