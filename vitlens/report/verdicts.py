"""Limits and verdicts: a report passes, warns or fails by the worse end of a 95 % interval."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from vitlens.report.document import State
from vitlens.report.numbers import number
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class Threshold:
    """The limits of pass and warning; a value beyond both fails.

    passes: the worst value that passes.
    warns: the worst value that is only a warning.
    higher: True if higher values are better.
    unit: the unit of the values.
    """

    passes: float
    warns: float
    higher: bool
    unit: str = "fraction"

    @property
    def words(self) -> str:
        """Return the threshold as a report prints it: "pass from 50 %, warn from 10 %"."""
        passes = self.passes
        warns = self.warns
        unit = f" {self.unit}" if self.unit else ""
        if self.unit == "fraction":
            passes *= 100
            warns *= 100
            unit = " %"
        if self.higher and passes < 0:  # a difference to the better model
            return f"pass up to {number(-passes)}, warn up to {number(-warns)}{unit} behind"
        if self.higher:
            return f"pass from {number(passes)}{unit}, warn from {number(warns)}{unit}"
        word = "up to" if passes else "at"  # "pass at 0": no value is lower
        return f"pass {word} {number(passes)}{unit}, warn up to {number(warns)}{unit}"

    def state(self, value: float) -> State:
        """Return the state of a value."""
        if self._reaches(value, self.passes):
            return "pass"
        if self._reaches(value, self.warns):
            return "warn"
        return "fail"

    def _reaches(self, value: float, limit: float) -> bool:
        return value >= limit if self.higher else value <= limit

    def judge(self, value: Estimate) -> State:
        """Return the state of the worse end of an interval (of the value if there is none)."""
        worst, _ = self._ends(value)
        return self.state(worst)

    def out_of_reach(self, value: Estimate) -> bool:
        """Return True if not even the better end of the interval passes."""
        _, best = self._ends(value)
        return self.state(best) != "pass"

    def judge_difference(self, value: Estimate) -> State:
        """Return the state of a difference between two models by both ends of its interval.

        It passes if both ends pass, and it warns or fails if even the better end does. Otherwise it
        is inconclusive.
        """
        worst, best = map(self.state, self._ends(value))
        if best == "pass" and worst != "pass":
            return "inconclusive"
        return best

    def _ends(self, value: Estimate) -> tuple[float, float]:
        """Return the worse and the better end of an interval (the value if there is none)."""
        low = value.value if value.low is None else value.low
        high = value.value if value.high is None else value.high
        if self.higher:
            return low, high
        return high, low


# the most urgent first
ORDER: Final[tuple[State, ...]] = ("fail", "warn", "inconclusive", "not tested", "pass")


@dataclass(frozen=True)
class Verdict:
    """A judgement with its reason, which must not be empty.

    state: the judgement.
    because: the reason: what was judged, or why it could not be judged.
    limit: the name of the limit in limits.toml, "" for none.
    doubts: True if the measurement itself is in doubt, so that no title may rest on it.
    """

    state: State
    because: str
    limit: str = ""
    doubts: bool = False

    def __post_init__(self) -> None:
        if not self.because.strip():
            raise ValueError(
                f"expected a reason for the verdict {self.state!r}, found none; say what was judged"
            )

    @property
    def reason(self) -> str:
        """Return the reason with the limit: as "dead heads (pass up to 10 %, warn up to 30 %)"."""
        if not self.limit:
            return self.because
        return f"{self.because} ({LIMITS[self.limit].words})"

    @property
    def words(self) -> str:
        """Return the state with its reason, as a report prints it."""
        return f"{self.state}: {self.reason}"


_DECLARED: Final[dict[str, dict[str, Any]]] = tomllib.loads(
    files("vitlens.report").joinpath("limits.toml").read_text("utf-8")
)
LIMITS: Final = {
    name: Threshold(
        passes=entry["passes"],
        warns=entry["warns"],
        higher=entry["better"] == "higher",
        unit=entry["unit"],
    )
    for name, entry in _DECLARED.items()
}
