"""Verdicts: what a report's first page passes, warns of or fails, each on the worse end of a 95 % interval."""

from dataclasses import dataclass
from typing import Final

from vitlens.report.document import State, Verdict
from vitlens.report.numbers import number
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class Threshold:
    """Where a value passes, and where it is a warning; beyond that it fails. higher: whether higher is better."""

    passes: float
    warns: float
    higher: bool
    unit: str = "fraction"

    @property
    def words(self) -> str:
        """The threshold as a report prints it: "pass from 50 %, warn from 10 %"."""
        scale, unit = (100.0, " %") if self.unit == "fraction" else (1.0, f" {self.unit}" if self.unit else "")
        word = "from" if self.higher else "to"
        return f"pass {word} {number(self.passes * scale)}{unit}, warn {word} {number(self.warns * scale)}{unit}"

    def state(self, worst: float) -> State:
        """The state of a value."""
        sign = 1.0 if self.higher else -1.0
        if sign * worst >= sign * self.passes:
            return "pass"
        return "warn" if sign * worst >= sign * self.warns else "fail"


ACCURACY: Final = Threshold(-1.0, -5.0, higher=True, unit="points")  # beside the best model
CALIBRATION: Final = Threshold(0.03, 0.08, higher=False)
ROBUSTNESS: Final = Threshold(0.5, 0.1, higher=True)  # robust accuracy at 1/255
CORRUPTIONS: Final = Threshold(2.0, 4.0, higher=False, unit="times the clean error")
HEADS: Final = Threshold(0.1, 0.3, higher=False)  # share of dead or uniform heads
SINKS: Final = Threshold(0.2, 0.5, higher=False)  # attention of patches on sinks off the object


def judged(subject: str, value: Estimate, threshold: Threshold, because: str) -> Verdict:
    """The verdict on a value by the worse end of its interval, or by the value itself where it has none."""
    worst = value.low if threshold.higher else value.high
    state = threshold.state(value.value if worst is None else worst)
    return Verdict(subject, state, value, threshold.words, because)


def inconclusive(subject: str, value: Estimate | None, threshold: Threshold, because: str) -> Verdict:
    """A check that could not have failed, or whose numbers are too few."""
    return Verdict(subject, "inconclusive", value, threshold.words, because)


def not_tested(subject: str, because: str, *, value: Estimate | None = None) -> Verdict:
    """What this run did not test, and what would."""
    return Verdict(subject, "not tested", value, "–", because)
