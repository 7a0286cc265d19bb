"""Options of commands as fields of dataclasses; free of torch and of Typer.

A command's options are one frozen dataclass. Each field says in its metadata what its option is
called, what its help is and how its text is read; `vitlens.cli.build` makes the command line of it.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_type_hints

from vitlens.commands.run.parsing import one_of

_KEY: Final = "flag"
Completion = Literal["model", "data", "kind"]


@dataclass(frozen=True)
class Flag:
    """The option of one field, or its argument if the name is empty.

    name: "--epsilon", or "--probe/--no-probe" for a switch.
    help: the text in --help.
    metavar: the value in --help, "N".
    panel: the heading in --help.
    parse: for a type that Typer cannot read, returns the value of the option's name and the typed
        text.
    low, high: bounds of a number.
    shown: True to show the default in --help, False to hide it, or the default in words.
    complete: what the shell completes.
    """

    name: str
    help: str
    metavar: str | None = None
    panel: str | None = None
    parse: Callable[[str, str], Any] | None = None
    low: float | int | None = None
    high: float | int | None = None
    shown: str | bool = True
    complete: Completion | None = None


def option(name: str, help: str, *, default: Any = None, **more: Any) -> Any:
    """Return a field that an option sets.

    more: the other fields of Flag.
    """
    return dataclasses.field(default=default, metadata={_KEY: Flag(name, help, **more)})


def argument(metavar: str, help: str, *, default: Any = MISSING, **more: Any) -> Any:
    """Return a field that an argument sets."""
    return dataclasses.field(
        default=default, metadata={_KEY: Flag("", help, metavar, shown=False, **more)}
    )


def choices(name: str, help: str, allowed: Iterable[str], *, default: Any, **more: Any) -> Any:
    """Return a field of several names, typed as a comma-separated list.

    allowed: the names, or a registry, which is read when the option is parsed.
    """

    def parse(option: str, text: str) -> tuple[str, ...]:
        return one_of(option, text, tuple(allowed))

    more.setdefault("metavar", "LIST")
    return option(name, help, default=default, parse=parse, **more)


def bundle(kind: type) -> Any:
    """Return a field that is itself a dataclass of options."""
    return dataclasses.field(default_factory=kind)


def flags_of(kind: type) -> "list[tuple[dataclasses.Field[Any], Any, Flag | None]]":
    """Return the fields of an options dataclass, with their types and flags.

    Last the bundles, whose flag is None.
    """
    hints = get_type_hints(kind)
    flags = []
    bundles = []
    for field in dataclasses.fields(kind):
        type_of_field = hints[field.name]
        flag = field.metadata.get(_KEY)
        if flag is not None:
            flags.append((field, type_of_field, flag))
        elif dataclasses.is_dataclass(type_of_field):
            bundles.append((field, type_of_field, None))
    return [*flags, *bundles]


def typed(options: Any) -> Iterator[str]:
    """Yield the words that a user types for these options.

    These are arguments, and options that differ from their default.
    """
    yield from typed_again(type(options), dataclasses.asdict(options))


def typed_again(kind: type, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words that a user types for the options of an earlier run.

    kind: the dataclass of the options.
    values: the options by field, as in config.json; a missing one has its default.
    """
    for field, type_of_field, flag in flags_of(kind):
        value = values.get(field.name)
        if flag is not None:
            yield from _typed_value(flag, value, field.default)
        elif isinstance(value, Mapping):  # a bundle
            yield from typed_again(type_of_field, value)


def _typed_value(flag: Flag, value: Any, default: Any) -> Iterator[str]:
    """Yield the words for one option; none for its default."""
    value = _with_tuples(value)
    is_default_path = isinstance(default, Path) and str(value) == str(default)  # JSON has no paths
    if value in (default, None, ()) or is_default_path:
        return
    if isinstance(value, bool):
        on, _, off = flag.name.partition("/")
        yield on if value else off
        return
    # one size, typed 32x48; all other tuples are lists with commas
    separator = "x" if flag.metavar == "N|HxW" else ","
    # a tuple without a parser is an option typed several times
    is_repeated = isinstance(value, tuple) and flag.parse is None
    items = value if is_repeated else (value,)
    for item in items:
        if flag.name:  # an argument has none
            yield flag.name
        yield shlex.quote(as_text(item, separator))


def _with_tuples(value: Any) -> Any:
    """Return a value with tuples in place of lists, as JSON has no tuples."""
    if isinstance(value, list | tuple):
        return tuple(_with_tuples(item) for item in value)
    return value


def as_text(value: Any, separator: str = ",") -> str:
    """Return a value as it would be typed.

    separator: between the items of a mapping or tuple. A tuple in a tuple is a size, "32x48".
    """
    if isinstance(value, Mapping):
        return separator.join(f"{name}={as_text(item)}" for name, item in value.items())
    if isinstance(value, tuple):
        return separator.join(as_text(item, "x") for item in value)
    if isinstance(value, float):
        rounded = f"{value:g}"  # 6 digits, without the ".0" of whole numbers
        return rounded if float(rounded) == value else repr(value)
    return str(value)
