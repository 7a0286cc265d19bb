"""The options of a command as tables, read from its options dataclass."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from vitlens.commands.run.flags import Flag, flags_of
from vitlens.commands.run.options import ModelOptions, RunOptions

SHARED: Final = (ModelOptions, RunOptions)
Option = tuple["dataclasses.Field[Any]", Any, Flag]


def own_options(kind: type) -> Iterator[Option]:
    """Yield the options of a dataclass and of the bundles in it, without those that all commands
    share.
    """
    bundles = []
    for field, annotation, flag in flags_of(kind):
        if flag is not None:
            yield field, annotation, flag
        elif annotation not in SHARED:
            bundles.append(annotation)
    for bundle in bundles:
        yield from own_options(bundle)


def shared_bundles(kind: type) -> tuple[type, ...]:
    """Return which of the shared bundles a command takes."""
    return tuple(
        annotation
        for _, annotation, flag in flags_of(kind)
        if flag is None and annotation in SHARED
    )


def tables(options: Iterable[Option], *, level: int = 3) -> str:
    """Tables of arguments and options under the headings that --help shows; "" for none."""
    panels: dict[str, list[Option]] = {}
    for field, annotation, flag in options:
        title = flag.panel or ""  # arguments, and the options that stand first in --help
        panels.setdefault(title, []).append((field, annotation, flag))
    return "\n\n".join(_table(title, rows, level) for title, rows in panels.items())


def _table(title: str, rows: Iterable[Option], level: int) -> str:
    head = f"{'#' * level} {title}\n\n" if title else ""
    head += "| option | what it does | default |\n| --- | --- | --- |\n"
    return head + "\n".join(
        f"| {_name(*row)} | {_plain(row[2].help)} | {_default(row[0], row[2])} |" for row in rows
    )


def _name(field: "dataclasses.Field[Any]", annotation: Any, flag: Flag) -> str:
    if not flag.name:
        required = field.default is dataclasses.MISSING
        return f"`{flag.metavar}`" if required else f"`[{flag.metavar}]`"
    value = _value(annotation, flag)
    return f"`{flag.name}{' ' if value else ''}{value}`".replace("|", "\\|")


def _value(annotation: Any, flag: Flag) -> str:
    """Return what is typed after an option: its metavar, its choices, or a word for its type."""
    if flag.metavar:
        return flag.metavar
    kind = _plain_type(annotation)
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return {bool: "", int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def _plain_type(annotation: Any) -> Any:
    """Return a type without Annotated and None."""
    if get_origin(annotation) is Annotated:
        return _plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        [kind] = [kind for kind in get_args(annotation) if kind is not NoneType]
        return _plain_type(kind)
    return annotation


def _default(field: "dataclasses.Field[Any]", flag: Flag) -> str:
    if isinstance(flag.shown, str):
        return flag.shown
    value = field.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if not flag.shown or value is None or value is dataclasses.MISSING or value == ():
        return ""
    return f"`{','.join(map(str, value)) if isinstance(value, tuple) else value}`"


def _plain(text: str) -> str:
    """Return a help text within a cell: its bars escaped, and its paragraphs on one line."""
    return " ".join(text.split()).replace("|", "\\|")
