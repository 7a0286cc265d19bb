"""A command line whose runs are replaced: what reaches them is what was parsed."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from vitlens.commands.registry import COMMANDS

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    """Replaces a command's `measure` by a function that keeps the options it is given, or raises what it is given."""

    def replace(word: str, *, error: BaseException | None = None, result: object = ()) -> Calls:
        calls: Calls = []

        def run(*args: Any, **options: Any) -> object:
            calls.append((args, options))
            if error is not None:
                raise error
            return result

        package = COMMANDS[word].package if word in COMMANDS else ""
        module = ModuleType(f"{package or f'vitlens.commands.{word}'}.measure")
        module.measure = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return calls

    return replace
