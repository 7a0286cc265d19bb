"""Progress of a training: one line with loss, accuracy, rate and time left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from vitlens.commands.run.progress.bar import LINE_EVERY, PATIENCE
from vitlens.display import for_terminal
from vitlens.training.metrics import Progress


@contextmanager
def training_progress(
    what: str,
    *,
    quiet: bool = False,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[Progress], None]]:
    """Yields the progress callback of `fit`: a bar on a terminal, elsewhere a line every ten seconds; on stderr."""
    console, what = console or Console(stderr=True), for_terminal(what)
    bar = Bar(
        TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[facts]}"), console=console
    )
    task = bar.add_task(what, total=None, facts="")
    start, shown = clock(), float("-inf")

    def show(progress: Progress) -> None:
        nonlocal shown
        now = clock()
        if quiet or now - start < PATIENCE:
            return
        if console.is_terminal:
            bar.start()
            bar.update(task, total=progress.steps, completed=progress.step, facts=progress_line(progress))
        elif now - shown >= LINE_EVERY:
            shown = now
            console.print(f"{what}: {progress_line(progress)}", highlight=False, markup=False, soft_wrap=True)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def progress_line(progress: Progress) -> str:
    """ "epoch 3/20, loss 0.512, accuracy 84.1 %, test 90.2 %, 1,240 images/s, 0:42 left"."""
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    parts = [
        f"epoch {progress.epoch + 1}/{progress.epochs}",
        f"loss {progress.loss:.3f}",
        f"accuracy {progress.accuracy:.1%}".replace("%", " %"),
    ]
    if progress.test_accuracy is not None:
        parts.append(f"test {progress.test_accuracy:.1%}".replace("%", " %"))
    return ", ".join([*parts, f"{progress.images_per_second:,.0f} images/s", f"{minutes}:{seconds:02} left"])
