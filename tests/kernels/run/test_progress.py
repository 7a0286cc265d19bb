import io
from contextlib import suppress

from rich.console import Console

from vitlens.commands.run.progress import progress, rate_and_left


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watch(*, step: float, terminal: bool, quiet: bool = False) -> str:
    clock, stream = Clock(), io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100)
    with progress("evaluating m", 100, quiet=quiet, console=console, clock=clock) as advance:
        for _ in range(10):
            clock.now += step
            advance(10)
    return stream.getvalue()


def test_short_work_and_quiet_work_are_silent_and_long_work_says_so_now_and_then() -> None:
    for terminal in (True, False):
        assert watch(step=0.1, terminal=terminal) == watch(step=5, terminal=terminal, quiet=True) == ""
    lines = watch(step=5, terminal=False).splitlines()
    assert lines[0] == "evaluating m: 10 of 100 images, 2 images/s, 0:45 left"
    assert len(lines) == 5
    assert "evaluating m" in watch(step=5, terminal=True)


def test_the_bar_goes_away_after_an_exception() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=True)
    with suppress(ZeroDivisionError), progress("x", 2, console=console, clock=clock) as advance:
        clock.now = 5
        advance(1)
        raise ZeroDivisionError
    assert stream.getvalue().rstrip().endswith("\x1b[2K")  # the line is erased


def test_rate_and_time_left() -> None:
    for done, total, seconds, unit, words in (
        (10, 100, 5.0, "images", "2 images/s, 0:45 left"), (1, 7201, 1.0, "steps", "1 steps/s, 2:00:00 left"),
        (0, 5, 3.0, "images", "0 images/s, 0:00 left"), (999, 1998, 10.0, "images", "99.9 images/s, 0:10 left"),
    ):  # fmt: skip
        assert rate_and_left(done, total, seconds, unit) == words
