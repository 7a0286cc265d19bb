"""A report as data: sections over the rows of a record, and the document that they make.

    Section(
        "Do adversarial images of one model fool the other?",
        rows="transfer",
        says="Of the images that fool {{ made_for }}, {{ fooled }} also fool {{ shown_to }}.",
        otherwise="No image that fools {{ made_for }} is predicted right by {{ shown_to }}.",
        columns=("made_for", "shown_to", "fooled"),
        charts=(
            Chart("transfer", matrix("made_for", "shown_to", "fooled"), "Share of images that ..."),
        ),
    )

A section without rows is left out. The columns of a row fill the template `says`, or `otherwise` if
one of them is None. A function replaces a template only if a test decides between sentences.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from jinja2 import meta

from vitlens.display import protected, visible
from vitlens.record import Record, columns
from vitlens.report import document as page
from vitlens.report.claims import Claim, first_page_claims, overall_verdict, title_of, veto_doubted
from vitlens.report.document import Cell, Document, FigureSpec, FirstPage, Sentence, Table
from vitlens.report.explorer import Explorer
from vitlens.report.glossary import Term
from vitlens.report.help import help_of
from vitlens.report.next_steps import needs_a_next_step, next_step
from vitlens.report.preface import image_sentences
from vitlens.report.prose import Marked, environment, finalize, say
from vitlens.report.tables import cell, column_of_property, table_of
from vitlens.report.verdicts import ORDER
from vitlens.uncertainty import Estimate, in_points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# the name of a table of the record, or a function from the record to rows
Rows: TypeAlias = str | Callable[[Any], Iterable[Any]]
# a template, or a function that decides between sentences (`opening`: of the record, `says`: of a
# row)
Template: TypeAlias = str | Callable[[Any], str]
ROWS: Final = 8  # most rows of a table; the CSV file has all
SAID: Final = 3  # most sentences of a section
_UNKNOWN: Final = 5  # most sentences on the first page about what the report does not show


def _yield_nothing(_record: Any) -> Iterator[Any]:
    yield from ()


def _take_every(_row: Any) -> bool:
    return True


@dataclass(frozen=True)
class Chart:
    """A figure of a section.

    Caption and title are templates over `rows`, `first` (row) and `record`.

    name: the name of its file.
    draw: a chart of vitlens/charts, or a function from rows and title to the figure.
    caption: at most 30 words that begin with what is seen.
    title: what the figure shows, with the result.
    rows: the rows that it draws, "" for those of the section.
    only: returns True for rows that are drawn.
    each: the name of a field, "" for one figure. One figure is drawn for each value of the field.
        The value is appended to its name if there are several.
    whole: True if the chart draws arrays. `draw` and `only` then take the record instead of rows.
    """

    name: str
    draw: "Callable[[Any, str], Figure]"
    caption: str
    title: str = ""
    rows: Rows = ""
    only: Callable[[Any], bool] = _take_every
    each: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a report.

    question: its title, a template.
    rows: the rows that it is about.
    opening: its first sentence, a template over `rows`, `first` (row) and `record`, or a function
        of the record.
    says: the sentence of a row, a template. A section has at most SAID sentences.
    otherwise: the sentence of a row if a column of `says` is None.
    columns: the columns of its table, at most six.
    order: the sort key of rows.
    charts: its figures.
    about: the questions of the claims that give the section its status.
    without: the sentence of a section without rows. "" leaves such a section out.
    step: True for a step of a sequence, which a page shows with a slider.
    panels: yields images of the record that a page shows one by one and can filter.
    """

    question: str
    rows: Rows
    opening: Template = ""
    says: Template = ""
    otherwise: str = ""
    columns: tuple[str, ...] = ()
    order: Callable[[Any], Any] | None = None
    charts: tuple[Chart, ...] = ()
    about: tuple[str, ...] = ()
    without: str = ""
    step: bool = False
    panels: Callable[[Any], Iterator[page.ImagePanel]] = _yield_nothing


def other_sheets(picture: Chart) -> Section:
    """Return the section of images that do not fit on the sheet of the first page's picture."""
    chart = replace(picture, name=f"{picture.name}_more", rows="", each="sheet")
    return Section(
        "What do the other images show?",
        # rows of the first sheet have the number 0
        lambda record: [row for row in rows_of(picture.rows, record) if row.sheet],
        charts=(chart,),
    )


@dataclass(frozen=True)
class Glance:
    """A row of the first page's table: one metric, with a value for each model.

    table: the rows of the record, one for each model.
    column: the field of these rows that is shown.
    key: the entry that is shown, if the field holds a mapping.
    title: the name of the metric, "" for the title of the column.
    question: the question of the claims that give the row its status.
    difference: returns the difference between two models from the record.
    """

    table: Rows
    column: str
    key: str = ""
    title: str = ""
    question: str = ""
    difference: Callable[[Any], Estimate | None] | None = None


@dataclass(frozen=True)
class Overview:
    """A first page's table that shows rows of the record, with at most six columns."""

    rows: Rows
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The report of a command.

    The report of a run with chapters takes finished parts from them. So sections, picture and
    glance may be functions of the record.

    record: the class of the record.
    sections: its parts.
    claims: yields the claims of the record.
    effects: yields all measured effects on the scale of findings.py, significant or not. Their
        p-values are not corrected.
    picture: the picture of the first page. Of several sheets, the first is shown.
    glance: the table of the first page.
    unknown: yields sentences about what the report does not show. At most five are printed.
    title: a template over `record` and the run's `title`, for a report without a claim that has a
        title.
    explorer: returns the data of the HTML page's attention explorer.
    definitions: yields names with their meaning. They follow the terms of the shown columns.
    package: the package of its help.md, "" for that of the record.
    reconciles: yields sentences about numbers that differ between parts, and why.
    known_answer: yields sentences that say if the report recovered a planted cause.
    about_weights: False if the numbers do not depend on the weights, or if the report itself says
        which models are untrained.
    """

    record: type[Record]
    sections: tuple[Section | Callable[[Any], Iterator[page.Section]], ...]
    claims: Callable[[Any], Iterator[Claim]] = _yield_nothing
    effects: Callable[[Any], Iterator[Claim]] = _yield_nothing
    picture: Chart | Callable[[Any], FigureSpec | None] | None = None
    glance: tuple[Glance, ...] | Overview | Callable[[Any], Table | None] = ()
    unknown: Callable[[Any], Iterator[str | Sentence]] = _yield_nothing
    title: str = "{{ title }}"
    explorer: Callable[[Any], Explorer | None] | None = None
    definitions: Callable[[Any], Iterator[tuple[str, str]]] = _yield_nothing
    package: str = ""
    reconciles: Callable[[Any], Iterable[str]] = _yield_nothing
    known_answer: Callable[[Any], Iterable[str | Sentence]] = _yield_nothing
    about_weights: bool = True

    def __call__(self, record: Any) -> Document:
        """Return the whole report of a record."""
        claims = self.register(record)
        picture = self._picture(record)
        answers = first_page_claims(claims)
        terms = tuple(dict.fromkeys(_terms(self._declared_parts(), record)))
        definitions = [(term.name, term.sentence) for term in terms]
        definitions += self.definitions(record)
        package = self.package or type(record).__module__.rpartition(".")[0]
        unknown = _as_sentences((*self._untrained_notes(record), *self.unknown(record)))
        first = FirstPage(
            answer=tuple(_without_repeated_leads(answers)),
            picture=picture,
            glance=self._glance_table(record, claims),
            unknown=unknown[:_UNKNOWN],
            next=_to_test(answers, most=2),
            known_answer=_as_sentences(self.known_answer(record)),
        )
        title = say(self.title, record=record, title=Marked(_protect(record.config.title)))
        images = " ".join(image_sentences(record))
        return Document(
            title=title_of(claims, title),
            sections=_without_repeated_steps(self._parts(record, claims, picture), first.next),
            first=first,
            folded=(*self._reconciling_part(record), *_help(package, definitions)),
            explorer=self.explorer(record) if self.explorer else None,
            terms=terms,
            claims=claims,
            preface=(Sentence(images),) if images else (),
        )

    def register(self, record: Any) -> tuple[Claim, ...]:
        """Return all claims of a record. Those that fail or surprise have a next step."""
        return _with_next_steps(veto_doubted(self.claims(record)), record)

    def _untrained_notes(self, record: Any) -> Iterator[str]:
        """Yield a sentence about models with random weights, if that limits what is shown."""
        names = [model.alias for model in record.config.models if model.weights == "random"]
        if names and self.about_weights:
            yield say(
                "{{ names|names }} {{ names|have }} random weights: statements about "
                "{{ it }} hold for the architecture before any training.",
                names=names,
                it="it" if len(names) == 1 else "them",
            )

    def _declared_parts(self) -> list[Section | Overview]:
        """Return the parts with columns that are declared here, not taken from a chapter."""
        parts: list[Section | Overview] = []
        for section in self.sections:
            if isinstance(section, Section):
                parts.append(section)
        if isinstance(self.glance, Overview):
            parts.append(self.glance)
        return parts

    def _parts(
        self, record: Any, claims: Sequence[Claim], picture: FigureSpec | None
    ) -> Iterator[page.Section]:
        """Yield the sections in order, without the figure that the first page shows."""
        for section in self.sections:
            for part in _finished_sections(section, record, claims):
                yield part if picture is None else _without_figure(part, picture.name)

    def _reconciling_part(self, record: Any) -> Iterator[page.Section]:
        """Yield a folded part on numbers that differ between the parts of the report."""
        sentences = _as_sentences(self.reconciles(record))
        if sentences:
            yield page.Section("Numbers that differ between chapters", sentences)

    def _picture(self, record: Any) -> FigureSpec | None:
        if self.picture is None:
            return None
        if isinstance(self.picture, Chart):
            return drawn(self.picture, record)
        return self.picture(record)

    def _glance_table(self, record: Any, claims: Sequence[Claim]) -> Table | None:
        if callable(self.glance):
            return self.glance(record)
        if isinstance(self.glance, Overview):
            return _overview(self.glance, record)
        return _metrics_table(self.glance, record, claims)


def _without_repeated_leads(claims: Iterable[Claim]) -> Iterator[Sentence]:
    """Yield the sentences of claims. A question is named once if several in a row answer it."""
    previous_lead = ""
    for claim in claims:
        lead = claim.lead
        if lead == previous_lead:
            lead = ""
        yield Sentence(claim.says, claim.place, lead)
        previous_lead = claim.lead


def _as_sentences(texts: Iterable[str | Sentence]) -> tuple[Sentence, ...]:
    return tuple(text if isinstance(text, Sentence) else Sentence(text) for text in texts)


def _with_next_steps(claims: Iterable[Claim], record: Record) -> tuple[Claim, ...]:
    """Add a hypothesis and the command that tests it to claims that fail or surprise."""
    completed = []
    for claim in claims:
        if needs_a_next_step(claim) and not claim.next_step:
            claim = replace(claim, next_step=next_step(claim, record.config))
        completed.append(claim)
    return tuple(completed)


def _to_test(claims: Iterable[Claim], *, most: int) -> tuple[Sentence, ...]:
    """Return the next steps of claims that fail or surprise, without repetition, urgent first."""
    steps = []
    for claim in sorted(claims, key=lambda claim: urgency(claim.state)):
        if claim.next_step and needs_a_next_step(claim):
            steps.append(claim.next_step)
    different_steps = list(dict.fromkeys(steps))
    return _as_sentences(different_steps[:most])


def _without_repeated_steps(
    sections: Iterable[page.Section], steps: Iterable[Sentence]
) -> tuple[page.Section, ...]:
    """Return sections without next steps that the page has already.

    steps: those of the first page.
    """
    known_steps = set(steps)
    shortened = []
    for section in sections:
        new_steps = tuple(step for step in section.next if step not in known_steps)
        known_steps.update(new_steps)
        shortened.append(replace(section, next=new_steps))
    return tuple(shortened)


def drawn(picture: Chart, record: Any) -> FigureSpec | None:
    """Return the figure of the first page, or its first sheet; None if it has no rows."""

    def is_on_first_sheet(row: Any) -> bool:
        return picture.only(row) and not getattr(row, "sheet", 0)

    return next(_figures(replace(picture, only=is_on_first_sheet), record, ()), None)


def _without_figure(part: page.Section, name: str) -> page.Section:
    """Return a section without the figure of that name."""
    return replace(part, figures=tuple(figure for figure in part.figures if figure.name != name))


def _protect(text: str) -> str:
    return protected(visible(text))


def rows_of(rows: Rows, record: Any) -> Sequence[Any]:
    """Return the rows that a section or a chart is about."""
    if isinstance(rows, str):
        table: Sequence[Any] = getattr(record, rows)
        return table
    return tuple(rows(record))


def _finished_sections(
    section: Section | Callable[[Any], Iterator[page.Section]], record: Any, claims: Sequence[Claim]
) -> Iterator[page.Section]:
    """Yield a declared section filled by the record, or the parts that a function returns."""
    if not isinstance(section, Section):
        yield from section(record)
        return
    part = build_section(section, record, claims)
    if part is not None:
        yield part


def build_section(
    section: Section, record: Any, claims: Sequence[Claim] = (), rows: Sequence[Any] | None = None
) -> page.Section | None:
    """Return a section of a record, or None if it has no rows and no sentence without them.

    rows: the rows to show instead of those of the section.
    """
    if rows is None:
        rows = rows_of(section.rows, record)
    if not rows and not section.without:
        return None
    if section.order is not None:
        rows = sorted(rows, key=section.order)
    figures: list[FigureSpec] = []
    for chart in section.charts:
        figures += _figures(chart, record, rows)
    claims_about = [claim for claim in claims if claim.question in section.about]
    return page.Section(
        title=say(section.question, rows=rows, record=record),
        sentences=_as_sentences(filter(None, _sentences(section, rows, record))),
        tables=tuple(_table(section, rows, record)),
        figures=tuple(figures),
        panels=tuple(section.panels(record)),
        step=section.step,
        status=overall_verdict(claims_about),
        next=_to_test(claims_about, most=1),
    )


def _sentences(section: Section, rows: Sequence[Any], record: Any) -> Iterator[str]:
    if not rows:
        yield section.without
        return
    if not isinstance(section.opening, str):
        yield section.opening(record)
    elif section.opening:
        yield say(section.opening, rows=rows, first=rows[0], record=record)
    if section.says:
        most = SAID
        if section.opening:
            most -= 1
        for row in rows[:most]:
            yield say_row(section.says, row, section.otherwise)


def say_row(words: Template, row: Any, otherwise: str = "") -> str:
    """Return the sentence of a row, or `otherwise` if a column that the sentence needs is None."""
    template = words if isinstance(words, str) else words(row)
    if not template:
        return ""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    needed_names = meta.find_undeclared_variables(environment().parse(template))
    if any(name in values and values[name] is None for name in needed_names):
        template = otherwise
    return say(template, row=row, **values)


def _figures(chart: Chart, record: Any, rows: Sequence[Any]) -> Iterator[FigureSpec]:
    """Yield the figure of a chart, or one for each value of a field; none without rows.

    rows: the rows of the section, which a chart draws unless it names others.
    """
    groups: dict[Any, list[Any]] = {}
    for row in filter(chart.only, _rows_of_chart(chart, record, rows)):
        value = getattr(row, chart.each) if chart.each else None
        groups.setdefault(value, []).append(row)
    for value, group in groups.items():  # a figure each
        name = chart.name
        if len(groups) > 1:
            name += f"_{value}"
        title = say(chart.title, rows=group, first=group[0], record=record)
        caption = say(chart.caption, rows=group, first=group[0], record=record)
        drawn_data = record if chart.whole else group
        draw = partial(chart.draw, drawn_data, title)
        yield FigureSpec(name, caption, draw, alt=title or caption)


def _rows_of_chart(chart: Chart, record: Any, section_rows: Sequence[Any]) -> Sequence[Any]:
    """Return the rows that a chart may draw: the record, its rows, or those of the section."""
    if chart.whole:
        return [record]  # for `only`, which then takes the record
    if chart.rows:
        return rows_of(chart.rows, record)
    return section_rows


def _table(section: Section | Overview, rows: Sequence[Any], record: Record) -> Iterator[Table]:
    """Yield the table of a section; none without columns or rows."""
    if not section.columns or not rows:
        return
    declared = columns(type(rows[0]))
    shown_columns = {}
    for name in section.columns:
        shown_columns[name] = declared.get(name) or column_of_property(name, rows[0])
    yield table_of(
        rows[:ROWS], shown_columns, of=len(rows), file=_table_file(section, rows[0], record)
    )


def _table_file(section: Section | Overview, row: Any, record: Record) -> str:
    """Return the CSV file of the record that holds such rows, "" if none does."""
    # rows of a property are in no file of its name
    if isinstance(section.rows, str) and section.rows in record.tables:
        return record.table_file(section.rows)
    for name, table in record.tables.items():
        if table and type(table[0]) is type(row):
            return record.table_file(name)
    return ""


def _overview(overview: Overview, record: Any) -> Table | None:
    rows = rows_of(overview.rows, record)
    return next(_table(overview, rows, record), None)


def _metrics_table(glances: Sequence[Glance], record: Any, claims: Sequence[Claim]) -> Table | None:
    """Return a table with a row for each metric and a column for each model; failing rows first."""
    names = ["metric", *map(finalize, record.aliases)]
    if len(record.aliases) == 2:
        names.append("difference")
    names.append("status")
    lines: list[list[Cell]] = []
    for glance in glances:
        lines += _glance_line(glance, record, claims)
    if not lines:
        return None
    lines.sort(key=lambda line: urgency(str(line[-1] or "")))  # the status is last
    lines = lines[:ROWS]
    shown_columns = [0]  # the names of the metrics, and columns with a value
    for index in range(1, len(names)):
        if any(line[index] is not None for line in lines):
            shown_columns.append(index)
    rows = [tuple(line[index] for index in shown_columns) for line in lines]
    return Table(
        caption="", columns=tuple(names[index] for index in shown_columns), rows=tuple(rows)
    )


def _glance_line(glance: Glance, record: Any, claims: Sequence[Claim]) -> Iterator[list[Cell]]:
    """Yield one line of the table: the title, a value for each model, the difference, the status.

    Nothing is yielded if no model has a value. Only two models have a difference.
    """
    rows = rows_of(glance.table, record)
    if not rows:
        return
    values = {}  # by model
    for row in rows:
        value = getattr(row, glance.column)
        if glance.key:
            value = value.get(glance.key)
        values[row.model] = value
    if all(value is None for value in values.values()):
        return
    column = columns(type(rows[0]))[glance.column]
    line: list[Cell] = [glance.title or column.title]
    line += [cell(values.get(model), column) for model in record.aliases]
    if len(record.aliases) == 2:
        difference = None
        if glance.difference:
            difference = glance.difference(record)
        line.append(None if difference is None else in_points(difference))
    status = None
    if glance.question:
        verdict = overall_verdict(claim for claim in claims if claim.question == glance.question)
        if verdict is not None:
            status = verdict.words
    line.append(status)
    yield line


def urgency(status: str | None) -> int:
    """Return the rank of a status by its urgency; 0 is the most urgent, no status comes last.

    status: a state in ORDER, with or without ": reason".
    """
    state = (status or "").partition(":")[0]
    return ORDER.index(state) if state in ORDER else len(ORDER)


def _terms(sections: Sequence[Section | Overview], record: Any) -> Iterator[Term]:
    """Yield the terms of the columns that are shown."""
    for section in sections:
        rows = rows_of(section.rows, record)
        if not rows or not hasattr(rows[0], "__dataclass_fields__"):
            continue
        declared = columns(type(rows[0]))
        for name in section.columns:
            if name in declared and declared[name].term:
                yield Term(declared[name].title, declared[name].term)


def _help(package: str, definitions: Sequence[tuple[str, str]]) -> Iterator[page.Section]:
    """Yield a folded part for each heading of a command's help.md, and the definitions."""
    for title, paragraphs in help_of(package).items():
        yield page.Section(title, _as_sentences(paragraphs))
    if definitions:
        # no need to escape them: vitlens writes them, in registries and columns
        lines = [f"**{name}**: {text}" for name, text in definitions]
        yield page.Section("Definitions", _as_sentences(lines))
