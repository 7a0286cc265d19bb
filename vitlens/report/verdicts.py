"""Limits and verdicts: what a report passes, warns of or fails, each on the worse end of a 95 % interval."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from vitlens.report.document import State
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
        """Return the threshold as a report prints it: "pass from 50 %, warn from 10 %"."""
        scale, unit = (100.0, " %") if self.unit == "fraction" else (1.0, f" {self.unit}" if self.unit else "")
        if self.higher and self.passes < 0:  # a difference to the better model
            return f"pass to {number(-self.passes * scale)}, warn to {number(-self.warns * scale)}{unit} behind"
        word = "from" if self.higher else "to"
        return f"pass {word} {number(self.passes * scale)}{unit}, warn {word} {number(self.warns * scale)}{unit}"

    def state(self, worst: float) -> State:
        """Return the state of a value."""
        sign = 1.0 if self.higher else -1.0
        if sign * worst >= sign * self.passes:
            return "pass"
        return "warn" if sign * worst >= sign * self.warns else "fail"

    def judge(self, value: Estimate) -> State:
        """Return the state of an estimate by the worse end of its interval, or by its value where it has none."""
        worst = value.low if self.higher else value.high
        return self.state(value.value if worst is None else worst)

    def out_of_reach(self, value: Estimate) -> bool:
        """Return True if not even the better end of the interval passes."""
        best = value.high if self.higher else value.low
        return self.state(value.value if best is None else best) != "pass"

    def judge_difference(self, value: Estimate) -> State:
        """Return the state of a difference between two models: what its whole interval shows, as it may also be none.

        It passes where both ends pass, warns or fails where even the better end does, and is inconclusive between.
        """
        ends = [value.value if end is None else end for end in (value.low, value.high)]
        best, worst = (self.state(end) for end in sorted(ends, reverse=self.higher))
        return "inconclusive" if best == "pass" != worst else best


ORDER: Final[tuple[State, ...]] = ("fail", "warn", "inconclusive", "not tested", "pass")  # the most urgent first


@dataclass(frozen=True)
class Verdict:
    """A judgement with its reason, without which there is none.

    because: what was judged, or why it could not be; limit: its name in limits.toml, "" for none; doubts: True where
    the measurement itself is in doubt, so that no title may rest on it.
    """

    state: State
    because: str
    limit: str = ""
    doubts: bool = False

    def __post_init__(self) -> None:
        if not self.because.strip():
            raise ValueError(f"expected a reason for the verdict {self.state!r}, found none; say what was judged")

    @property
    def reason(self) -> str:
        """Return the reason with the limit: "dead or uniform heads (pass to 10 %, warn to 30 %)"."""
        return f"{self.because} ({LIMITS[self.limit].words})" if self.limit else self.because

    @property
    def words(self) -> str:
        """Return the state with its reason, as a report prints it."""
        return f"{self.state}: {self.reason}"


_DECLARED: Final[dict[str, dict[str, Any]]] = tomllib.loads(
    files("vitlens.report").joinpath("limits.toml").read_text("utf-8")
)
LIMITS: Final = {
    name: Threshold(each["passes"], each["warns"], each["better"] == "higher", each["unit"])
    for name, each in _DECLARED.items()
}
