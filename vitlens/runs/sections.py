"""Results to markdown that reads well on GitHub and in a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from vitlens.display import as_cell, as_code_block, as_markdown
from vitlens.errors import InputError
from vitlens.files import RunRecord
from vitlens.report.document import Cell
from vitlens.report.numbers import in_time, in_words, number
from vitlens.uncertainty import Estimate

__all__ = ["Cell", "Section", "Table", "in_time", "in_words", "markdown", "metrics", "number"]

_UNFINISHED = {
    "running": "This run has not finished; what follows is what it had written.",
    "failed": "This run failed; what follows is what it had written.",
    "interrupted": "This run was interrupted; what follows is what it had written.",
}


@dataclass(frozen=True)
class Table:
    """Rows of named cells under a caption; columns are those of the rows, in the order in which they appear."""

    caption: str
    rows: Sequence[Mapping[str, Cell]]


@dataclass(frozen=True)
class Section:
    """One part of a report: figures (by name) come first, then paragraphs, then tables.

    Of markdown its texts hold **bold** and `code`; all else in them is shown as it stands.

    The first section is the summary and comes before its figures are shown; one titled "Limits" goes last.
    """

    title: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[str, ...] = ()


def metrics(record: RunRecord) -> dict[str, Estimate]:
    """The metrics of a run as estimates, in the order in which they were written."""
    found = record.results["metrics"]
    if not isinstance(found, Mapping):
        raise InputError(f"expected metrics in {record.folder}, found none")
    return {name: _estimate(fields) for name, fields in found.items()}


def _estimate(fields: Mapping[str, object]) -> Estimate:
    value, low, high = (
        None if fields.get(key) is None else float(str(fields[key])) for key in ("value", "low", "high")
    )
    n = fields.get("n")
    if value is None:
        raise InputError(f"expected a metric with a value, found {dict(fields)}")
    return Estimate(value, low, high, n if isinstance(n, int) else None, str(fields.get("unit", "")))


def markdown(record: RunRecord, sections: Sequence[Section], captions: Mapping[str, str]) -> str:
    """A whole report: title, sections with their figures, limits, and how to repeat it.

    captions: of every figure that was drawn, by name; one that no section mentions gets its place before the limits.
    Raises InputError when a section mentions a figure that was not drawn.
    """
    mentioned = [name for section in sections for name in section.figures]
    missing = [name for name in mentioned if name not in captions]
    if missing:
        raise InputError(f"expected figures {', '.join(captions) or 'none'}, found mention of {', '.join(missing)}")
    rest = tuple(name for name in captions if name not in mentioned)
    body = [section for section in sections if section.title != "Limits"]
    body += [Section("Figures", figures=rest)] if rest else []
    body += [section for section in sections if section.title == "Limits"]
    order = {name: index + 1 for index, name in enumerate(name for section in body for name in section.figures)}

    blocks = [f"# {as_markdown(str(record.config.get('title') or record.command))}"]
    if record.status in _UNFINISHED:
        blocks.append(f"> {_UNFINISHED[record.status]}")
    for index, section in enumerate(body):
        figures = [_figure(name, order[name], captions[name]) for name in section.figures]
        paragraphs = [as_markdown(paragraph) for paragraph in section.paragraphs]
        blocks.append(f"## {as_markdown(section.title)}")
        blocks += paragraphs + figures if index == 0 else figures + paragraphs
        blocks += [_table(table) for table in section.tables]
    return "\n\n".join([*blocks, *_repeat(record)]) + "\n"


def _figure(name: str, order: int, caption: str) -> str:
    shown = as_markdown(name.replace("_", " "))
    return f"![{shown}](figures/{quote(name)}.png)\n\n*Figure {order}. {as_markdown(caption)}*"


def _table(table: Table) -> str:
    columns = list(dict.fromkeys(column for row in table.rows for column in row))
    if not columns:
        return f"**{as_markdown(table.caption)}**: none."
    right = [all(isinstance(row.get(column), (int, float, type(None))) for row in table.rows) for column in columns]
    lines = [[as_cell(column) for column in columns], ["---:" if aligned else "---" for aligned in right]]
    lines += [[as_cell(in_words(row.get(column))) for column in columns] for row in table.rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{as_markdown(table.caption)}**\n\n{text}"


def _repeat(record: RunRecord) -> list[str]:
    """What was run, on what, and the command that does it again."""
    config = record.config
    blocks = ["## Repeat it"]
    if config.get("command_line"):
        blocks.append(as_code_block(str(config["command_line"])))
    found = config.get("versions")
    facts = [f"{name} {version}" for name, version in found.items()] if isinstance(found, Mapping) else []
    facts += [f"{word} {config[word]}" for word in ("device", "precision", "seed") if word in config]
    if record.status == "done":
        facts.append(f"took {in_time(float(str(record.results['seconds'])))}")
    blocks += [as_markdown(", ".join(facts) + ".")] if facts else []
    models = config.get("models")
    for model in models if isinstance(models, Sequence) else ():
        blocks.append(_provenance(model))
    blocks.append(
        "All numbers are in `results.json`, the settings in `config.json`, the data of the figures in `arrays/`."
    )
    return blocks


def _provenance(model: Mapping[str, object]) -> str:
    digest = f", SHA-256 `{str(model['sha256'])[:16]}…`" if model.get("sha256") else ""
    notes = model.get("notes")
    said = "".join(f"; {note}" for note in notes) if isinstance(notes, Sequence) else ""
    size = f"{model['parameters']:,} parameters"
    return "- " + as_markdown(f"{model['alias']}: {model['name']}, weights: {model['weights']}{digest}, {size}{said}.")
