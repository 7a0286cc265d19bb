"""How a command ends: its result, the lines that are printed, and the exit code.

The command line imports this module before it knows whether a command runs at all, so imports are
inside functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vitlens.commands.run.requirements import Requirement

UNMET: Final = 3  # exit code: done, but a requirement does not hold


@dataclass(frozen=True)
class Conclusion:
    """The result of a command that has finished.

    written: the path of the report, or the lines that are the result.
    lines: the lines that are printed at the end.
    holds: False if a requirement does not hold.
    code: the exit code if `holds` is False.
    """

    written: Path | tuple[str, ...]
    lines: tuple[str, ...]
    holds: bool
    code: int = UNMET


def conclusion_of(
    written: Path, requirements: Sequence["Requirement"], *, quiet: bool
) -> Conclusion:
    """Return the conclusion of a finished run: findings of its report, and its requirements.

    written: its folder, or a file in it.
    quiet: True to print no lines, unless a requirement does not hold.
    """
    if quiet and not requirements:  # nothing to read the report for
        return Conclusion(written, (), holds=True)
    from vitlens.commands.registry import COMMANDS
    from vitlens.commands.run.publish import read_folder
    from vitlens.commands.run.requirements import outcomes
    from vitlens.record import RESULTS
    from vitlens.report.markdown import summary_lines

    folder = written if written.is_dir() else written.parent
    if not (folder / RESULTS).is_file():  # without metrics, no requirement holds
        return Conclusion(written, (), holds=not requirements)
    record = read_folder(folder)
    judged = tuple(outcomes(requirements, record))
    holds = all(result.holds for result in judged)
    if quiet and holds:
        return Conclusion(written, (), holds=True)
    findings = summary_lines(COMMANDS[record.command].report(record))
    requirement_lines = [result.line for result in judged]
    return Conclusion(written, (*findings, *requirement_lines), holds)
