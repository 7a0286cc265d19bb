"""All commands, one entry each: what the command line, reports, `Model.supports`, tests, docs and completion read.

A command is the folder `vitlens/commands/<word>/`: options.py (a dataclass `<Word>Options`, of which its command line
is made), record.py (`RECORD`, what it writes), measure.py (`measure`, from options to the written record) and report.py
(`report`, from record to document). All are imported when they are asked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from vitlens.records import Contents, Record
    from vitlens.report.document import Document

Group = Literal["Look", "Train and evaluate", "Explain and test", "Reports and lists"]


@dataclass(frozen=True)
class Command:
    """One command. help: its first line in --help; example: a line that can be typed at once; needs: what a model must
    have for it (models/support.py), None where it takes no model; reports: whether it leaves a report folder."""

    word: str
    help: str
    example: str
    group: Group
    needs: tuple[str, ...] | None = None
    reports: bool = True

    @property
    def options(self) -> type:
        """The dataclass of its options."""
        return self._part("options", f"{self.word.capitalize()}Options")  # type: ignore[no-any-return]

    @property
    def contents(self) -> "Contents":
        """What it writes."""
        return self._part("record", "RECORD")  # type: ignore[no-any-return]

    @property
    def measure(self) -> "Callable[[Any], object]":
        """From its options to the record: runs it."""
        return self._part("measure", "measure")  # type: ignore[no-any-return]

    @property
    def report(self) -> "Callable[[Record], Document]":
        """From its record to the document."""
        return self._part("report", "report")  # type: ignore[no-any-return]

    def _part(self, file: str, name: str) -> Any:
        return getattr(import_module(f"vitlens.commands.{self.word}.{file}"), name)


_ENTRIES: Final = (
    Command(
        "train",
        "Train a preset from scratch, or a trained model further; its folder is a MODEL for every other command.",
        "vitlens train vit-micro --epochs 1",
        "Train and evaluate",
        needs=("new head",),
    ),
    Command(
        "evaluate",
        "Accuracy with its interval, per class, confusion, calibration and a grid of predictions.",
        "vitlens evaluate vit-digits cnn-digits",
        "Train and evaluate",
        needs=("classifier",),
    ),
    Command(
        "attack",
        "Accuracy under attack over epsilon, for one model or several; what changes inside; self-checked, resumable.",
        "vitlens attack vit-digits cnn-digits --limit 100",
        "Explain and test",
        needs=("classifier",),
    ),
    Command(
        "attention",
        "Attention maps by layer and head, their evolution over the layers, and the position embeddings.",
        "vitlens attention vit-digits",
        "Look",
        needs=("maps",),
    ),
    Command(
        "rollout",
        "Attention followed to the image: rollout (Abnar & Zuidema 2020), relevance (Chefer 2021) and others.",
        "vitlens rollout vit-digits --fusion mean,max,min",
        "Look",
        needs=("chain",),
    ),
)
COMMANDS: Final[Mapping[str, Command]] = {command.word: command for command in _ENTRIES}
