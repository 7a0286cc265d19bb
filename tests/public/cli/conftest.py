"""A command line with replaced runs: tests compare what reaches them with what was parsed."""

import sys
from types import ModuleType

import pytest

from vitlens.commands.registry import COMMANDS


@pytest.fixture
def stand_in(monkeypatch):
    """Return a function that replaces a command's `measure` and records its options, or raises."""

    def replace(word, *, error=None, result=()):
        calls = []

        def run(*args, **options):
            calls.append((args, options))
            if error is not None:
                raise error
            return result

        module = ModuleType(f"{COMMANDS[word].package or f'vitlens.commands.{word}'}.measure")
        module.measure = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return calls

    return replace
