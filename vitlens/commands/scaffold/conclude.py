"""What a command prints when it ends: verdicts and findings of its report, and whether the requirements hold."""

from collections.abc import Sequence
from pathlib import Path

from vitlens.commands.registry import COMMANDS
from vitlens.commands.scaffold.publish import read_folder
from vitlens.commands.scaffold.requirements import Requirement, outcomes
from vitlens.files import RESULTS
from vitlens.report.terminal import summary_lines


def conclusion(outcome: Path, requirements: Sequence[Requirement]) -> tuple[tuple[str, ...], bool]:
    """The lines for a finished run, from the folder of its report, and whether every requirement holds."""
    folder = outcome if outcome.is_dir() else outcome.parent
    if not (folder / RESULTS).is_file():
        return (), not requirements
    record = read_folder(folder, escaped=False)
    lines = tuple(summary_lines(COMMANDS[record.command].report(record)))
    judged = tuple(outcomes(requirements, record))
    return (*lines, *(each.line for each in judged)), all(each.holds for each in judged)
