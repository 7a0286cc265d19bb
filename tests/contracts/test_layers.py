"""A move of internals leaves most tests alone: only the kit and the kernels may import them.

golden/, conclusions/ and public/ go through `vitlens.*`, the command line, registries, options, records, REPORT,
claims, documents and errors. What they import beyond that is listed in internals.txt, which only becomes shorter.
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SEAMS = re.compile(
    r"vitlens(\.(errors|names|version|uncertainty|record|cli\.main|report\.(claims|document)|.*registry"
    r"|commands\.[a-z]+(\.kinds)?\.(options|record|report)|commands\.run\.(options|publish|reading)))?"
)
EXCEPTIONS = Path(__file__).with_name("internals.txt")
KERNELS = 40  # modules that the kernels may import directly


def imported(path: Path) -> set[str]:
    """The modules of vitlens and of the tests that a file imports, but for the kit and its own folder."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if is_module(name) else node.module for name in names}
    return {name for name in found if name.partition(".")[0] in ("vitlens", "tests")}


def is_module(name: str) -> bool:
    path = TESTS.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def internals(path: Path) -> set[str]:
    """What a test imports beside the seams and the kit."""
    own = f"tests.{path.relative_to(TESTS).parts[0]}."
    return {name for name in imported(path) if not SEAMS.fullmatch(name) and not name.startswith(("tests.kit.", own))}


def listed() -> dict[str, set[str]]:
    lines = (line.partition(": ") for line in EXCEPTIONS.read_text().splitlines())
    return {path: set(names.split()) for path, _, names in lines}


@pytest.mark.parametrize("folder", ["golden", "conclusions", "public"])
def test_tests_that_go_through_the_seams_import_no_more_internals_than_are_listed(folder):
    known = {path: names for path, names in listed().items() if path.startswith(f"{folder}/")}
    found = {str(path.relative_to(TESTS)): internals(path) for path in sorted((TESTS / folder).rglob("*.py"))}
    found = {path: names for path, names in found.items() if names}
    more = {path: new for path, names in found.items() if (new := names - known.get(path, set()))}
    assert not more, "import a seam or the kit instead (CONTRIBUTING.md)"
    fewer = {path: gone for path, names in known.items() if (gone := names - found.get(path, set()))}
    assert not fewer, f"take them out of {EXCEPTIONS.name}: the list only becomes shorter"


def test_the_kernels_are_few():
    names = {
        name
        for path in (TESTS / "kernels").rglob("test_*.py")
        for name in internals(path)
        if name.startswith("vitlens.")
    }
    assert len(names) <= KERNELS, f"{len(names)} internals are tested directly: {sorted(names)}"
