"""Self-checks of attacks and the verdict on all of them; free of torch."""

from collections.abc import Iterable, Sequence
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


def failures(checks: Iterable[Check]) -> list[Check]:
    """The checks that failed."""
    return [check for check in checks if not check.passed]


def verdict(checks: Sequence[Check], *, of: str = "These attacks") -> str:
    """The result of all checks in one sentence; of: its subject."""
    if not checks:
        return f"{of} could not be checked: there was no image to attack."
    failed = failures(checks)
    if not failed:
        inconclusive = sum(check.state is CheckState.INCONCLUSIVE for check in checks)
        if not inconclusive:
            return f"{of} look sound: all {len(checks)} self-checks are as expected."
        return (
            f"{of} show no fault: {len(checks) - inconclusive} of {len(checks)} self-checks are as expected, "
            f"{inconclusive} inconclusive, as nothing was fooled in them."
        )
    listed = "; ".join(f"{check.name} ({check.attack}): {check.found}" for check in failed)
    return (
        f"{of} look suspicious in {len(failed)} of {len(checks)} self-checks: {listed}. Robust accuracies may be too "
        "high."
    )
