"""A folder in which command lines run, and the rules for every run in it."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from vitlens.cli import main as cli

CODES = (0, 1, 2, 3, 130)
PATIENCE = 60.0  # seconds of a run after which it hangs
WRITABLE = ("reports", "runs", "out", "data", ".cache")  # below the working folder
_SHIFT = int(os.environ.get("VITLENS_FUZZ_SEED", "0")) * 1_000_003


def seeds(count: int) -> list[int]:
    """Return so many seeds, shifted by the fuzzer's setting."""
    return [_SHIFT + index for index in range(count)]


@dataclass(frozen=True)
class Outcome:
    """What a run left: its words, exit code (None: it hung), error stream, seconds."""

    words: tuple[str, ...]
    code: int | None
    err: str
    seconds: float

    def faults(self) -> list[str]:
        """Return the faults of any run: a hang, a traceback, a wrong code or error line."""
        lines = len(re.findall(r"^error: ", self.err, re.MULTILINE))
        faults = {
            f"hung after {self.seconds:.0f} s": self.code is None,
            f"exit code {self.code}": self.code not in (None, *CODES),
            "a traceback": "Traceback (most recent" in self.err and "--debug" not in self.words,
            "an unexpected error": "error: unexpected " in self.err,
            f"{lines} error lines with exit code {self.code}": lines
            != {0: 0, 1: 1, 2: 1}.get(self.code, lines),
        }
        return [fault for fault, present in faults.items() if present]

    def description(self) -> str:
        """Describe the run and its faults for the message of a failed test."""
        printed = []
        for word in self.words:
            printed.append(word if word and word.isprintable() else repr(word))
        line = " ".join(printed)
        return f"{', '.join(self.faults())}: vitlens {line[:600]}\n    {self.err.strip()[-600:]}"


class HangsError(BaseException):
    """A run took longer than it may; no `except Exception` of the tool's catches it."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise HangsError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)  # again, where something swallowed the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Box:
    """A folder with inputs, which no run may change, and a working folder for runs.

    Runs write only below WRITABLE.
    """

    root: Path
    inputs: Path = field(init=False)
    working_folder: Path = field(init=False)
    _before: dict[str, tuple[int, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = self.root / "inputs"
        self.working_folder = self.root / "work"
        self.inputs.mkdir(parents=True)
        self.working_folder.mkdir()

    def seal(self) -> None:
        """Record what is there, for `trespasses` to compare with."""
        self._before = self._everything()

    def trespasses(self) -> list[str]:
        """Return what appeared, changed or went away since `seal` where no run may write."""
        now = self._everything()
        return sorted(
            path
            for path in now.keys() | self._before.keys()
            if now.get(path) != self._before.get(path)
        )

    def run(self, words: Sequence[str]) -> Outcome:
        """Run one command line in this process, in the working folder.

        A crash ends the worker, which pytest-xdist reports.
        """
        err = io.StringIO()
        code = None
        start = time.monotonic()
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(err),
            contextlib.chdir(self.working_folder),
            contextlib.suppress(HangsError),
            alarm(PATIENCE),
        ):
            try:
                code = cli.run(list(words))
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
        return Outcome(tuple(words), code, err.getvalue(), time.monotonic() - start)

    def _everything(self) -> dict[str, tuple[int, int]]:
        entries = {}
        allowed = {str(self.working_folder / name) for name in WRITABLE}
        for place, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if f"{place}/{name}" not in allowed]
            for name in [*files, *folders]:
                facts = os.lstat(f"{place}/{name}")
                entries[f"{place}/{name}"] = (
                    (0, 0) if name in folders else (facts.st_mtime_ns, facts.st_size)
                )
        return entries


def start_command(words: Sequence[str], folder: Path) -> "subprocess.Popen[bytes]":
    """Start a command line of this tree's vitlens, with one thread and without a hub."""
    tree = str(Path(__file__).parents[2])
    nowhere = subprocess.DEVNULL
    settings = {
        "PYTHONPATH": tree,
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "HF_HUB_OFFLINE": "1",
    }
    line = [sys.executable, "-m", "vitlens", *words]
    return subprocess.Popen(
        line, cwd=folder, env={**os.environ, **settings}, stdout=nowhere, stderr=nowhere
    )


def require_sound(outcomes: Sequence[Outcome], box: Box) -> None:
    """Fail for every run with a fault, and for what was written where no run may write."""
    faults = [outcome.description() for outcome in outcomes if outcome.faults()]
    faults += [f"written outside its folder: {path}" for path in box.trespasses()]
    assert not faults, "\n".join([f"{len(faults)} faults of {len(outcomes)} runs", *faults])
