"""A document as markdown for GitHub and the terminal, and its first page in a few lines."""

import re
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import quote, unquote

from vitlens.display import protected, unprotected, visible
from vitlens.record import ModelEntry, Record
from vitlens.report.document import Document, FigureSpec, FirstPage, Section, Sentence, Table
from vitlens.report.escape import as_alternative, as_cell, as_code, as_code_block, as_markdown
from vitlens.report.numbers import in_time, in_words
from vitlens.report.prose import finalize

UNFINISHED: Final = {
    "running": "This run has not finished; what follows is what it had written.",
    "failed": "This run failed; what follows is what it had written.",
    "interrupted": "This run was interrupted; what follows is what it had written.",
}

# in the lines for the terminal; the report has all
_SHOWN = 3  # most answers
_NUMBERS = 6  # most rows of the table

# a figure, as `_figure` writes it
_FIGURE: Final = re.compile(
    r"^!\[.*\]\(figures/([^()\s/]+)\.png\)\n\n\*Figure \d+\. ", re.MULTILINE
)


def markdown(document: Document, record: Record) -> str:
    """Return a whole report: first page, sections, folded parts, and the commands that repeat it.

    record: the record of the run. Its settings and models are listed.
    """
    numbers = {figure.name: index for index, figure in enumerate(document.figures, start=1)}
    blocks = [f"# {as_markdown(document.title)}"]
    if record.status in UNFINISHED:
        blocks.append(f"> {UNFINISHED[record.status]}")
    blocks += _first_page(document.first, record, numbers)
    blocks += _texts(document.preface)
    for section in document.sections:
        blocks += _section(section, numbers)
    for part in document.folded:
        blocks += _folded(part)
    blocks += _repeat(record)
    return "\n\n".join(blocks) + "\n"


def _first_page(first: FirstPage, record: Record, numbers: dict[str, int]) -> Iterator[str]:
    """Yield the answer, one picture, one table, and what the report does not show.

    numbers: the numbers of figures by name.
    """
    yield from _texts(first.answer)
    if first.picture is not None:
        yield _figure(first.picture, numbers[first.picture.name])
    if first.glance is not None:
        yield _table(first.glance)
    yield from _list("What this does not show", first.unknown)
    yield from _to_test(first.next)
    yield from _texts(first.known_answer)
    if record.config.command_line:
        parts = [as_code(record.config.command_line)]
        if duration := took(record):
            parts.append(duration)
        yield "; ".join(parts)


def portfolio_markdown(document: Document) -> str:
    """Return a report without a first page: its title, its preface and its sections."""
    numbers = {figure.name: index for index, figure in enumerate(document.figures, start=1)}
    blocks = [f"# {as_markdown(document.title)}", *_texts(document.preface)]
    for section in document.sections:
        blocks += _section(section, numbers)
    return "\n\n".join(blocks) + "\n"


def _section(section: Section, numbers: dict[str, int]) -> Iterator[str]:
    yield f"{'#' * section.level} {as_markdown(section.title)}"
    if section.status is not None:
        status = section.status
        yield f"Verdict: **{status.state}** – {as_markdown(status.reason)}."
    yield from _texts(section.sentences)
    for figure in section.figures:
        yield _figure(figure, numbers[figure.name])
    for table in section.tables:
        yield _table(table)
    yield from _to_test(section.next)
    if section.more:
        yield f"[The whole chapter]({quote(section.more)})"


def _folded(part: Section) -> Iterator[str]:
    yield f"<details><summary>{as_markdown(part.title)}</summary>"
    yield from _texts(part.sentences)
    yield "</details>"


def _to_test(sentences: tuple[Sentence, ...]) -> Iterator[str]:
    """Yield hypotheses with the commands that test them, under a heading."""
    yield from _list("What to test next", sentences)


def _list(heading: str, sentences: tuple[Sentence, ...]) -> Iterator[str]:
    """Yield a heading and an item for each sentence; nothing without sentences."""
    if sentences:
        yield f"**{heading}**"
        yield "\n".join(f"- {text}" for text in _texts(sentences))


def _texts(sentences: tuple[Sentence, ...]) -> Iterator[str]:
    for sentence in sentences:
        yield as_markdown(sentence.whole)


def _figure(figure: FigureSpec, number: int) -> str:
    alt = as_alternative(figure.alt or figure.name.replace("_", " "))
    return (
        f"![{alt}](figures/{quote(figure.name)}.png)\n\n*Figure {number}. "
        f"{as_markdown(figure.caption)}*"
    )


def figures_shown(text: str) -> tuple[str, ...]:
    """Return the names of the numbered figures in a report that `markdown` wrote."""
    return tuple(map(unquote, _FIGURE.findall(text)))


def _table(table: Table) -> str:
    if not table.rows:
        return f"**{as_markdown(table.caption)}**: none." if table.caption else "none."
    lines = [_row(table.columns)]
    rules = ["---:" if is_number else "---" for is_number in table.numeric]
    lines.append(f"| {' | '.join(rules)} |")
    for row in table.rows:
        lines.append(_row(map(in_words, row)))
    text = "\n".join(lines)
    if table.caption:
        return f"**{as_markdown(table.caption)}**\n\n{text}"
    return text


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(as_cell, cells))} |"


def _repeat(record: Record) -> Iterator[str]:
    """Yield the command that repeats the run, its settings and its models."""
    yield "## Repeat it"
    if command_line := record.config.command_line:
        yield as_code_block(command_line)
    if facts := repeated_words(record):
        yield as_markdown(facts)
    for model in record.config.models:
        yield f"- {as_markdown(provenance(model))}"
    arrays = "`chapters/*/arrays/`" if getattr(record, "chapters", ()) else "`arrays/`"
    yield (
        "All numbers are in `results.json`, the settings in `config.json`, the data of the "
        f"figures in {arrays}."
    )
    yield as_markdown(citation(record))


def took(record: Record) -> str:
    """Return the duration and the machine of a finished run, "" if unknown."""
    if record.status != "done" or not record.seconds:
        return ""
    duration = in_time(record.seconds)
    if not record.hardware:
        return duration
    return f"{duration} on {finalize(record.hardware)}"


def repeated_words(record: Record) -> str:
    """Return the versions and settings of a run in one sentence, "" if all are unknown."""
    config = record.config
    facts = [f"{finalize(name)} {finalize(version)}" for name, version in config.versions.items()]
    settings = {"device": config.device, "precision": config.precision, "seed": config.seed}
    for setting, value in settings.items():
        if value not in ("", None):
            facts.append(f"{setting} {finalize(str(value))}")
    if duration := took(record):
        facts.append(f"took {duration}")
    return f"{', '.join(facts)}." if facts else ""


def citation(record: Record) -> str:
    """Return a sentence about how to cite a report."""
    software = f"vitlens {finalize(record.config.versions.get('vitlens', ''))}".rstrip()
    return (
        f"To cite: The vitlens authors, {software}, github.com/vitlens/vitlens, and the papers of "
        "the methods shown (vitlens/report/references.bib there)."
    )


def provenance(model: ModelEntry) -> str:
    """Return the origin of a model's weights in one sentence, for `as_markdown`."""
    facts = [finalize(model.name), f"weights: {finalize(model.weights)}"]
    if model.sha256:
        facts.append(f"SHA-256 `{protected(visible(model.sha256[:16]))}…`")
    facts.append(f"{model.parameters:,} parameters")
    notes = "".join(f"; {protected(visible(note))}" for note in model.notes)
    return f"{finalize(model.alias)}: {', '.join(facts)}{notes}."


def summary_lines(document: Document) -> Iterator[str]:
    """Yield the title, and the answers and the table of the first page."""
    first = document.first
    yield without_marks(document.title)
    for sentence in (*first.answer[:_SHOWN], *first.known_answer):
        yield f"  {without_marks(sentence.whole)}"
    if first.glance is not None:
        yield from _table_lines(first.glance)


def _table_lines(table: Table) -> Iterator[str]:
    """Yield the first rows of a table, with first cells of one width.

    Dashes, which stand for no value, are left out.
    """
    rows = []
    for row in table.rows[:_NUMBERS]:
        rows.append([without_marks(in_words(cell)) for cell in row])
    width = max((len(row[0]) for row in rows), default=0)
    for name, *cells in rows:
        values = [cell for cell in cells if cell != "–"]
        yield f"  {name:<{width}}  {'  '.join(values)}"


def without_marks(text: str) -> str:
    """Return a text of a report without the marks of Markdown."""
    return unprotected(text.replace("**", "").replace("`", ""))
