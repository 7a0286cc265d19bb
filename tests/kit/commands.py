"""Commands as typed: their record and report, or the line with which they refuse."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from tests.kit.making import digits
from vitlens.analysis.ablation import bench as analysis
from vitlens.attacks.minimum_norm import carlini_wagner
from vitlens.cli.main import run
from vitlens.commands.attack import sweep
from vitlens.commands.audit.record import CandidateRow
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run import chapter_runs, publish
from vitlens.commands.run.flags import typed
from vitlens.commands.run.progress import show_again
from vitlens.commands.run.publish import read_folder
from vitlens.commands.run.resume import content_digest
from vitlens.commands.study import chapters
from vitlens.models.loading import load
from vitlens.record import Record
from vitlens.report.document import Document


def ran(out: Path, line: str, *, code: int = 0) -> Any:
    """Return the record of a line such as "stats {model} --limit 3".

    The line runs quietly on the CPU, with its folder at out.
    """
    assert run([*line.split(), "--device", "cpu", "--quiet", "--out", str(out)]) == code, line
    return read_folder(out)


def gone_on(folder: Path, line: str) -> Any:
    """Return the record of a stopped run that went on, as "train" or "study --epochs 3"."""
    assert run([*line.split(), "--resume", str(folder), "--device", "cpu", "--quiet"]) == 0
    return read_folder(folder)


def report(record: Record) -> Document:
    document: Document = COMMANDS[record.command].report(record)
    return document


def said_first(document: Document) -> str:
    """Return the sentences of the first page: its answers and what it does not know."""
    return " ".join(sentence.text for sentence in (*document.first.answer, *document.first.unknown))


def digest_of_code(name: str) -> str:
    """Return the code's part of the key by which the cache recognises a model of --model-file."""
    return content_digest(load(name, code_files=[name]))


def typed_line(word: str, options: Any) -> str:
    """Return the command line that gives a command these options."""
    return " ".join(["vitlens", word, *typed(options)])


def refusal(
    capsys: pytest.CaptureFixture[str], line: str, *, code: int = 2, unexpected: bool = False
) -> str:
    """Run a line that must fail with one line on stderr and nothing else; return that line."""
    capsys.readouterr()
    assert run(shlex.split(line)) == code, line
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1, output.err
    assert ("unexpected" in output.err) == unexpected
    return output.err


def figures(record: Record) -> set[str]:
    """Return the names of its figures that were written."""
    return {path.stem for path in (record.folder / "figures").glob("*.png")}


def written_digits(folder: Path, count: int, place: Callable[[int, int], str]) -> Path:
    """Write the first test digits as PNG, each at place(number, label); "" leaves one out."""
    for batch in digits("test").limit(count).batches(1):
        name = place(int(batch.indices[0]), int(batch.labels[0]))
        if name:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = (batch.images[0] * 255).round().byte().permute(1, 2, 0).numpy()
            Image.fromarray(np.ascontiguousarray(pixels)).save(path)
    return folder


def shown_now(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what an announced run has written to stderr since the last call."""
    show_again()
    return capsys.readouterr().err


@contextmanager
def impatient() -> Iterator[None]:
    """Print progress at once and always, in lines, inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlens.commands.run.progress.PATIENCE", 0.0)
        patch.setattr("vitlens.commands.run.progress.LINE_EVERY", 0.0)
        patch.setenv("TERM", "dumb")
        yield


@contextmanager
def quick_attacks(
    candidates: Sequence[CandidateRow] | None = None, *, part: int | None = None
) -> Iterator[None]:
    """Check attacks on two images, which are attacked about a hundred times, inside the context.

    C&W searches four times.
    candidates: the attacks that an audit chooses from in addition to FGSM; None: all.
    part: the number of batches that are attacked, and stored, together.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlens.commands.attack.checks.CHECKED", 2)
        patch.setattr(
            carlini_wagner,
            "__kwdefaults__",
            {**(carlini_wagner.__kwdefaults__ or {}), "searches": 4},
        )
        if candidates is not None:
            patch.setattr("vitlens.commands.audit.measure.CANDIDATES", candidates)
        if part is not None:
            patch.setattr("vitlens.commands.attack.sweep.PART_BATCHES", part)
        yield


@contextmanager
def stopping(
    word: Literal["ablate", "attack"], *, at: int, error: BaseException | None = None
) -> Iterator[list[int]]:
    """Let a measurement of a run fail by its number; yield how many there were.

    at: the number, from 1 on; 0: none fails.
    error: with which it fails; None: a division by zero.
    """
    module = {"ablate": analysis, "attack": sweep}[word]
    name = {"ablate": "odds_and_correct", "attack": "sweep"}[word]
    original = getattr(module, name)
    calls = [0]  # a list, so that the caller sees the count

    def counted(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise ZeroDivisionError("division by zero") if error is None else error
        return original(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, counted)
        yield calls


@contextmanager
def few_chapters(*left_out: str) -> Iterator[None]:
    """Leave these chapters out of a study, inside the context.

    The others run with few steps and images, and with empty figures, which the tests of their
    commands draw.
    """
    from matplotlib.figure import Figure

    original = chapters.Chapters.run
    small = replace(
        chapters.USUAL,
        explained=("relevance", "gradcam"),
        attacks=("fgsm",),
        searched=3,
        search_steps=4,
        checked=4,
        panels=6,
        thorough=True,
    )

    def save_empty_figures(document: Document, record: Record, **_: object) -> None:
        for spec in document.figures:
            publish._save(Figure(), {"png": record.folder / "figures" / f"{spec.name}.png"})

    def run_quickly(self: chapters.Chapters, word: str, *args: Any, **part: Any) -> Any:
        if word in left_out:
            return None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(publish, "save_figures", save_empty_figures)
            return original(self, word, *args, **part)

    with pytest.MonkeyPatch.context() as patch, quick_attacks():
        patch.setattr(chapters, "USUAL", small)
        patch.setattr(chapters.Chapters, "run", run_quickly)
        yield


@contextmanager
def stopping_at(word: str) -> Iterator[None]:
    """Stop a run of chapters by Ctrl-C where the chapter of this command would begin."""
    original = chapter_runs.ChapterRunner.run

    def run_or_stop(self: chapter_runs.ChapterRunner, command: str, *args: Any, **part: Any) -> Any:
        if command == word:
            raise KeyboardInterrupt
        return original(self, command, *args, **part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chapter_runs.ChapterRunner, "run", run_or_stop)
        yield


@contextmanager
def small_explorer(size: int) -> Iterator[None]:
    """Limit the bytes of the explorer's weights of heads, and of their means."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlens.commands.shared.explorer_measure._BYTES", size)
        yield


@contextmanager
def few_passes() -> Iterator[None]:
    """Time a pass twice a round, inside the context; no test asks how long it takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlens.analysis.cost.passes._ROUND", 0.0)
        yield
