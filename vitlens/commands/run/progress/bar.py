"""Progress of a run: a bar with rate and time left on a terminal, plain lines elsewhere, nothing for short work."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from vitlens.deadline import require_time
from vitlens.display import for_terminal
from vitlens.report.numbers import number

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
    console, what = console or Console(stderr=True), for_terminal(what)
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"), console=console, transient=True,
    )  # fmt: skip
    task = bar.add_task(what, total=total, rate="")
    start, done, shown = clock(), 0, float("-inf")

    def advance(count: int) -> None:
        nonlocal done, shown
        require_time()
        done += count
        now = clock()
        if quiet or now - start < PATIENCE:
            return
        rate = rate_and_left(done, total, now - start, unit)
        if console.is_terminal:
            bar.start()  # nothing happens when it has started already
            bar.update(task, completed=done, rate=rate)
        elif now - shown >= LINE_EVERY:
            shown = now
            console.print(
                f"{what}: {done:,} of {total:,} {unit}, {rate}", highlight=False, markup=False, soft_wrap=True
            )

    try:
        yield advance
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
