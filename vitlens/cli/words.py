"""Parsing of the command line: `--images a.jpg b.jpg`, unknown commands, and the typed line."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

from vitlens.commands.registry import COMMANDS
from vitlens.errors import InputError, Interrupted, Terminated, UnknownNameError

_MODEL_FILE: Final = "--model-file"
# the parameter of the argument MODEL: of commands with one model, and with several
_MODELS: Final = ("model", "models")
# the command line as typed, for config.json
COMMAND_LINE: ContextVar[str] = ContextVar("command_line", default="")


class Commands(TyperGroup):
    """All commands, which record the typed line and suggest commands for an unknown one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Record the line, then parse it."""
        COMMAND_LINE.set(shlex.join(["vitlens", *args]))
        _refuse_empty(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names. Raises UnknownNameError."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UnknownNameError("command", args[0], COMMANDS, hint="vitlens --help")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises Interrupted on Ctrl-C and SIGTERM, and InputError for EOFError, on which Typer would
        exit silently.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            message = ": ".join(["interrupted", *map(str, stop.args)])
            # 128 plus the number of the signal, as shells count
            code = 143 if isinstance(stop, Terminated) else 130
            raise Interrupted(message, code) from stop
        except EOFError as end:
            raise InputError(
                f"expected complete files, found one that ends too early: {end}; --debug shows it"
            ) from end


class OneCommand(TyperCommand):
    """One command: `--images` takes all words up to the next option; --model-file may be MODEL."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the line, with one --images per image, and --model-file's models without a MODEL.

        Raises InputError for a --model-file that no MODEL names.
        """
        words = list(one_option_per_image(args))
        files = list(dict.fromkeys(values_of(_MODEL_FILE, args)))  # without repetition
        model_argument: Any = None
        for parameter in self.params:
            if parameter.name in _MODELS:
                model_argument = parameter
        if not files or model_argument is None:
            return super().parse_args(ctx, words)
        # with a --model-file, MODEL may be left out
        required = model_argument.required
        model_argument.required = False
        try:
            remaining_words = super().parse_args(ctx, words)
        finally:
            model_argument.required = required
        typed: str | list[str] | None = ctx.params.get(model_argument.name)
        takes_one = model_argument.nargs == 1
        if typed:
            _require_named(files, [typed] if isinstance(typed, str) else typed)
        elif takes_one and len(files) > 1:
            raise InputError(f"expected one MODEL, found {len(files)} of {_MODEL_FILE}; name one")
        else:
            ctx.params[model_argument.name] = files[0] if takes_one else files
        return remaining_words


def _require_named(files: Iterable[str], models: Sequence[str]) -> None:
    """Raise InputError for a --model-file that no MODEL names.

    If a MODEL is a path, none is required: a folder or weights file may have been trained from the
    code of any of the files.
    """
    if any(_is_path(model) for model in models):
        return
    for file in files:
        is_named = any(model == file or model.endswith(f"={file}") for model in models)
        if not is_named:
            raise InputError(
                f"expected MODEL {file} with {_MODEL_FILE} {file}, found {', '.join(models)}; "
                "name it, too"
            )


def _is_path(text: str) -> bool:
    """Return True if a MODEL, without its alias and weights, is an existing path."""
    _, _, without_alias = text.rpartition("=")
    path, _, _ = without_alias.partition("@")
    return Path(path).exists()


def values_of(option: str, words: Iterable[str]) -> list[str]:
    """Return the values of an option among the words, in their order."""
    values = []
    previous = ""
    for word in words:
        if previous == option:
            values.append(word)
        elif word.startswith(f"{option}="):
            values.append(word.removeprefix(f"{option}="))
        previous = word
    return values


def _refuse_empty(args: list[str]) -> None:
    """Raise InputError for an empty value.

    Most come from an unset variable of a script, and as a path one is the current folder.
    """
    for previous, word in zip(["vitlens", *args], args):  # each word after the one before it
        option, equals, value = word.partition("=")
        is_option_without_value = option.startswith("--") and equals and not value.strip()
        if not word.strip() or is_option_without_value:
            place = option if equals else previous
            raise InputError(
                f"expected no empty value, found one after {place}; an unset variable gives one"
            )


def one_option_per_image(words: Iterable[str]) -> Iterator[str]:
    """Yield `--images a b` as `--images a --images b`, as Typer's options take one value each.

    `--images=a b` becomes `--images=a --images b`.
    """
    value_count = None  # number of values of --images so far; None outside it
    for word in words:
        if word == "--images":
            value_count = 0
        elif word.startswith("--images="):
            value_count = 1
        elif word.startswith("-") and word != "-":  # "-" is no option
            value_count = None
        elif value_count is not None:
            value_count += 1
            if value_count > 1:
                yield "--images"
        yield word
