"""A report as data: sections over the rows of a record, and the document that they make.

    Section(
        "Do adversarial images of one model fool the other?",
        rows="transfer",
        says="Of the images that fool {{ made_for }}, {{ fooled }} also fool {{ shown_to }}.",
        otherwise="No image that fools {{ made_for }} is classified correctly by {{ shown_to }} when clean.",
        columns=("made_for", "shown_to", "fooled"),
        charts=(Chart("transfer", matrix("made_for", "shown_to", "fooled"), "Share of the images that ..."),),
    )

No rows, no section. `says` is filled by the columns of a row; where a column that it needs is None, `otherwise` is.
A function stands in the place of a template only where a test decides.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from jinja2 import meta

from vitlens.display import protected, visible
from vitlens.record import Column, Record, columns
from vitlens.report import document as page
from vitlens.report.claims import Claim, shown, title_of, together, vetoed
from vitlens.report.document import Cell, Document, FigureSpec, FirstPage, Sentence, Table
from vitlens.report.explorer import Explorer
from vitlens.report.glossary import Term
from vitlens.report.next_steps import needs_a_next_step, next_step
from vitlens.report.numbers import COUNTED
from vitlens.report.prose import Marked, environment, finalize, say
from vitlens.report.verdicts import ORDER
from vitlens.uncertainty import Estimate, in_points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows: TypeAlias = str | Callable[[Any], Iterable[Any]]  # the table of the record, or a function of the record
Words: TypeAlias = str | Callable[[Any], str]
ROWS: Final = 8  # of a table in the body
SAID: Final = 3  # sentences of a section


def _nothing(_: Any) -> Iterator[Any]:
    yield from ()


def _every(_: Any) -> bool:
    return True


@dataclass(frozen=True)
class Chart:
    """A figure of a section.

    draw: one of vitlens/charts, or a function, from rows and title to the figure; caption: at most 30 words that begin
    with what is seen; title: what it shows, with the result; both templates over `rows`, `first` and `record`; rows:
    others than the section's; only: those of the rows that it draws; each: a field, for a chart for each of its values,
    whose name is appended to the chart's; whole: whether it draws the record's arrays, so that `draw` and `only` take
    the record in the place of rows.
    """

    name: str
    draw: "Callable[[Any, str], Figure]"
    caption: str
    title: str = ""
    rows: Rows = ""
    only: Callable[[Any], bool] = _every
    each: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a report. question: its title, a template.

    opening: a sentence over all rows (`rows`, `first`, `record`), or a function of the record; says: a sentence a row,
    at most SAID; columns: of its table, at most six; order: of the rows; about: the
    questions of the claims whose state is its status; without: what is said where there are no rows ("": no section);
    step: whether it is one of a sequence, through which a page leads with a slider; panels: of the record, images one
    by one, which a page can filter.
    """

    question: str
    rows: Rows
    opening: Words = ""
    says: Words = ""
    otherwise: str = ""
    columns: tuple[str, ...] = ()
    order: Callable[[Any], Any] | None = None
    charts: tuple[Chart, ...] = ()
    about: tuple[str, ...] = ()
    without: str = ""
    step: bool = False
    panels: Callable[[Any], Iterator[page.ImagePanel]] = _nothing


def other_sheets(picture: Chart) -> Section:
    """Return the section of the first page's pictures that are not on its sheet."""
    return Section(
        "What do the other images show?",
        lambda record: [each for each in rows_of(picture.rows, record) if each.sheet],
        charts=(replace(picture, name=f"{picture.name}_more", rows="", only=_every, each="sheet"),),
    )


@dataclass(frozen=True)
class Glance:
    """A row of the first page's table: a column of rows, one a model: a table, or a function of the record.

    key: the entry of a column that holds several; question: of the claims whose states it shows; difference: between
    two models, from the record.
    """

    table: Rows
    column: str
    key: str = ""
    title: str = ""
    question: str = ""
    difference: Callable[[Any], Estimate | None] | None = None


@dataclass(frozen=True)
class Overview:
    """The first page's table where its rows are not models: rows of the record, at most six columns."""

    rows: Rows
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The report of a command.

    claims: of its record; effects: all that it measured on the scale of findings.py, also what is not significant, with
    p before any correction; unknown: what it does not show, sentences, at most five; picture: of the first page, of
    pictures on several sheets the first; explorer: of its HTML page; title: where no claim can be one, a template over
    `record` and the run's own `title`; definitions: names and what they are, with the terms of the columns that are
    shown; package: of its help.md, where that is not the record's; reconciles: what its parts say differently, and why;
    known_answer: whether it recovered a planted cause. A run of chapters takes finished parts from theirs: sections,
    picture and glance may be functions of the record.
    """

    record: type[Record]
    sections: tuple[Section | Callable[[Any], Iterator[page.Section]], ...]
    claims: Callable[[Any], Iterator[Claim]] = _nothing
    effects: Callable[[Any], Iterator[Claim]] = _nothing
    picture: Chart | Callable[[Any], FigureSpec | None] | None = None
    glance: tuple[Glance, ...] | Overview | Callable[[Any], Table | None] = ()
    unknown: Callable[[Any], Iterator[str]] = _nothing
    title: str = "{{ title }}"
    explorer: Callable[[Any], Explorer | None] | None = None
    definitions: Callable[[Any], Iterator[tuple[str, str]]] = _nothing
    package: str = ""
    reconciles: Callable[[Any], Iterable[str]] = _nothing
    known_answer: Callable[[Any], Iterable[str]] = _nothing

    def __call__(self, record: Any) -> Document:
        """Return the whole report of a record."""
        claims = self.register(record)
        picture = self._picture(record)
        parts = [_beside(picture, part) for section in self.sections for part in _parts(section, record, claims)]
        own = [section for section in self.sections if isinstance(section, Section)]
        package = self.package or type(record).__module__.rpartition(".")[0]
        overview = (self.glance,) if isinstance(self.glance, Overview) else ()
        answers = shown(claims)
        terms = tuple(dict.fromkeys(_terms((*own, *overview), record)))
        definitions = [*((each.name, each.sentence) for each in terms), *self.definitions(record)]
        images = " ".join(_images(record))
        first = FirstPage(
            tuple(Sentence(claim.says, claim.place) for claim in answers),
            picture,
            self.glance(record) if callable(self.glance) else _glanced(self.glance, record, claims),
            tuple(map(Sentence, list(self.unknown(record))[:5])),
            _to_test(answers, most=2),
            tuple(map(Sentence, self.known_answer(record))),
        )
        return Document(
            title_of(claims, say(self.title, record=record, title=Marked(_protected(record.config.title)))),
            tuple(parts),
            first,
            folded=(*self._differing(record), *_help(package, definitions)),
            explorer=self.explorer(record) if self.explorer else None,
            terms=terms,
            claims=claims,
            preface=(Sentence(images),) if images else (),
        )

    def register(self, record: Any) -> tuple[Claim, ...]:
        """Return all claims of a record, those that fail or surprise with what to test next."""
        return _with_next_steps(vetoed(self.claims(record)), record)

    def _differing(self, record: Any) -> Iterator[page.Section]:
        """Yield a folded part on what the parts of the report say differently."""
        sentences = tuple(map(Sentence, self.reconciles(record)))
        if sentences:
            yield page.Section("Numbers that differ between chapters", sentences)

    def _picture(self, record: Any) -> FigureSpec | None:
        if isinstance(self.picture, Chart):
            return drawn(self.picture, record)
        return None if self.picture is None else self.picture(record)


def _with_next_steps(claims: Iterable[Claim], record: Record) -> tuple[Claim, ...]:
    """Return the claims, those that fail or surprise with a hypothesis and the command that tests it."""
    found = []
    for claim in claims:
        if needs_a_next_step(claim) and not claim.next_step:
            claim = replace(claim, next_step=next_step(claim, record.config))
        found.append(claim)
    return tuple(found)


def _to_test(claims: Iterable[Claim], *, most: int) -> tuple[Sentence, ...]:
    """Return the next steps of claims that fail or surprise, each once, the most urgent first."""
    failing = sorted((each for each in claims if each.next_step), key=lambda each: urgency(each.state))
    steps = dict.fromkeys(claim.next_step for claim in failing if needs_a_next_step(claim))
    return tuple(map(Sentence, list(steps)[:most]))


def drawn(picture: Chart, record: Any) -> FigureSpec | None:
    """Return a picture of the first page, of several sheets the first; None where it has no rows."""
    first = replace(picture, only=lambda row: not getattr(row, "sheet", 0))
    return next(_figures(first, record, ()), None)


def _beside(picture: FigureSpec | None, part: page.Section) -> page.Section:
    """Return a section without the picture of the first page, which a chapter's section may show, too."""
    if picture is None or all(figure.name != picture.name for figure in part.figures):
        return part
    return replace(part, figures=tuple(figure for figure in part.figures if figure.name != picture.name))


def _images(record: Record) -> Iterator[str]:
    """Yield how many images of which data set, how they were processed, which were left out."""
    data = record.config.data
    if data is None:
        return
    of = "" if data.title == "images" else f" of {finalize(data.title)}"  # "images": files of no data set
    yield f"{data.images:,} image{'s' if data.images != 1 else ''}{of}."
    for note in map(_protected, data.notes):
        yield f"{note[:1].upper()}{note[1:].rstrip('.')}."
    if data.skipped:
        files = "; ".join(f"{finalize(each.file)}: {_protected(each.reason)}" for each in data.skipped[:10])
        more = f"; and {len(data.skipped) - 10} more in config.json" if len(data.skipped) > 10 else ""
        were = "images were" if len(data.skipped) > 1 else "image was"
        yield f"{len(data.skipped)} {were} left out ({files}{more})."


def _protected(text: str) -> str:
    return protected(visible(text))


def rows_of(rows: Rows, record: Any) -> Sequence[Any]:
    """Return the rows that a section or a chart is about."""
    return getattr(record, rows) if isinstance(rows, str) else tuple(rows(record))


def _parts(
    section: Section | Callable[[Any], Iterator[page.Section]], record: Any, claims: Sequence[Claim]
) -> Iterator[page.Section]:
    if not isinstance(section, Section):
        yield from section(record)
    elif whole := made(section, record, claims):
        yield whole


def made(
    section: Section, record: Any, claims: Sequence[Claim] = (), rows: Sequence[Any] | None = None
) -> page.Section | None:
    """Return a section of a record, of these rows where they are given; None where there are no rows and nothing is
    said."""
    rows = rows_of(section.rows, record) if rows is None else rows
    if not rows and not section.without:
        return None
    if section.order is not None:
        rows = sorted(rows, key=section.order)
    lines = [text for text in _sentences(section, rows, record) if text]
    figures = tuple(figure for chart in section.charts for figure in _figures(chart, record, rows))
    return page.Section(
        say(section.question, rows=rows, record=record),
        tuple(map(Sentence, lines)),
        tuple(_table(section, rows, record)),
        figures,
        panels=tuple(section.panels(record)),
        step=section.step,
        status=together(claim for claim in claims if claim.question in section.about),
        next=_to_test([claim for claim in claims if claim.question in section.about], most=1),
    )


def _sentences(section: Section, rows: Sequence[Any], record: Any) -> Iterator[str]:
    if not rows:
        yield section.without
        return
    if isinstance(section.opening, str):
        yield say(section.opening, rows=rows, first=rows[0], record=record) if section.opening else ""
    else:
        yield section.opening(record)
    for row in rows[: SAID - bool(section.opening)] if section.says else ():
        yield row_said(section.says, row, section.otherwise)


def row_said(words: Words, row: Any, otherwise: str = "") -> str:
    """Return the sentence of a row; `otherwise` where a column that it needs is None."""
    template = words if isinstance(words, str) else words(row)
    cells = {each.name: getattr(row, each.name) for each in fields(row)}
    needed = meta.find_undeclared_variables(environment().parse(template))
    missing = any(cells.get(name, "") is None for name in needed)
    return say(otherwise if missing else template, row=row, **cells) if template else ""


def _figures(chart: Chart, record: Any, rows: Sequence[Any]) -> Iterator[FigureSpec]:
    """Yield the chart, or one for each value of a field; none where it has no rows."""
    rows = [record] if chart.whole else rows_of(chart.rows, record) if chart.rows else rows
    rows = [row for row in rows if chart.only(row)]
    values = list(dict.fromkeys(getattr(row, chart.each) for row in rows)) if chart.each else [None]
    for value in values:
        own = rows if value is None else [row for row in rows if getattr(row, chart.each) == value]
        if own:
            known = {"rows": own, "first": own[0], "record": record}
            name = chart.name if len(values) == 1 else f"{chart.name}_{value}"
            title = say(chart.title, **known)
            caption = say(chart.caption, **known)
            draw = partial(chart.draw, record if chart.whole else own, title)
            yield FigureSpec(name, caption, draw, alt=title or caption)


def _table(section: Section | Overview, rows: Sequence[Any], record: Record) -> Iterator[Table]:
    if not section.columns or not rows:
        return
    declared = columns(type(rows[0]))
    same = [name for name, own in record.tables.items() if own and type(own[0]) is type(rows[0])]
    more = section.rows if isinstance(section.rows, str) else next(iter(same), "")
    shown = {name: declared.get(name) or _of_property(name, rows[0]) for name in section.columns}
    yield table_of(rows[:ROWS], shown, of=len(rows), name=more)


def _of_property(name: str, row: Any) -> Column:
    """Return the column of a property; its text is ours, which a table does not shorten as it does a name."""
    unit = "text" if isinstance(getattr(row, name), str) else ""
    return Column(name.replace("_", " "), unit=unit)


def table_of(rows: Sequence[Any], shown: Mapping[str, Column], *, of: int, name: str = "") -> Table:
    """Rows as a table; a column that is empty in all of them is left out. name: of its CSV file; of: rows in all."""
    cells = {column.title: [cell(getattr(row, field), column) for row in rows] for field, column in shown.items()}
    cells = {title: column for title, column in cells.items() if any(each not in (None, "") for each in column)}
    caption = f"{len(rows)} of {of:,} rows" if of > len(rows) else ""
    if name and of > len(rows):
        caption += f"; all of them: tables/{name}.csv"
    return Table(caption, tuple(cells), tuple(zip(*cells.values())))


def cell(value: Any, column: Column) -> Cell:
    """Return a value of a column as a table shows it."""
    if isinstance(value, Estimate):
        return in_points(value) if column.unit == "points" else value
    if value is None:
        return None
    if column.unit == "text":
        return Marked(_protected(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if (isinstance(value, float) and column.unit) or (isinstance(value, int) and column.unit in COUNTED):
        return Estimate(value, unit=column.unit)
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{finalize(key)} {finalize(each)}" for key, each in value.items()) or None
    if isinstance(value, list | tuple):
        return ", ".join(map(finalize, value))
    return finalize(value)


def _glanced(glances: Sequence[Glance] | Overview, record: Any, claims: Sequence[Claim]) -> Table | None:
    """Return one row a metric, one column a model; failing rows first."""
    if isinstance(glances, Overview):
        return next(_table(glances, rows_of(glances.rows, record), record), None)
    lines: list[tuple[int, tuple[Cell, ...]]] = []
    for each in glances:
        rows = {row.model: row for row in rows_of(each.table, record)}
        if not rows:
            continue
        column = columns(type(next(iter(rows.values()))))[each.column]
        values = {model: getattr(row, each.column) for model, row in rows.items()}
        if each.key:
            values = {model: value.get(each.key) for model, value in values.items()}
        if all(value is None for value in values.values()):
            continue
        verdict = together(claim for claim in claims if each.question and claim.question == each.question)
        apart = each.difference(record) if each.difference else None
        gap = None if apart is None else in_points(apart)
        cells = [cell(values.get(model), column) for model in record.aliases]
        status = None if verdict is None else verdict.words
        line = (each.title or column.title, *cells, *([gap] if len(cells) == 2 else []), status)
        lines.append((urgency(status), line))
    if not lines:
        return None
    names = ("metric", *map(finalize, record.aliases), *(["difference"] if len(record.aliases) == 2 else []), "status")
    ordered = [line for _, line in sorted(lines, key=lambda pair: pair[0])][:ROWS]
    kept = [at for at, name in enumerate(names) if at == 0 or any(line[at] is not None for line in ordered)]
    return Table("", tuple(names[at] for at in kept), tuple(tuple(line[at] for at in kept) for line in ordered))


def urgency(status: str | None) -> int:
    """Return the place in ORDER of a status with its reason; the most urgent is 0, a row without one comes last."""
    state = (status or "").partition(":")[0]
    return ORDER.index(state) if state in ORDER else len(ORDER)


def _terms(sections: Sequence[Section | Overview], record: Any) -> Iterator[Term]:
    """Yield the terms of the columns that are shown."""
    for section in sections:
        rows = rows_of(section.rows, record)
        declared = columns(type(rows[0])) if rows and hasattr(rows[0], "__dataclass_fields__") else {}
        for name in section.columns:
            if name in declared and declared[name].term:
                yield Term(declared[name].title, declared[name].term)


def _help(package: str, definitions: Sequence[tuple[str, str]]) -> Iterator[page.Section]:
    """help.md of a command, a folded part for each of its headings, and the definitions."""
    for title, paragraphs in help_of(package).items():
        yield page.Section(title, tuple(map(Sentence, paragraphs)))
    if definitions:
        lines = (f"**{name}**: {text}" for name, text in definitions)  # ours, from registries and columns
        yield page.Section("Definitions", tuple(map(Sentence, lines)))


def help_of(package: str) -> Mapping[str, tuple[str, ...]]:
    """Return the paragraphs of a command's help.md by heading; none where it has no such file."""
    path = files(package).joinpath("help.md")
    if not path.is_file():
        return {}
    parts: dict[str, tuple[str, ...]] = {}
    for block in path.read_text("utf-8").split("\n## ")[1:]:
        title, _, text = block.partition("\n")
        items = [" ".join(part.split()) for part in text.replace("\n- ", "\n\n").split("\n\n")]
        parts[title.strip()] = tuple(item for item in items if item)
    return parts
