"""What a run says while it works, and the partial results that it keeps, and forgets once it has ended."""

import io
from contextlib import suppress

import numpy as np
import pytest
from rich.console import Console

from vitlens.arrays import Form
from vitlens.commands.run.progress import ProgressStore, progress, rate_and_left
from vitlens.errors import InputError

FORMS = {"loss": Form("f", (2, 3)), "cost": Form("iu")}
ARRAYS = {"loss": np.arange(6.0).reshape(2, 3), "cost": np.array(7)}


def watch(*, step: float, terminal: bool, quiet: bool = False) -> str:
    """What is said of 100 images, ten of which are done every `step` seconds."""
    stream, now = io.StringIO(), [0.0]
    console = Console(file=stream, force_terminal=terminal, width=100)
    with progress("evaluating m", 100, quiet=quiet, console=console, clock=lambda: now[0]) as advance:
        for _ in range(10):
            now[0] += step
            advance(10)
    return stream.getvalue()


def test_short_work_and_quiet_work_are_silent_and_long_work_says_so_now_and_then():
    for terminal in (True, False):
        assert watch(step=0.1, terminal=terminal) == watch(step=5, terminal=terminal, quiet=True) == ""
    lines = watch(step=5, terminal=False).splitlines()
    assert lines[0] == "evaluating m: 10 of 100 images, 2 images/s, 0:45 left"
    assert len(lines) == 5
    assert "evaluating m" in watch(step=5, terminal=True)


def test_the_bar_goes_away_after_an_exception():
    stream, now = io.StringIO(), [0.0]
    console = Console(file=stream, force_terminal=True)
    with suppress(ZeroDivisionError), progress("x", 2, console=console, clock=lambda: now[0]) as advance:
        now[0] = 5.0
        advance(1)
        raise ZeroDivisionError
    assert stream.getvalue().rstrip().endswith("\x1b[2K")  # the line is erased


def test_rate_and_time_left():
    assert rate_and_left(1, 7201, 1.0, "steps") == "1 steps/s, 2:00:00 left"
    assert rate_and_left(0, 5, 3.0, "images") == "0 images/s, 0:00 left"
    assert rate_and_left(999, 1998, 10.0, "images") == "99.9 images/s, 0:10 left"


def test_what_was_kept_is_recalled_by_its_key_and_process(tmp_path):
    store = ProgressStore(tmp_path / "progress")
    assert store.recall("pgd-0", "digest", FORMS) is None
    store.remember("pgd-0", "digest", ARRAYS)
    recalled = store.recall("pgd-0", "digest", FORMS)
    assert recalled is not None
    assert all((recalled[name] == array).all() for name, array in ARRAYS.items())
    assert store.recall("pgd-1", "digest", FORMS) is None
    assert ProgressStore(tmp_path / "progress", process=1).recall("pgd-0", "digest", FORMS) is None


def test_other_inputs_and_other_forms_are_refused(tmp_path):
    store = ProgressStore(tmp_path / "progress")
    store.remember("pgd-0", "digest", ARRAYS)
    with pytest.raises(InputError, match="found others"):
        store.recall("pgd-0", "another", FORMS)
    with pytest.raises(InputError, match="'loss'"):
        store.recall("pgd-0", "digest", FORMS | {"loss": Form("f", (2, 4))})


@pytest.mark.parametrize("left", [[], ["notes.txt"]])
def test_a_finished_run_leaves_nothing_but_what_is_not_its_own(tmp_path, left):
    nowhere, store = ProgressStore(None), ProgressStore(tmp_path / "progress")
    nowhere.remember("pgd-0", "digest", ARRAYS)
    assert nowhere.recall("pgd-0", "digest", FORMS) is None
    store.remember("pgd-0", "digest", ARRAYS)
    for name in left:
        (tmp_path / "progress" / name).touch()
    store.forget()
    assert [path.name for path in (tmp_path / "progress").glob("*")] == left
