"""Progress on stderr; and, independent of it, partial results from which a run resumes.

`announced` shows that a run is alive, `phase` names a part without steps, `progress` counts the
steps of a loop, and `training_progress` those of a training. They nest, and only the innermost is
shown (`_DISPLAYED`). `ProgressStore`, the last class, keeps the partial results.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, RLock, Thread
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
SLOW = 0.1  # units a second, below which the rate says less than the time that is left
LINE_EVERY = 3.0  # seconds between plain lines: after 5 s of silence a run seems to hang
# a unit that takes this many times as long as all before it together: those took no time
MUCH_LONGER = 10
BEAT = 0.5  # seconds between checks whether a line is due


@contextmanager
def announced(
    what: str,
    *,
    quiet: bool = False,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Show on stderr what a run does, so that it is never silent for long.

    It shows the phase that runs now, or `what` if none does; a thread repeats it. Silent with
    quiet, in all processes but the first of a distributed run, and for the first PATIENCE seconds.
    """
    is_first_process = os.environ.get("RANK", "0") == "0"  # torchrun sets RANK
    if quiet or not is_first_process:
        yield
        return
    ended = Event()

    def repeat() -> None:
        while not ended.wait(BEAT):
            show_again()

    with _displayed(what, console=console, clock=clock, transient=True):
        thread = Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Name a part of an announced run that counts no steps.

    Nothing is shown of a run that is not announced.
    """
    with _LOCK:
        outer = _DISPLAYED[-1] if _DISPLAYED else None
    if outer is None:
        yield
        return
    with _displayed(what, console=outer.console, clock=outer.clock, transient=True):
        yield


def show_again() -> None:
    """Show again what runs now, where that is due."""
    with _LOCK:
        if _DISPLAYED:
            _DISPLAYED[-1].show()


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

    Written to stderr, so that stdout stays for results; silent with quiet, and for the first
    PATIENCE seconds.
    """
    done = 0
    seconds_of_last = 0.0  # from the start until the last unit was done
    # Units from an earlier run or a cache take no time. When one unit takes much longer than all
    # before it together, those count as known, and the rate is measured from there on.
    known = 0
    seconds_of_known = 0.0
    if quiet:

        def advance_unseen(_: int) -> None:
            require_time()

        yield advance_unseen
        return
    with _displayed(what, console=console, clock=clock, transient=True) as display:

        def words(seconds: float) -> str:
            since_last = seconds - seconds_of_last
            seconds_measured = seconds_of_last - seconds_of_known
            if done == known or since_last > MUCH_LONGER * seconds_measured:
                return elapsed(seconds)
            return rate_and_left(
                done - known, total - known, seconds_measured, unit, since=since_last
            )

        def state() -> _State:
            return _State(done, total, f"{done:,} of {total:,} {unit}, ", words)

        def advance(count: int) -> None:
            nonlocal done, seconds_of_last, known, seconds_of_known
            require_time()
            seconds = display.clock() - display.start
            seconds_before = seconds_of_last - seconds_of_known
            if seconds - seconds_of_last > MUCH_LONGER * seconds_before:
                known = done
                seconds_of_known = seconds_of_last
            done += count
            seconds_of_last = seconds
            display.update(state())

        display.state = state()  # shown with the first unit, or by show_again
        yield advance


@contextmanager
def training_progress(what: str, *, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Yield the progress callback of `fit`: a bar on a terminal, elsewhere lines; on stderr."""
    if quiet:
        yield lambda _: None
        return
    with _displayed(what, console=None, clock=time.monotonic, transient=False) as display:

        def report(training: Progress) -> None:
            state = _State(training.step, training.steps, "", lambda _: progress_line(training))
            display.update(state)

        yield report


def elapsed(seconds: float) -> str:
    """Return the time so far in words: "1:05 so far"."""
    return f"{_as_clock(seconds)} so far"


@dataclass(frozen=True)
class _State:
    """How far a phase is.

    done, total: the units done, and all units (None: not counted).
    counted: both in words, for a plain line; a bar shows them as its length.
    words: returns what else is shown, from the seconds since the start.
    """

    done: int = 0
    total: int | None = None
    counted: str = ""
    words: Callable[[float], str] = elapsed


class _Display:
    """A phase as it is shown: a bar on a terminal, elsewhere a line now and then.

    transient: True to remove the bar at the end, and to show the share of units done.
    """

    last_shown = float("-inf")  # time at which anything of any phase was shown

    def __init__(
        self, what: str, console: Console | None, clock: Callable[[], float], transient: bool
    ) -> None:
        self.what = for_terminal(what)
        self.console = console or Console(stderr=True)
        self.clock = clock
        self.start = clock()
        self.last_line = float("-inf")  # time at which this phase last printed a line
        self.state = _State()
        columns = [TextColumn("{task.description}", markup=False), BarColumn()]
        if transient:
            columns.append(TaskProgressColumn())
        columns.append(TextColumn("{task.fields[words]}"))
        # results on stdout must not pass through the console, which writes to stderr
        self.bar = Bar(*columns, console=self.console, transient=transient, redirect_stdout=False)
        self.task = self.bar.add_task(self.what, total=None, words="")

    def update(self, state: _State) -> None:
        """Keep how far it is, and show it where that is due."""
        with _LOCK:
            self.state = state
            self.show()

    def show(self) -> None:
        """Show it where it, or the silence before it, has lasted for long enough."""
        now = self.clock()
        has_lasted = now - self.start >= PATIENCE
        was_silent = now - _Display.last_shown >= LINE_EVERY
        if not (has_lasted or was_silent):
            return
        state = self.state
        detail = state.words(now - self.start)
        if self.console.is_terminal:
            self.bar.start()  # nothing happens when it has started already
            self.bar.update(self.task, total=state.total, completed=state.done, words=detail)
            _Display.last_shown = now
        elif now - self.last_line >= LINE_EVERY:
            self.last_line = now
            _Display.last_shown = now
            line = f"{self.what}: {state.counted}{detail}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def hide(self) -> None:
        """Take the bar away, for a phase within this one, or at its end."""
        if self.bar.live.is_started:
            self.bar.stop()


_DISPLAYED: Final[list[_Display]] = []  # the phases that run now, each within the one before
_LOCK: Final = RLock()


@contextmanager
def _displayed(
    what: str, *, console: Console | None, clock: Callable[[], float], transient: bool
) -> Iterator[_Display]:
    """Yield a phase that is shown in place of the one around it."""
    display = _Display(what, console, clock, transient)
    with _LOCK:
        if _DISPLAYED:
            _DISPLAYED[-1].hide()
        else:
            _Display.last_shown = display.start  # a run begins: silence counts from now
        _DISPLAYED.append(display)
        display.show()
    try:
        yield display
    finally:
        with _LOCK:
            display.hide()
            _DISPLAYED.remove(display)


def duration_words(seconds: float) -> str:
    """Return a duration in words: "40 s", "12 min", or "1 h 5 min"."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _as_clock(duration: float) -> str:
    """Return a duration in seconds as "0:42", or as "1:02:03" from an hour on."""
    minutes, seconds = divmod(round(duration), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def rate_and_left(done: int, total: int, seconds: float, unit: str, *, since: float = 0.0) -> str:
    """Return "210 images/s, 0:42 left".

    seconds: the time that the units done took.
    since: the time since the last unit was done.
    """
    rate = done / seconds if seconds else 0.0
    units_left = total - done
    seconds_left = 0.0
    if rate:
        # the next unit may take longer than the others, but all after it are still to come
        after_next = (units_left - 1) / rate
        seconds_left = max(0.0, after_next, units_left / rate - since)
    words = f"{_as_clock(seconds_left)} left"
    if 0 < rate < SLOW:
        return words
    return f"{number(rate)} {unit}/s, {words}"


PROGRESS: Final = "progress"  # the folder within the run's


@dataclass(frozen=True)
class ProgressStore:
    """Arrays that a run keeps by key until it ends, one file each, to resume if it is stopped.

    A file also has the digest of what its arrays were computed from.

    folder: the folder of the files, None to keep nothing.
    process: the index of this process among several, each of which has its files.
    """

    folder: Path | None
    process: int = 0

    def recall(
        self, key: str, digest: str, forms: Mapping[str, Form]
    ) -> dict[str, NDArray[np.generic]] | None:
        """Return the arrays stored under a key, None if there are none.

        digest: of what they should be computed from.
        forms: their expected types and shapes by name.

        Raises InputError when they were computed from something else, or are damaged.
        """
        path = self._path(key)
        if path is None or not path.is_file():
            return None
        stored = read_arrays(path)
        require_forms(stored, {"digest": Form("U")}, path, hint="start again without --resume")
        if str(stored["digest"]) != digest:
            raise InputError(
                f"expected the images that the run in {path.parent.parent} began with, "
                "found others; give the same --data, --limit, --seed and --batch-size, "
                "or start again without --resume"
            )
        require_forms(stored, forms, path, hint="start again without --resume")
        return {name: stored[name] for name in forms}

    def remember(self, key: str, digest: str, arrays: Mapping[str, ArrayLike]) -> None:
        """Store arrays under a key, in one atomic write."""
        path = self._path(key)
        if path is None:
            return
        stored: dict[str, ArrayLike] = {"digest": digest}
        for name, array in arrays.items():
            stored[name] = np.asarray(array)
        write_arrays(path, stored)

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
    """Return the line of an epoch: "epoch 3/20, loss 0.512, accuracy 84.1 %, ..., 0:42 left"."""
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    parts = [
        f"epoch {progress.epoch + 1}/{progress.epochs}",
        f"loss {progress.loss:.3f}",
    ]
    if progress.accuracy is not None:
        parts.append(f"accuracy {100 * progress.accuracy:.1f} %")
    if progress.test_accuracy is not None:
        parts.append(f"test {100 * progress.test_accuracy:.1f} %")
    parts.append(f"{progress.images_per_second:,.0f} images/s")
    parts.append(f"{minutes}:{seconds:02} left")
    return ", ".join(parts)
