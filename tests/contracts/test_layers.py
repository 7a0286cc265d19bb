"""The kernels are few: what import-linter's contract on tests (pyproject.toml) leaves free but for their number."""

import ast
import re
import tomllib
from pathlib import Path

TESTS = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
(SEAMS,) = [contract for contract in CONTRACTS if contract["name"].startswith("Tests go through")]
KERNELS = 40  # modules of vitlens that the kernels may import directly
UNSORTED = {"analysis", "attacks", "attribution", "data", "lens", "models", "training"}  # until their areas are merged


def pattern(line: str) -> re.Pattern[str]:
    """One of import-linter's wildcards as a regular expression, of the imported module."""
    name = re.escape(line.partition(" -> ")[2])
    return re.compile(name.replace(r"\*\*", r".+").replace(r"\*", r"[^.]+"))


def imported(path: Path) -> set[str]:
    """The modules of vitlens that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if is_module(name) else node.module for name in names}
    return {name for name in found if name.startswith("vitlens")}


def is_module(name: str) -> bool:
    path = TESTS.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_the_kernels_are_few():
    seams = [pattern(line) for line in SEAMS["ignore_imports"] if line.startswith("tests.** ")]
    names = {name for path in (TESTS / "kernels").rglob("test_*.py") for name in imported(path)}
    direct = {name for name in names if not any(seam.fullmatch(name) for seam in seams)}
    assert len(direct) <= KERNELS, f"{len(direct)} internals are tested directly: {sorted(direct)}"


def test_no_other_folder_is_left_out_of_the_contract():
    folders = {path.parent.name for path in TESTS.glob("*/__init__.py")} - {"kit", "kernels"} - UNSORTED
    assert {f"tests.{folder}" for folder in folders} == {*SEAMS["source_modules"]}
