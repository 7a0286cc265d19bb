"""A command takes whole RunOptions; its --help lists the options they are made of.

Typer reads a function's signature. `expanded` writes one in which each parameter that is a bundle stands for the
parameters of the function that makes it, so that an option is defined once however many commands have it.
"""

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from vitlens.cli.options import model_options, run_options
from vitlens.commands.scaffold.options import ModelOptions, RunOptions

_MAKERS: dict[object, Callable[..., object]] = {
    RunOptions: run_options,
    ModelOptions: model_options,
}


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The function that Typer registers in place of a command."""
    own, made = [], {}
    for parameter in _typed(command):
        if parameter.annotation in _MAKERS:
            made[parameter.name] = _MAKERS[parameter.annotation]
        else:
            own.append(parameter)
    parts = {name: _typed(maker) for name, maker in made.items()}

    def call(**values: Any) -> None:
        bundles = {name: made[name](**{part.name: values.pop(part.name) for part in parts[name]}) for name in made}
        command(**values, **bundles)

    call.__name__, call.__doc__, call.__annotations__ = command.__name__, command.__doc__, {}
    parameters = [*own, *(part for group in parts.values() for part in group)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _typed(function: Callable[..., object]) -> list[inspect.Parameter]:
    """A function's parameters, by keyword, with their annotations resolved."""
    hints = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
    ]
