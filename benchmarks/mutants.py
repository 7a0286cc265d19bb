"""Break the code at random and count the breaks that tests notice: `python -m benchmarks.mutants
--n 100 --seed 1`.

Each mutant changes one place in a copy of the repository: a comparison, an operator of arithmetic,
`and` or `or`, a `not`, a whole number, True or False, or a statement that is a call, left out. Not
changed are types, messages of errors, docstrings, fractions (tolerances, sizes of figures) and
numbers of named constants. Tests are those of `--tests`, else those that run the changed line by a
map of `pytest -n auto --cov --cov-context=test` (`--map`, `.coverage` unless told otherwise); where
a fixture runs it, and of tests/golden, whose runs are shared, the whole file. A run that takes ten
minutes counts as noticed.
"""

import argparse
import ast
import contextlib
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
UNDER: Final = (
    "analysis",
    "lens",
    "attribution",
    "attacks",
    "uncertainty.py",
    "record.py",
    "report/claims.py",
)
LIMIT: Final = 600  # seconds
OPTIONS: Final = "-x -n 0 -p no:cacheprovider --tb=no -W ignore::pytest.PytestAssertRewriteWarning"
COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COUNTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One changed place. start, end: of the text that `new` replaces."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {_short(self.old)}  ->  {_short(self.new)}"


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    text = path.read_text()
    starts = [0]
    for row in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(row.encode()))
    raw = text.encode()
    for node in _changeable(ast.parse(text)):
        for new in _changes(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            words = new if isinstance(node, ast.stmt) else f"({new})"
            yield Mutant(
                str(path.relative_to(ROOT)), node.lineno, start, end, raw[start:end].decode(), words
            )


def _changeable(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes that may be changed: no types, errors, formatted strings or named
    constants."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            constant = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(tree, ast.Module)
            if (
                not isinstance(node, ast.AST)
                or typing
                or constant
                or isinstance(node, ast.Raise | ast.JoinedStr)
            ):
                continue
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "cast",
                "TypeVar",
                "dataclass",
            ):
                continue
            if isinstance(node, ast.expr | ast.stmt):
                yield node
            yield from _changeable(node)


def _changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Yield the code that may stand in the node's place."""
    changed = copy(node)
    match changed:
        case ast.Compare(ops=[only]):
            changed.ops = [COMPARED[type(only)]()]
        case ast.BinOp(op=operator) if type(operator) in COUNTED and not _text(changed):
            changed.op = COUNTED[type(operator)]()
        case ast.BoolOp(op=operator):
            changed.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield ast.unparse(operand)
            return
        case ast.Constant(value=bool(value)):
            changed.value = not value
        case ast.Constant(value=int(value)):
            changed.value = value + 1
        case ast.Expr(value=ast.Call()):
            yield "pass"
            return
        case _:
            return
    yield ast.unparse(changed)


def _text(node: ast.BinOp) -> bool:
    """Return True if an operator joins or repeats strings or lists, or types."""
    kinds = (ast.JoinedStr, ast.List, ast.Tuple)
    return any(
        isinstance(each, kinds) or isinstance(getattr(each, "value", None), str)
        for each in ast.walk(node)
    )


def noticed(mutant: Mutant, tests: Sequence[str], folder: Path) -> bool | None:
    """Return whether the tests fail with the mutant in a copy of the repository; None where they
    took too long.
    """
    target = folder / mutant.path
    whole = target.read_bytes()
    target.write_bytes(whole[: mutant.start] + mutant.new.encode() + whole[mutant.end :])
    try:
        child = multiprocessing.get_context("fork").Process(target=_tested, args=(tests, folder))
        child.start()
        child.join(LIMIT)
        if child.is_alive():
            child.kill()
            child.join()
            return None
        return child.exitcode != 0
    finally:
        target.write_bytes(whole)


def _tested(tests: Sequence[str], folder: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    import pytest

    with (
        Path(os.devnull).open("w") as no,
        contextlib.redirect_stdout(no),
        contextlib.redirect_stderr(no),
    ):
        code = pytest.main([*tests, *OPTIONS.split()])
    os._exit(int(code))


def tests_of(mutant: Mutant, coverage: Path) -> list[str]:
    """Return the tests that run the mutant's line; where it runs on import alone, those that run
    any line of its module.
    """
    from coverage import CoverageData

    data = CoverageData(str(coverage))
    data.read()
    lines = data.contexts_by_lineno(str(ROOT / mutant.path))
    contexts = {each for each in lines.get(mutant.line, ()) if each} or {
        each for of in lines.values() for each in of
    }
    names = {each.partition("|")[0] for each in contexts if each}
    shared = {name.partition("::")[0] for name in names if name.startswith("tests/golden")}
    shared |= {each.partition("::")[0] for each in contexts if each.endswith("|setup")}
    return sorted({name for name in names if name.partition("::")[0] not in shared} | shared)


def main() -> None:
    """Print every mutant with what became of it, and the share that was noticed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", nargs="*", default=[f"vitlens/{name}" for name in UNDER])
    parser.add_argument("--tests", nargs="*")
    parser.add_argument("--map", type=Path, default=ROOT / ".coverage")
    parser.add_argument(
        "--only", nargs="*", type=int, help="numbers of the mutants to try, as they were printed"
    )
    told = parser.parse_args()
    places = [ROOT / name for name in told.under]
    paths = sorted(
        path for place in places for path in ([place] if place.is_file() else place.rglob("*.py"))
    )
    every = [mutant for path in paths for mutant in mutants(path)]
    chosen = random.Random(told.seed).sample(every, min(told.n, len(every)))
    print(f"{len(chosen)} of {len(every)} mutants in {len(paths)} modules, seed {told.seed}")
    for name in (
        "torch",
        "torchvision",
        "timm",
        "scipy.stats",
        "sklearn",
        "matplotlib.pyplot",
        "transformers",
    ):
        __import__(name)  # once, before the processes of the tests
    counts: dict[bool | None, int] = {True: 0, False: 0, None: 0}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        for name in files.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes((ROOT / name).read_bytes())
        if told.tests and noticed(
            Mutant(str(paths[0].relative_to(ROOT)), 0, 0, 0, "", ""), told.tests, folder
        ):
            sys.exit(
                "error: expected tests that pass on the unchanged code; run them with pytest first"
            )
        wanted = (
            range(len(chosen))
            if told.only is None
            else sorted({*told.only} & {*range(len(chosen))})
        )
        for number in wanted:
            mutant = chosen[number]
            begun = time.perf_counter()
            tests = told.tests or tests_of(mutant, told.map)
            found = noticed(mutant, tests, folder) if tests else False
            counts[found] += 1
            word = {True: "noticed", False: "SURVIVED", None: "too long"}[found]
            took = time.perf_counter() - begun
            print(f"{number:3}  {word:9} {took:4.0f} s  {mutant}", flush=True)
    print(
        f"{counts[True] + counts[None]} of {len(wanted)} noticed ({counts[None]} of them by the "
        "time that they took)"
    )


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


if __name__ == "__main__":
    main()
