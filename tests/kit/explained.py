"""`vitlens explain` as typed, and its record."""

from pathlib import Path

from vitlens.cli.main import run as command_line
from vitlens.commands.explain.record import ExplainRecord
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read_folder
from vitlens.report.document import Document

BRIEF = "--composites none --other-substrates none --no-stability --no-counterfactuals"


def explained(out: Path, line: str, *models: Path | str) -> ExplainRecord:
    typed = ["explain", *map(str, models), *line.split(), "--device", "cpu", "--quiet", "--out", str(out)]
    assert command_line(typed) == 0
    record = read_folder(out)
    assert isinstance(record, ExplainRecord)
    return record


def report(record: ExplainRecord) -> Document:
    return COMMANDS["explain"].report(record)
