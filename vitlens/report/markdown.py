"""A document as markdown that reads well on GitHub and in a terminal; and its first page in lines for the terminal."""

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote, unquote

from vitlens.display import protected, visible
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

_SHOWN = 3  # answers; the report has all
_NUMBERS = 6  # rows of the table

_FIGURE: Final = re.compile(
    r"^!\[.*\]\(figures/([^()\s/]+)\.png\)\n\n\*Figure \d+\. ", re.MULTILINE
)  # as _figure writes it


def markdown(document: Document, record: Record) -> str:
    """Return a whole report: first page, sections with their figures, folded parts, and how to repeat it.

    record: whose settings and models are listed.
    """
    numbers = {figure.name: index for index, figure in enumerate(document.figures, start=1)}
    blocks = [f"# {as_markdown(document.title)}"]
    if record.status in UNFINISHED:
        blocks.append(f"> {UNFINISHED[record.status]}")
    blocks += [*_first(document.first, record, numbers), *_paragraphs(document.preface)]
    for section in document.sections:
        blocks += _section(section, numbers)
    for part in document.folded:
        blocks += [f"<details><summary>{as_markdown(part.title)}</summary>", *_paragraphs(part.sentences), "</details>"]
    return "\n\n".join([*blocks, *_repeat(record)]) + "\n"


def _first(first: FirstPage, record: Record, numbers: dict[str, int]) -> Iterator[str]:
    """Yield the answer, a picture, one table, and what is not known."""
    yield from _paragraphs(first.answer)
    if first.picture is not None:
        yield _figure(first.picture, numbers[first.picture.name])
    if first.glance is not None:
        yield _table(first.glance)
    if first.unknown:
        yield "**What this does not show**"
        yield "\n".join(f"- {as_markdown(sentence.text)}" for sentence in first.unknown)
    yield from _to_test(first.next)
    yield from _paragraphs(first.known_answer)
    if record.config.command_line:
        yield "; ".join(filter(None, (as_code(record.config.command_line), took(record))))


def _section(section: Section, numbers: dict[str, int]) -> Iterator[str]:
    yield f"## {as_markdown(section.title)}"
    if section.status is not None:
        yield f"Verdict: {as_markdown(section.status.words)}."
    yield from _paragraphs(section.sentences)
    yield from (_figure(figure, numbers[figure.name]) for figure in section.figures)
    yield from map(_table, section.tables)
    yield from _to_test(section.next)
    if section.more:
        yield f"[The whole chapter]({quote(section.more)})"


def _to_test(sentences: tuple[Sentence, ...]) -> Iterator[str]:
    """Yield hypotheses with the commands that test them, under a heading."""
    if sentences:
        yield "**What to test next**"
        yield "\n".join(f"- {as_markdown(sentence.text)}" for sentence in sentences)


def _paragraphs(sentences: tuple[Sentence, ...]) -> Iterator[str]:
    return (as_markdown(sentence.text) for sentence in sentences)


def _figure(figure: FigureSpec, number: int) -> str:
    alt = as_alternative(figure.alt or figure.name.replace("_", " "))
    return f"![{alt}](figures/{quote(figure.name)}.png)\n\n*Figure {number}. {as_markdown(figure.caption)}*"


def figures_shown(text: str) -> tuple[str, ...]:
    """Return the names of the figures in a report that `markdown` wrote; pictures that it did not number are none of
    them."""
    return tuple(map(unquote, _FIGURE.findall(text)))


def _table(table: Table) -> str:
    if not table.rows:
        return f"**{as_markdown(table.caption)}**: none."
    lines = [[as_cell(column) for column in table.columns], ["---:" if right else "---" for right in table.numeric]]
    lines += [[as_cell(in_words(cell)) for cell in row] for row in table.rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{as_markdown(table.caption)}**\n\n{text}" if table.caption else text


def _repeat(record: Record) -> Iterator[str]:
    """Yield what was run, on what, and the command that does it again."""
    yield "## Repeat it"
    if command_line := record.config.command_line:
        yield as_code_block(command_line)
    if facts := repeated_words(record):
        yield as_markdown(facts)
    yield from (f"- {as_markdown(provenance(model))}" for model in record.config.models)
    yield "All numbers are in `results.json`, the settings in `config.json`, the data of the figures in `arrays/`."
    yield as_markdown(citation(record))


def took(record: Record) -> str:
    """Return how long a finished run took; "" where that is not known."""
    return in_time(record.seconds) if record.status == "done" and record.seconds else ""


def repeated_words(record: Record) -> str:
    """With what a run was made, in one sentence; "" where nothing is known."""
    config = record.config
    facts = [f"{finalize(name)} {finalize(version)}" for name, version in config.versions.items()]
    settings = {"device": config.device, "precision": config.precision, "seed": config.seed}
    facts += [f"{word} {finalize(str(value))}" for word, value in settings.items() if value not in ("", None)]
    if time := took(record):
        facts.append(f"took {time}")
    return f"{', '.join(facts)}." if facts else ""


def citation(record: Record) -> str:
    """How to cite what made a report."""
    version = finalize(record.config.versions.get("vitlens", ""))
    return (
        f"To cite: The vitlens authors, vitlens{f' {version}' if version else ''}, github.com/vitlens/vitlens, "
        "and the papers of the methods shown (docs/references.md there)."
    )


def provenance(model: ModelEntry) -> str:
    """Return where a model's weights are from, in one sentence for `as_markdown`."""
    digest = f", SHA-256 `{protected(visible(model.sha256[:16]))}…`" if model.sha256 else ""
    notes = "".join(f"; {protected(visible(note))}" for note in model.notes)
    size = f"{model.parameters:,} parameters"
    alias, name, weights = map(finalize, (model.alias, model.name, model.weights))
    return f"{alias}: {name}, weights: {weights}{digest}, {size}{notes}."


def summary_lines(document: Document) -> Iterator[str]:
    """Yield the title, and the answers and the table of the first page."""
    first = document.first
    yield document.title
    for sentence in (*first.answer[:_SHOWN], *first.known_answer):
        yield "  " + sentence.text.replace("**", "").replace("`", "")
    if first.glance is not None and first.glance.rows:
        rows = [tuple(map(in_words, row)) for row in first.glance.rows[:_NUMBERS]]
        wide = max(len(row[0]) for row in rows)
        for row in rows:
            cells = "  ".join(cell.replace("**", "").replace("`", "") for cell in row[1:] if cell != "–")
            yield f"  {row[0]:<{wide}}  {cells}"
