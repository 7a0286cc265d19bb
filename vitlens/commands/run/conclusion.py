"""How a command ends: what it gives back where it judges what it wrote, and the lines that are
printed; imports lazily.

The command line imports this module before it knows whether a command runs at all.
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

    written: the report, or the lines that are the result.
    lines: printed at the end.
    holds: whether what the command judges holds.
    code: the exit code if it does not.
    """

    written: Path | tuple[str, ...]
    lines: tuple[str, ...]
    holds: bool
    code: int = UNMET


def conclusion_of(
    outcome: Path, requirements: Sequence["Requirement"], *, quiet: bool
) -> Conclusion:
    """Return the conclusion of a finished run: verdicts and findings of its report, and whether all
    requirements hold.

    outcome: its folder, or a file in it; quiet: without lines, unless a requirement does not hold.
    """
    if quiet and not requirements:
        return Conclusion(outcome, (), True)
    from vitlens.commands.registry import COMMANDS
    from vitlens.commands.run.publish import read_folder
    from vitlens.commands.run.requirements import outcomes
    from vitlens.record import RESULTS
    from vitlens.report.markdown import summary_lines

    folder = outcome if outcome.is_dir() else outcome.parent
    if not (folder / RESULTS).is_file():
        return Conclusion(outcome, (), not requirements)
    record = read_folder(folder)
    judged = tuple(outcomes(requirements, record))
    holds = all(check.holds for check in judged)
    if quiet and holds:
        return Conclusion(outcome, (), holds)
    lines = summary_lines(COMMANDS[record.command].report(record))
    return Conclusion(outcome, (*lines, *(check.line for check in judged)), holds)
