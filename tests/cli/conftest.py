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
    """Replaces what a command runs by a function that keeps its arguments, or raises what it is given.

    Of a command of the registry: `measure`, whose one argument is its options.
    """

    def replace(word: str, *, error: BaseException | None = None, result: object = ()) -> Calls:
        calls: Calls = []

        def run(*args: Any, **options: Any) -> object:
            calls.append((args, options))
            if error is not None:
                raise error
            return result

        place, name = (f"commands.{word}.measure", "measure") if word in COMMANDS else (f"runs.{word}", word)
        module = ModuleType(f"vitlens.{place}")
        setattr(module, name, run)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return calls

    return replace
