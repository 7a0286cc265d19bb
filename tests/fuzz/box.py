"""A folder in which the command line is run, and what must hold of every run in it, whatever it is given."""

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CODES = (0, 1, 2, 3, 130)
PATIENCE = 60.0  # seconds of a run after which it hangs
MEMORY = 4000.0  # MB that no run on these small inputs may need
_ERROR = re.compile(r"^error: ", re.MULTILINE)
_UNEXPECTED = re.compile(r"^error: unexpected ", re.MULTILINE)
_SHIFT = int(os.environ.get("VITLENS_FUZZ_SEED", "0")) * 1_000_003
_TREE = Path(__file__).parents[2]


def seeds(count: int) -> list[int]:
    """So many seeds, those of the fuzzer's own shift."""
    return [_SHIFT + index for index in range(count)]


@dataclass(frozen=True)
class Outcome:
    """What a run left: its words, exit code (None: it hung or its process died), both streams, seconds, peak MB."""

    words: tuple[str, ...]
    code: int | None
    out: str
    err: str
    seconds: float
    mb: float = 0.0

    def faults(self) -> list[str]:
        """What is wrong with it, whatever was asked: a hang, a traceback, a code or error line that should not be."""
        if self.code is None:
            return [f"hung or died after {self.seconds:.0f} s"]
        found = []
        if self.code not in CODES:
            found.append(f"exit code {self.code}")
        if "Traceback (most recent" in self.err and "--debug" not in self.words:
            found.append("a traceback")
        if _UNEXPECTED.search(self.err):
            found.append("an unexpected error")
        lines = len(_ERROR.findall(self.err))
        if self.code in (1, 2) and lines != 1:
            found.append(f"{lines} error lines with exit code {self.code}")
        if self.code == 0 and lines:
            found.append("an error line with exit code 0")
        if self.mb > MEMORY:
            found.append(f"{self.mb:.0f} MB")
        return found

    def description(self) -> str:
        """The run and its faults, as a failed test prints them."""
        line = " ".join(repr(word) if not word or not word.isprintable() else word for word in self.words)
        return f"{', '.join(self.faults())}: vitlens {line[:600]}\n    {self.err.strip()[-600:]}"


class Driver:
    """Runs command lines one after another in one process, and starts another where one dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, words: Sequence[str], folder: Path, *, patience: float = PATIENCE) -> Outcome:
        """One command line in that folder."""
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        start = time.monotonic()
        process.stdin.write(json.dumps({"words": list(words), "folder": str(folder), "patience": patience}) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], patience + 60)
        line = process.stdout.readline() if ready else ""
        if not line:
            self.close()
            return Outcome(tuple(words), None, "", "", time.monotonic() - start)
        answer = json.loads(line)
        if answer["mb"] > MEMORY:  # a peak stays: the next run is judged by its own
            self.close()
        return Outcome(tuple(words), answer["code"], answer["out"], answer["err"], answer["seconds"], answer["mb"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.driver"],
                cwd=_TREE,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="surrogateescape",
            )
        return self._process


@dataclass
class Box:
    """A folder with inputs, which no run may change, and a working folder in which runs write.

    A run may write in work/{reports,runs,out,data,.cache} alone; whatever else appears or changes is a fault.
    """

    root: Path
    driver: Driver
    inputs: Path = field(init=False)
    work: Path = field(init=False)
    _before: dict[str, tuple[int, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs, self.work = self.root / "inputs", self.root / "work"
        self.inputs.mkdir(parents=True)
        self.work.mkdir()

    def seal(self) -> None:
        """Remember what is there: `trespasses` compares with it."""
        self._before = self._everything()

    def trespasses(self) -> list[str]:
        """What appeared, changed or went away since `seal` where no run may write."""
        now = self._everything()
        return sorted(path for path in now.keys() | self._before.keys() if now.get(path) != self._before.get(path))

    def run(self, words: Sequence[str], *, patience: float = PATIENCE) -> Outcome:
        """One command line in the driver's process, in the working folder."""
        return self.driver.run(words, self.work, patience=patience)

    def command(self, words: Sequence[str], *, patience: float = PATIENCE * 2) -> Outcome:
        """One command line as a process of its own; its imports are counted."""
        start = time.monotonic()
        with start_command(words, self.work) as child:
            try:
                out, err = child.communicate(timeout=patience)
                code: int | None = child.returncode
            except subprocess.TimeoutExpired:
                child.kill()
                (out, err), code = child.communicate(), None
        return Outcome(tuple(words), code, out, err, time.monotonic() - start)

    def _everything(self) -> dict[str, tuple[int, int]]:
        found = {}
        allowed = {str(self.work / name) for name in ("reports", "runs", "out", "data", ".cache")}
        for place, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if f"{place}/{name}" not in allowed]
            for name in [*files, *folders]:
                path = f"{place}/{name}"
                facts = os.lstat(path)
                found[path] = (0, 0) if name in folders else (facts.st_mtime_ns, facts.st_size)
        return found


def start_command(words: Sequence[str], folder: Path) -> "subprocess.Popen[str]":
    """A command line as a process of its own, not waited for."""
    return subprocess.Popen(
        [sys.executable, "-m", "vitlens", *words],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
    )


def environment() -> dict[str, str]:
    """The environment of a child: this tree's vitlens, one thread, a home of its own for caches, no hub."""
    return {
        **os.environ,
        "PYTHONPATH": str(_TREE),
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }


def require_sound(outcomes: Sequence[Outcome], box: Box) -> None:
    """Fail with every run that has a fault, and with what was written where no run may write."""
    faults = [outcome.description() for outcome in outcomes if outcome.faults()]
    faults += [f"written outside its folder: {path}" for path in box.trespasses()]
    assert not faults, "\n".join([f"{len(faults)} faults of {len(outcomes)} runs", *faults])
