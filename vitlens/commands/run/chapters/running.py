"""Runs chapters one after another; a chapter that the same models, images and code have made before is copied."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapters.cache import ChapterCache
from vitlens.commands.run.chapters.record import CHAPTERS_FOLDER, ChapterRow
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read
from vitlens.files import read_run
from vitlens.uncertainty import Estimate


class ChapterRunner:
    """Runs chapters in the folder of a larger run, and keeps the list of those done.

    cache: of chapters of earlier runs; None: every chapter is run.
    """

    def __init__(self, path: Path, run: RunOptions, cache: ChapterCache | None = None) -> None:
        self.path, self.run_options, self.cache = path, replace(run, overwrite=True, html=False), cache
        self.done: list[ChapterRow] = []

    def run(
        self, word: str, alias: str, line: str, options: Callable[[RunOptions], object], *, part: str = ""
    ) -> ChapterRow:
        """Run one command in its own folder.

        alias: of its one model, "" for all; line: its command line; options: made from the run options; part: which one
        it is, where one command has several chapters.
        """
        folder = f"{CHAPTERS_FOLDER}/{'-'.join(filter(None, (word, part, alias)))}"
        place = self.path / folder
        whole = options(replace(self.run_options, out=place, command=f"vitlens {line}", at_least=(), at_most=()))
        cached = self.cache is not None and self.cache.restore(word, whole, place)
        if not cached:
            COMMANDS[word].measure(whole)
            if self.cache is not None:
                self.cache.keep(word, whole, place)
        seconds = float(str(read_run(place).results["seconds"]))
        self.done.append(ChapterRow(word, alias, folder, cached, part, seconds))
        return self.done[-1]


def metrics_of(path: Path, chapters: Sequence[ChapterRow]) -> Iterator[tuple[str, Estimate]]:
    """The metrics of the chapters; where two have the same one, the first chapter's, as later ones use fewer images."""
    names: set[str] = set()
    for chapter in chapters:
        if chapter.word == "train":
            continue  # evaluate measures the same images again
        record = read(read_run(path / chapter.folder))
        predicted = record.config.options.get("predicted", False)
        for name, estimate in record.metrics.items():
            of_predictions = predicted and name.split("/")[0] == "accuracy"  # 1 by construction
            if name not in names and not of_predictions:
                names.add(name)
                yield name, estimate
