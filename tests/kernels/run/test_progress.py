"""What a run says while it works, and the partial results that it keeps, and forgets once it has ended."""

import io

import numpy as np
import pytest
from rich.console import Console

from vitlens.arrays import Form
from vitlens.commands.run.progress import ProgressStore, progress, rate_and_left
from vitlens.errors import InputError

FORMS = {"loss": Form("f", (2, 3)), "cost": Form("iu")}
ARRAYS = {"loss": np.arange(6.0).reshape(2, 3), "cost": np.array(7)}


def watch(stream: io.StringIO, *, step: float, terminal: bool, quiet: bool = False, fails: bool = False) -> str:
    """What is said of 100 images, ten of which are done every `step` seconds; fails: in the end."""
    now = [0.0]
    console = Console(file=stream, force_terminal=terminal, width=100)
    with progress("evaluating m", 100, quiet=quiet, console=console, clock=lambda: now[0]) as advance:
        for _ in range(10):
            now[0] += step
            advance(10)
        if fails:
            raise ZeroDivisionError
    return stream.getvalue()


def test_short_work_and_quiet_work_are_silent_and_long_work_says_so_now_and_then():
    for terminal in (True, False):
        assert watch(io.StringIO(), step=0.1, terminal=terminal) == ""
        assert watch(io.StringIO(), step=5, terminal=terminal, quiet=True) == ""
    lines = watch(io.StringIO(), step=5, terminal=False).splitlines()
    assert lines[0] == "evaluating m: 10 of 100 images, 2 images/s, 0:45 left"
    assert len(lines) == 5
    stream = io.StringIO()
    with pytest.raises(ZeroDivisionError):
        watch(stream, step=5, terminal=True, fails=True)
    assert "evaluating m" in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("\x1b[2K")  # the line of the bar is erased


def test_rate_and_time_left():
    assert rate_and_left(1, 7201, 1.0, "steps") == "1 steps/s, 2:00:00 left"
    assert rate_and_left(0, 5, 3.0, "images") == "0 images/s, 0:00 left"
    assert rate_and_left(999, 1998, 10.0, "images") == "99.9 images/s, 0:10 left"


@pytest.mark.parametrize("left", [[], ["notes.txt"]])
def test_what_was_kept_is_recalled_by_its_key_and_process_and_forgotten_but_for_other_files(tmp_path, left):
    folder = tmp_path / "progress"
    for store in (ProgressStore(None), ProgressStore(folder)):
        assert store.recall("pgd-0", "digest", FORMS) is None
        store.remember("pgd-0", "digest", ARRAYS)
        recalled = store.recall("pgd-0", "digest", FORMS)
        assert (recalled is None) == (store.folder is None)
    assert all((recalled[name] == array).all() for name, array in ARRAYS.items())
    for other in (store.recall("pgd-1", "digest", FORMS), ProgressStore(folder, 1).recall("pgd-0", "digest", FORMS)):
        assert other is None
    with pytest.raises(InputError, match="found others"):
        store.recall("pgd-0", "another", FORMS)
    with pytest.raises(InputError, match="'loss'"):
        store.recall("pgd-0", "digest", FORMS | {"loss": Form("f", (2, 4))})
    for name in left:
        (folder / name).touch()
    store.forget()
    assert [path.name for path in folder.glob("*")] == left
    assert folder.exists() == bool(left)
