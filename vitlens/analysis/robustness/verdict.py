"""The result of a self-check of an attack; free of torch."""

from dataclasses import dataclass
from enum import Enum


class CheckState(Enum):
    """The result of a check; INCONCLUSIVE: as expected, but it could not have failed, as nothing was fooled."""

    PASSED = "passed"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One self-check of an attack. attack: its name; expected, found: in words; passed: whether found is as expected.

    conclusive: False where it could not have failed, as nothing was fooled; against, of: how many of so many images
    contradict the expectation (None where that is no count of images).
    """

    name: str
    attack: str
    expected: str
    found: str
    passed: bool
    conclusive: bool = True
    against: int | None = None
    of: int | None = None

    @property
    def state(self) -> CheckState:
        """The result."""
        if not self.passed:
            return CheckState.FAILED
        return CheckState.PASSED if self.conclusive else CheckState.INCONCLUSIVE
