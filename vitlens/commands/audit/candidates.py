"""Which attack an audit runs: the strongest that fits what the other chapters leave of the budget, at least KEPT."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.attacks.registry import ATTACKS, Attack, members_of
from vitlens.commands.attack.record import AttackCurveRow, AttackRow
from vitlens.commands.attack.sweep import CHECKED, SAMPLED, example_attack
from vitlens.commands.audit.record import BudgetRow, CandidateRow, CandidateState

KEPT: Final = 0.2  # share of the budget that is kept for the attack, however long the other chapters take
_BACKWARD: Final = 3.0  # forward passes that a forward and a backward pass together take
_RUNS: Final = 8  # runs of an attack on the images of its self-checks, four of them in one with four times the steps


@dataclass(frozen=True)
class CandidateAttack:
    """One way to attack: the attacks, their restarts, epsilons in 1/255, and how many images at most."""

    attacks: tuple[str, ...]
    restarts: int
    epsilons: tuple[float, ...]
    images: int


# 1/255 is judged; at 8/255 every undefended model falls, so an attack that does not break it there is too weak
_FULL, _JUDGED = (1.0, 2.0, 4.0, 8.0), (1.0, 8.0)
FEWEST: Final = ("fgsm",)  # run on all images in any case, with the corruptions
CANDIDATES: Final = (  # the strongest first: attacks, restarts, epsilons, images
    CandidateAttack(("auto",), 1, _FULL, 1000),
    CandidateAttack(("auto",), 1, _FULL, 200),
    CandidateAttack(("auto",), 1, _JUDGED, 100),
    CandidateAttack(("auto",), 1, _JUDGED, 50),
    CandidateAttack(("apgd-ce", "apgd-dlr"), 1, _FULL, 200),
    CandidateAttack(("apgd-ce", "apgd-dlr"), 1, _JUDGED, 100),
    CandidateAttack(("apgd-ce", "apgd-dlr"), 1, _JUDGED, 50),
    CandidateAttack(("apgd-ce",), 1, _JUDGED, 100),
    CandidateAttack(("apgd-ce",), 1, _JUDGED, 50),
    CandidateAttack(("pgd",), 3, _JUDGED, 100),
    CandidateAttack(("pgd",), 1, _JUDGED, 100),
    CandidateAttack(("pgd",), 1, _JUDGED, 50),
)


def pass_seconds(row: AttackRow) -> float:
    """Seconds of one forward pass of one image in an attack that was run; 0 where it attacked nothing.

    row: its forward passes include those whose gradients it took.
    """
    passes = row.forwards + (_BACKWARD - 1) * row.backwards
    return row.seconds / passes if passes else 0.0


def robust_shares(rows: Sequence[AttackCurveRow]) -> dict[float, float]:
    """Epsilon in 1/255 (0: clean) -> the share of images that one attack leaves correct, an upper bound for others."""
    return {row.epsilon: row.accuracy.value for row in rows}


def seconds_of_rung(candidate: CandidateAttack, images: int, one_pass: float, shares: Mapping[float, float]) -> float:
    """The longest that a candidate may take on this many images, with the self-checks of its attacks.

    one_pass: seconds of one forward pass of one image.
    """
    return one_pass * (swept_passes(candidate, images, shares) + checked_passes(candidate, images))


def checked_passes(candidate: CandidateAttack, images: int) -> float:
    """The most forward passes that the self-checks take (slow attacks have few steps there), and the attack on a
    sample."""
    total = 0.0
    for name in candidate.attacks:
        runs = 0 if ATTACKS[name].slow else _RUNS * min(CHECKED, images)
        runs += min(SAMPLED, images) if name == example_attack((*FEWEST, *candidate.attacks)) else 0
        for member in members_of(name):
            total += runs * _passes(member, candidate.restarts)
    return total


def swept_passes(candidate: CandidateAttack, images: int, shares: Mapping[float, float]) -> float:
    """The most forward passes that the attacks alone take on this many images.

    An image that is fooled at one epsilon is not attacked at larger ones, and by the later members of an ensemble not
    at this one. shares: of the images that a weaker attack leaves correct, by epsilon, so that no more are left here.
    """
    total = 0.0
    for name in candidate.attacks:
        for index, member in enumerate(members_of(name)):
            for before, epsilon in zip((0.0, *candidate.epsilons), candidate.epsilons):
                share = shares.get(before if index == 0 else epsilon, shares.get(0.0, 1.0))
                total += share * _passes(member, candidate.restarts)
    return images * total


def _passes(attack: Attack, restarts: int) -> float:
    """One run of an attack on an image in forward passes of about the same time."""
    return attack.passes(restarts=restarts) * (_BACKWARD if attack.gradients else 1.0)


def considered(
    candidates: Sequence[CandidateAttack],
    *,
    images: int,
    seconds: float,
    one_pass: float,
    shares: Mapping[float, float],
    defined: Callable[[str], bool] = lambda _name: True,
) -> tuple[CandidateRow, ...]:
    """All candidates in their order, and FGSM at the end; the first that fits these seconds is chosen.

    images: that there are; candidates that differ in more images than these alone are one. defined: whether the model
    has enough classes for an attack.
    """
    rows: list[CandidateRow] = []
    for candidate, count in _distinct(candidates, images):
        known = all(defined(member.name) for name in candidate.attacks for member in members_of(name))
        takes = seconds_of_rung(candidate, count, one_pass, shares) if known else None
        rows.append(_row(candidate, count, takes, _state(takes, seconds, rows)))
    last = CandidateAttack(FEWEST, 1, _FULL, images)
    state: CandidateState = "weaker" if any(row.state == "chosen" for row in rows) else "chosen"
    return (*rows, _row(last, images, 0.0, state))  # it has been run already


def budget_row(minutes: float, others: float, one_pass: float) -> BudgetRow:
    """The budget in minutes; others: seconds of the other chapters; one_pass: of one forward pass of one image."""
    return BudgetRow(minutes, others / 60, max(KEPT * minutes, minutes - others / 60), one_pass)


def chosen(rows: Sequence[CandidateRow]) -> CandidateRow:
    """The candidate that is run."""
    return next(row for row in rows if row.state == "chosen")


def _distinct(candidates: Sequence[CandidateAttack], images: int) -> Iterator[tuple[CandidateAttack, int]]:
    seen: set[tuple[object, ...]] = set()
    for candidate in candidates:
        count = min(candidate.images, images)
        key = (candidate.attacks, candidate.restarts, candidate.epsilons, count)
        if key not in seen:
            seen.add(key)
            yield candidate, count


def _state(takes: float | None, seconds: float, before: Sequence[CandidateRow]) -> CandidateState:
    if any(row.state == "chosen" for row in before):
        return "undefined" if takes is None else "weaker"
    if takes is None:
        return "undefined"
    return "chosen" if takes <= seconds else "too long"


def _row(candidate: CandidateAttack, images: int, seconds: float | None, state: CandidateState) -> CandidateRow:
    minutes = None if seconds is None else seconds / 60
    return CandidateRow(candidate.attacks, candidate.restarts, candidate.epsilons, images, minutes, state)


assert all(name in ATTACKS for candidate in CANDIDATES for name in candidate.attacks)
