"""Parsing of the command line: `--images a.jpg b.jpg`, unknown commands, the whole line as it was
typed.
"""

import shlex
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

from vitlens.commands.registry import COMMANDS
from vitlens.errors import InputError, Interrupted, UnknownNameError

_MODEL_FILE: Final = "--model-file"
_MODELS: Final = ("model", "models")  # the names of the argument MODEL
COMMAND_LINE: ContextVar[str] = ContextVar(
    "command_line", default=""
)  # as it was typed, for config.json


class Commands(TyperGroup):
    """All commands: keeps the line as it was typed, and suggests the nearest command for an unknown
    one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the line, then parse it."""
        COMMAND_LINE.set(shlex.join(["vitlens", *args]))
        _refuse_empty(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names. Raises UnknownNameError."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UnknownNameError("command", args[0], COMMANDS, hint="vitlens --help")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises Interrupted on Ctrl-C, InputError for EOFError: Typer would exit
        silently.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted(": ".join(["interrupted", *map(str, stop.args)])) from stop
        except EOFError as end:
            raise InputError(
                f"expected whole files, found one that ends too early: {end}; --debug shows it"
            ) from end


class OneCommand(TyperCommand):
    """One command: `--images` takes every word up to the next option; --model-file alone is the
    MODEL.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the line, with one --images before each image, and with --model-file's models where
        no MODEL is named.

        Raises InputError for a --model-file that no MODEL names.
        """
        words = list(one_option_per_image(args))
        files = list(dict.fromkeys(values_of(_MODEL_FILE, args)))
        argument = next((param for param in self.params if param.name in _MODELS), None)
        if not files or argument is None:
            return super().parse_args(ctx, words)
        required = argument.required
        argument.required = False
        try:
            rest = super().parse_args(ctx, words)
        finally:
            argument.required = required
        named = ctx.params.get(argument.name)
        if not named:
            if argument.nargs == 1 and len(files) > 1:
                raise InputError(
                    f"expected one MODEL, found {len(files)} of {_MODEL_FILE}; name one"
                )
            ctx.params[argument.name] = files[0] if argument.nargs == 1 else files
            return rest
        texts = [named] if isinstance(named, str) else named
        trained = any(Path(text.rpartition("=")[2].partition("@")[0]).exists() for text in texts)
        for file in files:  # a folder or weights file may have been trained from it
            if not trained and not any(text == file or text.endswith(f"={file}") for text in texts):
                raise InputError(
                    f"expected MODEL {file} beside {_MODEL_FILE} {file}, found {', '.join(texts)}; "
                    "name it, too"
                )
        return rest


def values_of(option: str, words: Iterable[str]) -> list[str]:
    """Return the values of an option that the words give, in their order."""
    found = []
    before = ""
    for word in words:
        if before == option:
            found.append(word)
        elif word.startswith(f"{option}="):
            found.append(word.partition("=")[2])
        before = word
    return found


def _refuse_empty(args: list[str]) -> None:
    """Refuse empty values: most come from an unset variable of a script, and as a path one is the
    current folder.
    """
    for before, word in zip(["vitlens", *args], args):
        option, equals, value = word.partition("=")
        if not word.strip() or (option.startswith("--") and equals and not value.strip()):
            after = option if equals else before
            raise InputError(
                f"expected no empty value, found one after {after}; a variable that is not set "
                "makes one"
            )


def one_option_per_image(words: Iterable[str]) -> Iterator[str]:
    """`--images a b --quiet` as `--images a --images b --quiet`, as Typer's options take one value
    each.
    """
    values = None  # how many values --images has had; None outside it
    for word in words:
        if word == "--images":
            values = 0
        elif word.startswith("-") and word != "-":
            values = None
        elif values is not None:
            values += 1
            if values > 1:
                yield "--images"
        yield word
