"""CONTRIBUTING.md is true to the code: what it tells to touch is there, and its examples run."""

import re
from pathlib import Path

import pytest

from vitlens.commands.registry import COMMANDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ROWS = re.findall(r"^\| (an? [^|]+?) \| ([^|]+) \| ([^|]*) ?\|$", TEXT, flags=re.MULTILINE)
EXAMPLES = re.findall(r"\*\*(An? [^*]+)\.\*\*.*?```python\n(.*?)```", TEXT, flags=re.DOTALL)
PATHS = re.findall(r"`((?:vitlens|tests|docs)/[^`]*)`", TEXT)


def test_the_table_has_all_that_can_be_added():
    added = {
        "an attack", "an attribution", "an attention method", "a head statistic", "a label of heads",
        "a model source", "a data set", "a command", "a figure", "a section of a report",
    }  # fmt: skip
    assert {what for what, _, _ in ROWS} == added
    assert {what.lower() for what, _ in EXAMPLES} == added - {"an attention method", "a label of heads"}
    for _, touched, _ in ROWS:
        assert re.findall(r"`(vitlens/[^`]+\.py)`", touched)  # a file with its registry


@pytest.mark.parametrize("path", sorted(set(PATHS)))
def test_every_path_that_is_named_is_there(path):
    place = ROOT / path.partition(" ")[0]
    assert place.is_dir() if path.endswith("/") else place.is_file()


@pytest.mark.parametrize(("what", "code"), EXAMPLES, ids=[what for what, _ in EXAMPLES])
def test_an_example_runs_as_it_stands(what, code):
    exec(compile(code, what, "exec"), {"__name__": "example"})  # our own text
    for module in re.findall(r'"(vitlens[\w.]+):\w+"', code):
        assert module.endswith(".mine") or (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_a_command_has_the_files_that_are_told():
    told = set(re.findall(r"\b(\w+)\.py \(", TEXT))
    assert told == {"options", "record", "measure", "report"}
    for word, command in COMMANDS.items():
        package = command.package or f"vitlens.commands.{word}"
        parts = {path.stem for path in (ROOT / package.replace(".", "/")).iterdir()}
        assert parts >= (told if command.reports else {"options", "measure"})
    assert {path.stem for path in (ROOT / "tests/contracts/throw_away").glob("[a-z]*.py")} == told
