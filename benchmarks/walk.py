"""How much of vitlens a warm call runs: files, distinct functions and distinct lines of the second
call.

python -m benchmarks.walk [--commands] [--names]     --commands: two commands in place of functions;
--names: with the functions' names, for a reader who wants to shorten the walk
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import vitlens
from vitlens.cli.main import run

_PACKAGE = str(Path(vitlens.__file__).parent)


def walk(call: Callable[[], object]) -> tuple[set[CodeType], set[tuple[str, int]]]:
    """Return the code objects and the (file, line) that a call enters, once everything that is
    memoised is.
    """
    call()
    entered: set[CodeType] = set()
    lines: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _value: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        entered.add(frame.f_code)
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return {code for code in entered if not code.co_name.startswith("<")}, lines


def function_calls() -> dict[str, Callable[[], object]]:
    """Return calls of three public functions."""
    model = vitlens.load("vit-digits")
    images = torch.rand(8, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8) % 10
    return {
        "attention": lambda: vitlens.attention(model, images),
        "ablate": lambda: vitlens.ablate(model, images, labels),
        "explain best": lambda: vitlens.explain(model, images, method="best"),
    }


def command_calls(folder: str) -> dict[str, Callable[[], object]]:
    """Return calls of two commands; folder: where they write."""

    def call(line: str) -> Callable[[], object]:
        words = [*line.split(), "--data", "digits", "--device", "cpu", "--quiet"]

        def command() -> None:
            with redirect_stdout(StringIO()):
                assert run(words) == 0, line

        return command

    return {
        "predict": call("predict vit-digits --limit 3"),
        "stats": call(f"stats vit-digits --no-names --limit 20 --overwrite --out {folder}/stats"),
    }


def main() -> None:
    """Print a row for each call; every name with --names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--names", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = command_calls(folder) if options.commands else function_calls()
        _print_walks(calls, names=options.names)


def _print_walks(calls: dict[str, Callable[[], object]], *, names: bool) -> None:
    for name, call in calls.items():
        codes, lines = walk(call)
        files = {code.co_filename for code in codes}
        print(f"{name:14}{len(files):4} files{len(codes):5} functions{len(lines):6} lines")
        for code in (
            sorted(codes, key=lambda each: (each.co_filename, each.co_firstlineno)) if names else ()
        ):
            print(
                f"    {code.co_filename.removeprefix(_PACKAGE)}:{code.co_firstlineno} "
                f"{code.co_qualname}"
            )


if __name__ == "__main__":
    main()
