"""Tables and reports have the numbers of blocks, also if some blocks have no attention."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import ran, report
from vitlens.cli.main import run
from vitlens.record_files import serialise_tables

FILE = """
from functools import partial

import torch

from tests.kit.models.handwritten import wrapped
from tests.kit.models.silent_blocks import Silent, listed, plain


def without():
    return wrapped(plain)


def between():
    return wrapped(partial(listed, Silent, None, Silent, None, None, Silent))
"""
NUMBERS = {0: 1, 1: 3, 2: 4}
UNCHANGED = {"module", "seconds", "forwards", "p", "p_holm"}  # or of all units, which are more
COMMANDS = {
    "stats": "stats {} --images {}",
    "attention": "attention {} --images {}",
    "ablate": "ablate {} --images {} --predicted --units head --no-curves",
    "rollout": "rollout {} --images {}",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "silent.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def line_of(command: str, file: Path, function: str, pictures: Path) -> str:
    name = f"{file}:{function}"
    return f"{COMMANDS[command].format(f'model={name}', pictures)} --model-file {name}"


def renumbered(value: Any, key: str = "") -> Any:
    """Return a row of the model without the silent blocks as one of the model that has them."""
    if isinstance(value, dict):
        return {
            name: renumbered(item, name) for name, item in value.items() if name not in UNCHANGED
        }
    if isinstance(value, list | tuple):
        return [renumbered(item, key) for item in value]
    if key in ("layer", "layers") and isinstance(value, int):
        return NUMBERS[value]
    if key == "maps" and isinstance(value, str) and value.isdecimal():
        return str(NUMBERS[int(value)])
    if isinstance(value, str):
        return re.sub(r"\bL(\d+)(?=\.)", lambda match: f"L{NUMBERS[int(match[1])]}", value)
    return value


def plainly(value: Any) -> Any:
    """Return a row without what is not compared, and with numbers of five digits."""
    if isinstance(value, dict):
        return {name: plainly(item) for name, item in value.items() if name not in UNCHANGED}
    if isinstance(value, list | tuple):
        return [plainly(item) for item in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


@pytest.mark.parametrize("command", COMMANDS)
def test_tables_and_claims_have_the_numbers_of_blocks(
    command: str, file: Path, pictures: Path, tmp_path: Path
):
    before = ran(tmp_path / "before", line_of(command, file, "without", pictures))
    after = ran(tmp_path / "after", line_of(command, file, "between", pictures))
    expected = serialise_tables(before)
    for name, rows in serialise_tables(after).items():
        of_layers = [row for row in rows if row.get("layer", 1) in NUMBERS.values()]
        if name in ("explorer", "lens"):  # with its numbers, and with a row for each block
            continue
        assert plainly(of_layers) == plainly(renumbered(expected[name])), name
    text = (after.folder / "report.md").read_text(encoding="utf-8")
    layers = {int(number) for number in re.findall(r"\bL(\d+)\.H\d", text)}
    layers |= {int(number) for number in re.findall(r"\blayer (\d+)", text)}
    assert layers <= set(NUMBERS.values())
    explorer = getattr(report(after), "explorer", None)
    assert explorer is None or list(explorer.layers) == list(NUMBERS.values())


@pytest.mark.parametrize(
    "line",
    [
        "head {} L2.H0 --images {}",
        "attention {} --images {} --layer 2",
        "attention {} --images {} --layers 1,2",
        "rollout {} --images {} --method attention --layer 2",
        "walkthrough {} --images {} --layer 2",
    ],
)
def test_a_block_without_attention_is_refused_by_naming_the_layers_that_have_some(
    line: str, file: Path, pictures: Path, capsys
):
    name = f"{file}:between"
    typed = f"{line.format(f'model={name}', pictures)} --model-file {name} --device cpu --quiet"
    assert run(typed.split()) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert "1, 3" in said
    assert "4" in said
    assert "found" in said
