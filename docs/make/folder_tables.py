"""What a command's folder holds, read from the declaration in its record.py."""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping

from vitlens.commands.registry import COMMANDS, Command
from vitlens.commands.run.chapters import Chaptered
from vitlens.record import Contents


def folder_section(command: Command) -> str:
    """Tables, metrics and arrays, each with what it is."""
    contents = command.contents
    chapters = ""
    if _runs_chapters(command):
        within = [other for other in COMMANDS.values() if _is_chapter(other, command)]
        contents = _without(contents, (other.contents for other in within))
        links = ", ".join(f"[{other.word}]({other.word}.md)" for other in within)
        chapters = (
            "Each chapter is a folder of its own in `chapters/`, and its metrics are "
            f"copied here: {links}.\n\n"
        )
    parts = (
        _records(command),
        _tables(contents.tables),
        _metrics(contents),
        _arrays(contents.arrays),
    )
    return chapters + "\n\n".join(part for part in parts if part)


def _is_chapter(other: Command, command: Command) -> bool:
    """Return True if all metrics of another command are also those of a command that runs it."""
    if other.word == command.word or not other.reports:
        return False
    names = {metric.pattern for metric in other.contents.metrics}
    return (
        bool(names)
        and not _runs_chapters(other)
        and names <= {metric.pattern for metric in command.contents.metrics}
    )


def _runs_chapters(command: Command) -> bool:
    return command.reports and any(issubclass(record, Chaptered) for record in command.records)


def _without(contents: Contents, others: Iterable[Contents]) -> Contents:
    known = {metric.pattern for other in others for metric in other.metrics}
    return dataclasses.replace(
        contents, metrics=tuple(m for m in contents.metrics if m.pattern not in known)
    )


def _records(command: Command) -> str:
    """Return which tables each class of record has; "" for a command with one class."""
    if len(command.records) == 1:
        return ""
    lines = []
    for record in command.records:
        names = ", ".join(f"`{name}`" for name in record.contents().tables)
        lines.append(f"- {_described(record).removesuffix('.')}: {names}")
    return "A run writes one of these sets of tables:\n\n" + "\n".join(lines)


def _tables(tables: Mapping[str, type]) -> str:
    rows = [f"| `{name}` | {_described(row)} | {_columns(row)} |" for name, row in tables.items()]
    if not rows:
        return ""
    head = "Tables of `results.json`:\n\n| table | one row | columns |\n| --- | --- | --- |\n"
    return head + "\n".join(rows)


def _columns(row: type) -> str:
    return ", ".join(f"`{field.name}`" for field in dataclasses.fields(row))


def _metrics(contents: Contents) -> str:
    names = list(dict.fromkeys(metric.pattern for metric in contents.metrics))
    if not names:
        return ""
    listed = "\n".join(f"- `{name}`" for name in names)
    return (
        f"Metrics of `results.json`, each with its 95 % interval where one is defined:\n\n{listed}"
    )


def _arrays(arrays: Mapping[str, type]) -> str:
    rows = [f"| `arrays/{name}.npz` | {_described(kind)} |" for name, kind in arrays.items()]
    return "Arrays:\n\n| file | what is in it |\n| --- | --- |\n" + "\n".join(rows) if rows else ""


def _described(kind: type) -> str:
    """Return the docstring of a row or of arrays, on one line."""
    text = inspect.getdoc(kind) or ""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
