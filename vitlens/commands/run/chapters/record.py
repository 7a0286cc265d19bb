"""The rows that a run of chapters writes, and the records of its chapters; free of torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read
from vitlens.errors import UnknownNameError
from vitlens.files import read_run
from vitlens.records import Record, TableOf
from vitlens.safe_paths import inside
from vitlens.schema import Name

CHAPTERS_FOLDER: Final = "chapters"
TITLES: Final = {  # of the chapters, by command
    "train": "Training",
    "evaluate": "Accuracy",
    "attention": "Attention",
    "rollout": "Attention rollout and relevance",
    "stats": "Statistics of the heads",
    "ablate": "Ablation",
    "explain": "Attribution maps",
    "compare": "Comparison",
    "attack": "Robustness",
    "features": "Features",
    "profile": "Cost",
}


@dataclass(frozen=True)
class ChapterRow:
    """One chapter: its command, its model ("" for all), and its folder.

    cached: whether an earlier run had made it; part: which one it is, of several chapters of one command; seconds: that
    it took when it was made (0 in folders of earlier versions).
    """

    word: Name
    alias: str
    folder: str
    cached: bool = False
    part: str = ""
    seconds: float = 0.0


CHAPTERS = TableOf("chapters", ChapterRow)


def chapters_of(record: Record) -> Iterator[tuple[ChapterRow, Any]]:
    """Every chapter with its record. Raises UnknownNameError for a command that is no chapter."""
    for row in record.rows(CHAPTERS):
        if row.word not in TITLES:
            raise UnknownNameError("chapter", row.word, TITLES)
        yield row, read(read_run(inside(record.folder, row.folder)))


# a run of chapters has every metric of them, under the same names
METRICS: Final = tuple(dict.fromkeys(metric for word in TITLES for metric in COMMANDS[word].contents.metrics))
