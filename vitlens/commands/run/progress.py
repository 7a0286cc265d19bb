"""Progress of a run and of a training as it is shown, and partial results from which a run resumes."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from vitlens.arrays import Form, read_arrays, require_forms, write_arrays
from vitlens.commands.run.deadline import require_time
from vitlens.display import for_terminal
from vitlens.errors import InputError
from vitlens.report.numbers import number
from vitlens.training.metrics import Progress

Advance = Callable[[int], None]

PATIENCE = 2.0  # seconds before anything is shown
LINE_EVERY = 10.0  # seconds between plain lines


@contextmanager
def progress(
    what: str,
    total: int,
    *,
    unit: str = "images",
    quiet: bool = False,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Show the progress of a loop; call the yielded function with the number of units just done.

    Written to stderr, so that stdout stays for results; silent with quiet, and for the first two seconds.
    """
    with _shown(what, quiet=quiet, console=console, clock=clock, transient=True) as show:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            require_time()
            done += count
            counted = f"{done:,} of {total:,} {unit}, "
            show(done, total, counted, lambda seconds: rate_and_left(done, total, seconds, unit))

        yield advance


@contextmanager
def training_progress(what: str, *, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Yields the progress callback of `fit`: a bar on a terminal, elsewhere a line every ten seconds; on stderr."""
    with _shown(what, quiet=quiet, console=None, clock=time.monotonic, transient=False) as show:
        yield lambda each: show(each.step, each.steps, "", lambda _: progress_line(each))


@contextmanager
def _shown(
    what: str, *, quiet: bool, console: Console | None, clock: Callable[[], float], transient: bool
) -> Iterator[Callable[[int, int, str, Callable[[float], str]], None]]:
    """Yields what shows the units done, of how many; their count in words, for a line without a bar; and what else is
    told, from the seconds so far."""
    console, what = console or Console(stderr=True), for_terminal(what)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *[TaskProgressColumn()] * transient)
    bar = Bar(*columns, TextColumn("{task.fields[words]}"), console=console, transient=transient)
    task = bar.add_task(what, total=None, words="")
    start, shown = clock(), float("-inf")

    def show(done: int, total: int, counted: str, told: Callable[[float], str]) -> None:
        nonlocal shown
        now = clock()
        if quiet or now - start < PATIENCE:
            return
        if console.is_terminal:
            bar.start()  # nothing happens when it has started already
            bar.update(task, total=total, completed=done, words=told(now - start))
        elif now - shown >= LINE_EVERY:
            shown = now
            console.print(f"{what}: {counted}{told(now - start)}", highlight=False, markup=False, soft_wrap=True)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def rate_and_left(done: int, total: int, seconds: float, unit: str) -> str:
    """ "210 images/s, 0:42 left"."""
    rate = done / seconds
    left = round((total - done) / rate) if rate else 0
    hours, minutes = divmod(left // 60, 60)
    clock = f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes}:{left % 60:02}"
    return f"{number(rate)} {unit}/s, {clock} left"


PROGRESS: Final = "progress"  # the folder within the run's


@dataclass(frozen=True)
class ProgressStore:
    """Arrays by key while a run lasts, one file each, with the digest of what they were computed from.

    folder: None keeps nothing; process: which of several processes computed them.
    """

    folder: Path | None
    process: int = 0

    def recall(self, key: str, digest: str, forms: Mapping[str, Form]) -> dict[str, NDArray[np.generic]] | None:
        """The arrays stored under a key, or None; forms: their expected types and shapes.

        Raises InputError when they were computed from something else (digest: of what they should be computed from), or
        are damaged.
        """
        path = self._path(key)
        if path is None or not path.is_file():
            return None
        stored = read_arrays(path)
        require_forms(stored, {"digest": Form("U")}, path, hint="start again without --resume")
        if str(stored["digest"]) != digest:
            raise InputError(
                f"expected the images that the run in {path.parent.parent} began with, found others; give the same "
                "--data, --limit, --seed and --batch-size, or begin anew without --resume"
            )
        require_forms(stored, forms, path, hint="start again without --resume")
        return {name: stored[name] for name in forms}

    def remember(self, key: str, digest: str, arrays: Mapping[str, ArrayLike]) -> None:
        """Store arrays under a key, in one atomic write."""
        path = self._path(key)
        if path is not None:
            write_arrays(path, {"digest": digest, **{name: np.asarray(array) for name, array in arrays.items()}})

    def forget(self) -> None:
        """Delete everything, once the run has ended."""
        if self.folder is None or not self.folder.is_dir():
            return
        for file in self.folder.glob("*.npz"):
            file.unlink()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _path(self, key: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{key}-{self.process}.npz"


def progress_line(progress: Progress) -> str:
    """ "epoch 3/20, loss 0.512, accuracy 84.1 %, test 90.2 %, 1,240 images/s, 0:42 left"."""
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    parts = [
        f"epoch {progress.epoch + 1}/{progress.epochs}",
        f"loss {progress.loss:.3f}",
    ]
    for word, share in (("accuracy", progress.accuracy), ("test", progress.test_accuracy)):
        if share is not None:
            parts.append(f"{word} {share:.1%}".replace("%", " %"))
    return ", ".join([*parts, f"{progress.images_per_second:,.0f} images/s", f"{minutes}:{seconds:02} left"])
