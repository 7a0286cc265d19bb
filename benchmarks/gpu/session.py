"""One run of the script: which cases are measured, which are in the file, which there is no time or
memory for.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from benchmarks.gpu.machine import Machine, computing
from benchmarks.gpu.rows import Row, Rows, Value
from vitlens.errors import RunError

Values = dict[str, Value]


class OutOfTimeError(BaseException):
    """The time of a part is up; no library that catches exceptions may catch it."""


class CheckFailedError(Exception):
    """A part does not give on this device what it gives on the CPU."""


@dataclass
class Session:
    """What a part is given.

    tiny: small models and sizes; seconds: of a part; folder: of what training keeps; data: zips or
    a folder of CIFAR-10 (JPEG); minutes: of a training; missing: cases that were not measured, and
    why.
    """

    device: torch.device
    machine: Machine
    rows: Rows
    tiny: bool = False
    seconds: float = 115.0
    folder: Path = Path("runs/gpu")
    data: tuple[Path, ...] = ()
    minutes: float = 5.0
    part: str = ""
    missing: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds left for this part."""
        return self.seconds - (time.monotonic() - self.began)

    def check(self, what: str, work: Callable[[torch.device], Tensor], *, tolerance: float) -> None:
        """Compare a result in fp32 on this device with the CPU's, relative to its largest value.

        Raises CheckFailedError where they differ by more than the tolerance: then the part is not
        measured.
        """
        name = f"check: {what}"
        if self.known(name) is None:
            expected, found = (
                self._exactly(work, device) for device in (torch.device("cpu"), self.device)
            )
            if expected.shape != found.shape or not found.isfinite().all():
                raise CheckFailedError(
                    f"{what}: expected {tuple(expected.shape)} finite, found {tuple(found.shape)}"
                )
            apart = (found - expected).abs().max().item() / max(1e-12, expected.abs().max().item())
            verdict = "passed" if apart <= tolerance else "failed"
            self._add(
                name, "check", {"difference": apart, "tolerance": tolerance, "result": verdict}
            )
        row = self.known(name)
        assert row is not None
        if row.values["result"] != "passed":
            raise CheckFailedError(
                f"{what}: expected the CPU's fp32 within {tolerance:g} of its largest value, found "
                f"{row.values['difference']:.1e}"
            )

    def case(
        self, name: str, measure: Callable[[int], Values], *, batch: int, needs: float = 0.0
    ) -> None:
        """Measure a case, unless the file has it or the time is up; with half the batch where
        memory is too small.

        measure: from the number of images at a time to values; needs: seconds without which it is
        not begun.
        """
        if self.known(name) is not None:
            return
        if not self.tiny and self.left < needs:
            raise OutOfTimeError(name)
        started = time.monotonic()
        too_large = 0
        while True:
            try:
                values = measure(batch)
                break
            except torch.OutOfMemoryError:
                if batch == 1:
                    self._skip(name, "out of memory with a single image")
                    return
                too_large = batch
                batch = batch // 2
            except (
                RuntimeError,
                ValueError,
                TypeError,
            ) as error:  # time on a card is short: the other cases go on
                self._skip(name, f"{type(error).__name__}: {error}")
                return
            self._free()
        values = {"images at a time": batch, **values}
        if too_large:
            values["out of memory at"] = too_large
            print(
                f"{self.part}, {name}: out of memory with {too_large} images at a time; "
                f"--batch-size {batch} fits",
                file=sys.stderr,
            )
        self._add(name, "case", {**values, "measured in (s)": round(time.monotonic() - started, 1)})
        self._free()

    @contextmanager
    def of_part(self, part: str, seconds: float) -> Iterator[None]:
        """Inside, cases belong to this part, and OutOfTimeError is raised, also within a case, when
        its time is up.

        That error, a failed check and a failed run end the part: what is missing is noted, the next
        part can begin.
        """
        self.part = part
        self.began = time.monotonic()
        self.seconds = seconds
        try:
            with _alarm(seconds):
                yield
        except OutOfTimeError as error:
            self._skip(
                str(error) or "the rest",
                f"the {seconds:.0f} s of a part were up; run the same command again",
            )
        except CheckFailedError as error:
            self._skip("all of it", f"its check failed: {error}")
        except RunError as error:
            self._skip("the rest", str(error))

    def _exactly(self, work: Callable[[torch.device], Tensor], device: torch.device) -> Tensor:
        with computing(device, "fp32"):
            return work(device).detach().double().cpu()

    def known(self, case: str) -> Row | None:
        """Return the row of a case of this part that the file has, or None."""
        machine = self.machine
        return self.rows.find(
            self.part, case, device=machine.device, versions=machine.versions, tiny=self.tiny
        )

    def _add(self, case: str, kind: str, values: Values) -> None:
        row = Row(
            self.part, case, kind, self.machine.device, self.machine.versions, self.tiny, values
        )
        self.rows.add(row)
        shown = ", ".join(f"{name} {_short(value)}" for name, value in values.items())
        print(f"{self.part}, {case}: {shown}", flush=True)

    def _skip(self, case: str, why: str) -> None:
        self.missing.append(f"{self.part}, {case}: {why}")
        print(f"missing: {self.missing[-1]}", file=sys.stderr, flush=True)

    def _free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Inside, OutOfTimeError is raised after this time, in the main thread of a system that has
    such signals.
    """
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
