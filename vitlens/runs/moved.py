"""Commands in commands/, as the study takes them: their documents as sections and figures of the old kind."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from vitlens.commands.registry import COMMANDS
from vitlens.commands.scaffold.displayed import for_figures, for_sentences
from vitlens.commands.scaffold.publish import read, unprotect
from vitlens.files import RunRecord
from vitlens.runs.report import Drawn
from vitlens.runs.sections import Section, Table


def draw(run: RunRecord) -> Iterator[Drawn]:
    """The figures of a chapter."""
    if run.command not in COMMANDS:
        yield from import_module(f"vitlens.runs.{run.command}").draw(for_figures(run))
        return
    for spec in COMMANDS[run.command].report(read(run)).figures:
        figure = spec.draw()
        unprotect(figure)
        yield Drawn(spec.name, figure, spec.caption)


def tell(run: RunRecord) -> list[Section]:
    """The sections of a chapter."""
    if run.command not in COMMANDS:
        found: list[Section] = import_module(f"vitlens.runs.{run.command}").tell(for_sentences(run))
        return found
    document = COMMANDS[run.command].report(read(run))
    sections = [
        Section(
            section.title,
            tuple(sentence.text for sentence in section.sentences),
            tuple(_table(table) for table in section.tables),
            tuple(figure.name for figure in section.figures),
        )
        for section in document.sections
    ]
    return [*sections, Section("Limits", tuple(sentence.text for sentence in document.limits))]


def _table(table: Any) -> Table:
    return Table(table.caption, [dict(zip(table.columns, row)) for row in table.rows])
