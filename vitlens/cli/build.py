"""Builds the command line of a command from its options: a function that Typer registers.

Typer reads a function's signature. `command_function` builds one whose parameters are the fields of
the options dataclass and of the bundles in it; called, it creates the options from its arguments
and runs the command. Functions that complete words in the shell are free of torch, so that they are
instant; modules that only some lines need are imported there.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_origin

import typer

from vitlens.cli.terminal import print_note, print_result
from vitlens.cli.words import COMMAND_LINE
from vitlens.commands.registry import Command
from vitlens.commands.run.conclusion import Conclusion, conclusion_of
from vitlens.commands.run.flags import Flag, as_text, flags_of

_RUN_PANEL: Final = "Run and report"
_DEBUG: Final = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,  # the boundary in main.py reads it from the command line itself
    annotation=Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_RUN_PANEL),
    ],
)


def complete_model(incomplete: str) -> list[str]:
    """Return the names of each source of models, or its prefix, and the run folders below runs/."""
    from vitlens.models.sources.registry import SOURCES

    names: list[str] = []
    folders: list[str] = []
    for source in SOURCES.values():
        names += source.names
        if source.prefix:
            names.append(source.prefix)
        if source.glob:
            folders += [str(file.parent) for file in Path().glob(source.glob)]
    return [name for name in (*names, *sorted(folders)) if name.startswith(incomplete)]


def complete_kind(incomplete: str) -> list[str]:
    """Return the kinds of study."""
    from vitlens.commands.study.kinds.catalogue import KINDS
    from vitlens.commands.study.options import WHOLE

    return [name for name in (WHOLE, *KINDS) if name.startswith(incomplete)]


def complete_data(incomplete: str) -> list[str]:
    """Return the named sets, and the folders and .npz files in the current folder."""
    from vitlens.data.registry import SETS

    paths = []
    for path in Path().glob(f"{incomplete}*"):
        if path.is_dir() or path.suffix == ".npz":
            paths.append(str(path))
    return [name for name in SETS if name.startswith(incomplete)] + sorted(paths)


_COMPLETIONS: Final = {"model": complete_model, "data": complete_data, "kind": complete_kind}


def command_function(command: Command) -> Callable[..., None]:
    """Return the function that Typer registers for a command.

    Typer calls it with the value of each parameter by name.
    """

    def call(**values: Any) -> None:
        values.pop("debug")
        # wrong values are refused before torch is imported
        options = _options_from(command.options, values)
        _run(command, options)

    parameters = [*_parameters(command.options), _DEBUG]
    call.__name__ = command.word
    call.__doc__ = command.help
    call.__annotations__ = {}
    # arguments first, then the command's options, then those of the bundles
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _run(command: Command, options: Any) -> None:
    """Run a command, and print its results.

    Raises typer.Exit, with the exit code, if the requirements of the options are not met.
    """
    # the bundle RunOptions of commands that write a report
    run_options = getattr(options, "run", None)
    requirements = () if run_options is None else _requirements(options, command)
    resumed_folder = getattr(options, "resume", None)
    # refused before anything is loaded
    if resumed_folder is not None:
        _require_resumable(resumed_folder)
    elif run_options is not None and run_options.out is not None:
        _require_writable(run_options)
    quiet = run_options is not None and run_options.quiet
    from vitlens.commands.run.notes import each_note_once
    from vitlens.commands.run.progress import announced, phase  # which imports numpy

    with announced(f"vitlens {command.word}", quiet=quiet), phase("Importing libraries"):
        measure = command.measure  # this access imports the command's module, and torch
    # a page that is served announces itself when it is ready
    with announced(f"vitlens {command.word}", quiet=quiet or command.serves):
        with each_note_once():
            results: Any = measure(options)
        if isinstance(results, Path) and run_options:
            with phase("Reading the report"):
                results = conclusion_of(results, requirements, quiet=quiet)
    if isinstance(results, Conclusion):
        for note in results.lines:
            print_note(note)
        _print_results(results.written)
        if not results.holds:
            raise typer.Exit(results.code)
    else:
        _print_results(results)


def _print_results(results: Any) -> None:
    """Print one result, several, or none: of several processes, only the first has some."""
    if isinstance(results, str | Path):
        results = (results,)
    for line in results or ():
        print_result(line)


def named_function(command: Command) -> Callable[[], None]:
    """Return a function with only a command's name and help, whose options take time to import."""

    def call() -> None:
        raise NotImplementedError(
            f"the command line was built without the options of {command.word}"
        )

    call.__name__ = command.word
    call.__doc__ = command.help
    return call


def _require_writable(run: Any) -> None:
    """Raise OutputError if the folder of --out is taken or cannot be written."""
    from vitlens.commands.run.folder import require_free
    from vitlens.files import require_writable

    require_free(run.out, overwrite=run.overwrite)
    require_writable(run.out, purpose="for --out", hint="choose another --out")


def _require_resumable(folder: Path) -> None:
    """Raise OutputError if nothing can be written into the folder of --resume."""
    from vitlens.files import require_writable

    if folder.is_dir():  # else the command says that it is no run
        require_writable(
            folder, purpose="for --resume", hint="make it writable, or begin anew with --out"
        )


def _requirements(options: Any, command: Command) -> Any:
    from vitlens.commands.run.requirements import require_known, requirements_of

    requirements = requirements_of(options.run.at_least, options.run.at_most)
    if requirements:
        metrics = command.contents.metrics
        require_known(requirements, metrics, word=command.word, models=_model_count(options))
    return requirements


def _model_count(options: Any) -> int | None:
    """Return the number of models that were named, None if none was."""
    models = getattr(options, "models", ())
    if getattr(options, "model", ""):
        models = (options.model,)
    return len(models) or None


def _parameters(kind: type) -> Iterator[inspect.Parameter]:
    """Yield the parameters of an options dataclass, and of the bundles in it."""
    for field, annotation, flag in flags_of(kind):
        if flag is None:  # a bundle, whose dataclass is the annotation
            yield from _parameters(annotation)
        else:
            yield _parameter(field, annotation, flag)


def _parameter(field: "dataclasses.Field[Any]", annotation: Any, flag: Flag) -> inspect.Parameter:
    """Return one option or argument as Typer reads it.

    Typer passes on a text for `flag.parse` (None: nothing was typed), a list for a tuple (None:
    nothing was typed), and else a value of the field's type. `_options_from` converts all of them.
    """
    is_required = field.default is dataclasses.MISSING
    default = inspect.Parameter.empty if is_required else field.default
    typer_type = _plain_type(annotation)
    if flag.parse is not None:
        typer_type = str | None  # a text, for `parse`
        if not is_required and default is not None:
            default = as_text(default) or None
    elif get_origin(typer_type) is tuple:
        typer_type = list[str]  # Typer's tuples have a fixed length
        if not is_required:
            typer_type = list[str] | None
            default = None
    shared: dict[str, Any] = {
        "metavar": flag.metavar,
        "help": flag.help,
        "show_default": flag.shown,
    }
    if flag.panel is not None:
        shared["rich_help_panel"] = flag.panel
    if flag.complete is not None:
        shared["autocompletion"] = _COMPLETIONS[flag.complete]
    if flag.parse is None and (flag.low is not None or flag.high is not None):
        shared |= {"min": flag.low, "max": flag.high}
    if flag.name:
        info = typer.Option(flag.name, **shared)
    else:
        info = typer.Argument(**shared)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[typer_type, info],
    )


def _plain_type(annotation: Any) -> Any:
    """Return an annotation without its metadata."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _options_from(kind: type, values: Mapping[str, Any]) -> Any:
    """Return the options from the command line. Raises InputError for a text in a wrong form."""
    from vitlens.commands.run.options import RunOptions

    options: dict[str, Any] = {}
    for field, annotation, flag in flags_of(kind):
        if flag is None:
            options[field.name] = _options_from(annotation, values)
            continue
        value = values[field.name]
        if isinstance(value, list):
            value = tuple(value)
        if flag.parse is not None and value is not None:
            first_name, _, _ = flag.name.partition("/")  # of "--x/--no-x"
            value = flag.parse(first_name, value)
        if value is None and NoneType not in get_args(_plain_type(annotation)):  # nothing was typed
            value = field.default
        options[field.name] = value
    if kind is RunOptions:
        options["command"] = COMMAND_LINE.get()
    return kind(**options)
