"""The messages of a run in progress, its partial results, and more images than digits."""

import io
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.kit.commands import impatient
from tests.kit.making import digits
from vitlens import load
from vitlens.arrays import Form
from vitlens.commands.run.load import ImageRequest, load_split, scenes_of_digits
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress import (
    BEAT,
    ProgressStore,
    announced,
    phase,
    progress,
    rate_and_left,
    show_again,
)
from vitlens.errors import InputError

FORMS = {"loss": Form("f", (2, 3)), "cost": Form("iu")}
ARRAYS = {"loss": np.arange(6.0).reshape(2, 3), "cost": np.array(7)}


def watch(
    stream: io.StringIO, *, step: float, terminal: bool, quiet: bool = False, fails: bool = False
) -> str:
    """Return the lines about 100 images, ten of which are done every `step` seconds.

    fails: whether the run fails at the end.
    """
    now = [0.0]
    console = Console(file=stream, force_terminal=terminal, width=100)
    with progress(
        "evaluating m", 100, quiet=quiet, console=console, clock=lambda: now[0]
    ) as advance:
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
    lines = watch(io.StringIO(), step=2.5, terminal=False).splitlines()
    assert lines[0] == "evaluating m: 10 of 100 images, 4 images/s, 0:22 left"
    assert len(lines) == 5
    stream = io.StringIO()
    with pytest.raises(ZeroDivisionError):
        watch(stream, step=5, terminal=True, fails=True)
    assert "evaluating m" in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("\x1b[2K")  # the line of the bar is erased


def lines_of_checks(*seconds: float) -> list[str]:
    """Return the lines about 20 checks, of which each takes so many seconds, every 4 seconds."""
    now = [0.0]
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=False, width=100)
    with progress("checking", 20, unit="checks", console=console, clock=lambda: now[0]) as advance:
        for duration in seconds:
            end = now[0] + duration
            while now[0] + 4 < end:
                now[0] += 4
                show_again()
            now[0] = end
            advance(1)
    return stream.getvalue().splitlines()


def test_checks_that_were_known_already_have_no_rate_and_do_not_count_for_the_time_left():
    lines = lines_of_checks(*[2.0**-12] * 4, 60.0, 60.0)
    before = [line for line in lines if "4 of 20" in line]
    assert len(before) == 14
    assert all(line.endswith(" so far") for line in before)
    # 15 checks of a minute each after the first that took time, then 14
    assert next(line for line in lines if "5 of 20" in line).endswith("15:00 left")
    assert next(line for line in lines if "6 of 20" in line).endswith("14:00 left")


def test_a_first_check_that_takes_longer_counts_for_the_time_left():
    lines = lines_of_checks(60.0, 4.0, 4.0, 4.0, 4.0)
    assert next(line for line in lines if "4 of 20" in line).endswith("4:48 left")  # 16 of 18 s


def times_of_lines(*parts: tuple[str, float], beat: float = BEAT) -> list[float]:
    """Return when lines are written of an announced run whose phases take so many seconds each."""
    now = [0.0]
    written = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            written.append(now[0])
            return super().write(text)

    console = Console(file=Stream(), force_terminal=False, width=100)
    with announced("vitlens attack", console=console, clock=lambda: now[0]):
        for name, seconds in parts:
            with phase(name) if name else nullcontext():
                end = now[0] + seconds
                while now[0] < end:
                    now[0] += beat
                    show_again()
    return [0.0, *written, now[0]]


@pytest.mark.parametrize(
    "parts",
    [
        [("", 60.0)],
        [("Self-checks of PGD", 358.0)],
        [("Loading", 1.5)] * 30,
        [("Loading", 3.0), ("", 7.0), ("Drawing figure 1 of 9", 12.5)],
    ],
)
def test_an_announced_run_is_never_silent_for_five_seconds(parts):
    times = times_of_lines(*parts)
    assert max(after - before for before, after in pairwise(times)) <= 5


def test_the_innermost_phase_is_named_and_the_one_around_it_again_afterwards():
    now = [0.0]
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=False, width=100)
    with announced("vitlens audit", console=console, clock=lambda: now[0]):
        with phase("Timing the maps"):
            now[0] = 3.0
            show_again()
            assert stream.getvalue() == "Timing the maps: 0:03 so far\n"
        now[0] = 8.0
        show_again()
    assert stream.getvalue().splitlines()[1:] == ["vitlens audit: 0:08 so far"]


def test_phases_of_a_quiet_run_are_silent(capsys):
    with impatient(), announced("vitlens audit", quiet=True), phase("Timing the maps"):
        show_again()
    assert capsys.readouterr().err == ""


def test_rate_and_time_left():
    assert rate_and_left(1, 7201, 1.0, "steps") == "1 steps/s, 2:00:00 left"
    assert rate_and_left(0, 5, 3.0, "images") == "0 images/s, 0:00 left"
    assert rate_and_left(999, 1998, 10.0, "images") == "99.9 images/s, 0:10 left"
    assert rate_and_left(1, 2, 254.0, "attacks") == "4:14 left"  # a rate of 0.00394 says nothing
    assert [rate_and_left(1, 3, 60.0, "checks", since=since) for since in (30.0, 600.0)] == [
        "1:30 left",
        "1:00 left",
    ]


@pytest.mark.parametrize("left", [[], ["notes.txt"]])
def test_what_was_kept_is_recalled_by_its_key_and_process_and_forgotten_but_for_other_files(
    tmp_path, left
):
    folder = tmp_path / "progress"
    for store in (ProgressStore(None), ProgressStore(folder)):
        assert store.recall("pgd-0", "digest", FORMS) is None
        store.remember("pgd-0", "digest", ARRAYS)
        recalled = store.recall("pgd-0", "digest", FORMS)
        assert (recalled is None) == (store.folder is None)
    for name, array in ARRAYS.items():
        assert (recalled[name] == array).all()
    for other in (
        store.recall("pgd-1", "digest", FORMS),
        ProgressStore(folder, 1).recall("pgd-0", "digest", FORMS),
    ):
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


def test_of_more_scenes_than_digits_the_first_are_those_of_a_smaller_run_and_all_differ():
    count = 950
    once = digits("test", scenes=1, seed=3)
    split = scenes_of_digits(count, seed=3)
    assert len(split) == len(split.labels) == len(split.masks) == count
    times = torch.bincount(split.groups)
    assert (times[once.groups].min(), times.max()) == (2, 3)
    assert torch.equal(split.groups[:450], once.groups)
    assert torch.equal(split.source.read(torch.arange(450)), once.source.read(torch.arange(450)))
    last = split.labels[900:].bincount()
    assert last.max() - last.min() <= 1
    assert len(split.source.read(torch.arange(450, count)).flatten(1).unique(dim=0)) == count - 450
    assert "in 2 to 3 scenes" in split.notes[-1]


def test_as_many_as_there_are_is_one_scene_each_and_only_who_asks_gets_more(tiny_vit):
    split = scenes_of_digits(450, seed=1)
    expected = digits("test", scenes=1, seed=1)
    assert torch.equal(split.groups, expected.groups)
    assert not split.notes
    model = load(str(tiny_vit))
    options = RunOptions(device="cpu", quiet=True, limit=1810)

    def count(options: RunOptions, request: ImageRequest) -> int:
        return len(load_split(model, options=options, request=request))

    assert count(options, ImageRequest()) == 1800
    assert count(options, ImageRequest(repeat=True)) == 1810
    unlimited = replace(options, limit=None)
    assert count(unlimited, ImageRequest()) == 1800
    assert count(unlimited, ImageRequest(scenes=1)) == 450
