import io

import pytest
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


@pytest.mark.parametrize("terminal", [True, False])
def test_short_work_and_quiet_work_are_silent(terminal: bool) -> None:
    assert watch(step=0.1, terminal=terminal) == ""
    assert watch(step=5, terminal=terminal, quiet=True) == ""


def test_plain_lines_come_now_and_then() -> None:
    lines = watch(step=5, terminal=False).splitlines()
    assert lines[0] == "evaluating m: 10 of 100 images, 2 images/s, 0:45 left"
    assert len(lines) == 5


def test_a_terminal_gets_a_bar() -> None:
    assert "evaluating m" in watch(step=5, terminal=True)


def test_the_bar_goes_away_after_an_exception() -> None:
    stream = io.StringIO()
    clock = Clock()

    def fail() -> None:
        with progress("x", 2, console=Console(file=stream, force_terminal=True), clock=clock) as advance:
            clock.now = 5
            advance(1)
            raise ValueError("in the loop")

    with pytest.raises(ValueError, match="in the loop"):
        fail()
    assert stream.getvalue().rstrip().endswith("\x1b[2K")  # the line is erased


def test_rate_and_time_left() -> None:
    assert rate_and_left(10, 100, 5.0, "images") == "2 images/s, 0:45 left"
    assert rate_and_left(1, 7201, 1.0, "steps") == "1 steps/s, 2:00:00 left"
    assert rate_and_left(0, 5, 3.0, "images") == "0 images/s, 0:00 left"
    assert rate_and_left(14_800, 44_400, 10.0, "images") == "1,480 images/s, 0:20 left"
    assert rate_and_left(999, 1998, 10.0, "images") == "99.9 images/s, 0:10 left"
