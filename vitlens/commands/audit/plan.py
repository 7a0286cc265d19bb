"""What of an audit fits its budget: arithmetic on the measured seconds of single images, and the
clock.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Final

from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.analysis.faithfulness.league import randomised_images
from vitlens.analysis.faithfulness.sanity import PARTS
from vitlens.attacks.registry import ATTACKS, Attack
from vitlens.commands.attack.checks import CHECKED
from vitlens.commands.attack.record import AttackCurveRow, AttackRow
from vitlens.commands.attack.sample import SAMPLED, example_attack
from vitlens.commands.audit.record import REPORT_SHARE, BudgetRow, CandidateRow, CandidateState
from vitlens.report.claims import FEWEST as FEWEST_JUDGED
from vitlens.report.numbers import number

# shares of the budget that the stages may take; the attack gets what they leave
EXPLAIN_SHARE: Final = 0.4  # maps and their checks
STATS_SHARE: Final = 0.1  # statistics of attention
CORRUPTED_SHARE: Final = 0.35  # corruptions and FGSM
MAPPED_SHARE: Final = 0.1  # the question why the model fails
RELIED_SHARE: Final = 0.1  # the question what the model relies on

STATS_PASSES: Final = 2.0  # forward passes that the statistics of an image take
MAPPED: Final = 200  # images with maps for the question why the model fails, at most
# images on which the methods are checked, at best and at least; fewer judge no map
EXPLAINED: Final = (50, FEWEST_JUDGED)
COSTLY: Final = 20  # forward passes of a map, above which its time is not measured but counted
PASSES_OF_GRADIENT: Final = 3.0  # forward passes that a forward and a backward pass together take
# runs of an attack on the images of its self-checks: at epsilon 0, within the budget, in smaller
# batches, with four times the steps (which counts four), and with an unlimited budget
_RUNS: Final = 8
_EDITED: Final = 1.3  # time of changing an image and classifying it, in forward passes
_SHORTEST: Final = 1e-9  # seconds, as a coarse clock may measure 0 and plans divide by times
_LONGER: Final = 1.1  # factor for the longer time that a stage may take in another run

# 1/255 is judged; at 8/255 every undefended model falls, so an attack that does not break it there
# is too weak
_FULL = (1.0, 2.0, 4.0, 8.0)
_JUDGED = (1.0, 8.0)
FGSM: Final = ("fgsm",)  # runs with the corruptions, before any other attack
CANDIDATES: Final = tuple(  # the strongest first
    CandidateRow(attacks, restarts, epsilons, images, minutes=None, state="too long")
    for attacks, restarts, epsilons, images in (
        (("auto",), 1, _FULL, 1000),
        (("auto",), 1, _FULL, 200),
        (("auto",), 1, _JUDGED, 100),
        (("auto",), 1, _JUDGED, 50),
        (("apgd-ce", "apgd-dlr"), 1, _FULL, 200),
        (("apgd-ce", "apgd-dlr"), 1, _JUDGED, 100),
        (("apgd-ce", "apgd-dlr"), 1, _JUDGED, 50),
        (("apgd-ce",), 1, _JUDGED, 100),
        (("apgd-ce",), 1, _JUDGED, 50),
        (("pgd",), 3, _JUDGED, 100),
        (("pgd",), 1, _JUDGED, 100),
        (("pgd",), 1, _JUDGED, 50),
    )
)


class BusyClock:
    """A clock of the seconds that this process could use: CPU time on a machine that others use,
    too.
    """

    def __init__(self) -> None:
        self._wall = time.monotonic()
        self._processor = time.process_time()

    def __call__(self) -> float:
        """Return the seconds since the clock was made, or the CPU seconds of all threads if these
        are fewer; at least _SHORTEST.
        """
        wall = time.monotonic() - self._wall
        processor = time.process_time() - self._processor
        return max(min(wall, processor), _SHORTEST)


@dataclass
class Budget:
    """The seconds that an audit may take.

    minutes: the minutes of --budget.
    clock: busy seconds since the start.
    cached: seconds that chapters from the cache took when they were made, so that the same audit
        chooses the same attack again.
    """

    minutes: float
    clock: Callable[[], float] = field(default_factory=BusyClock)
    cached: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole budget."""
        return 60 * self.minutes

    @property
    def spent(self) -> float:
        """Return the seconds that all chapters so far took when they were first run."""
        return self.clock() + self.cached

    @property
    def left(self) -> float:
        """Return the seconds that are left, without those reserved for the report."""
        return max(0.0, (1 - REPORT_SHARE) * self.seconds - self.spent)

    def share(self, fraction: float) -> float:
        """Return the seconds of a stage: a share of the whole budget, or what is left if that is
        less.
        """
        return min(fraction * self.seconds, self.left)

    def refusal(self, what: str, takes: float, share: float) -> str:
        """Return why a stage is left out, and with which budget it would not be.

        what: the stage in words. takes: its seconds. share: its share of the budget.
        """
        if not self.left:
            return f"the budget of {number(self.minutes)} min was spent before {what}"
        # the share must hold the stage, and the budget all stages so far with it
        sufficient_seconds = max(takes / share, takes + self.spent)
        sufficient_minutes = ceil(_LONGER * sufficient_seconds / 60)
        return (
            f"the budget of {number(self.minutes)} min leaves "
            f"{number(self.share(share))} s for {what}, which takes {number(takes)} s; "
            f"--budget {sufficient_minutes} would be enough"
        )


@dataclass(frozen=True)
class MapCosts:
    """Measured seconds of one image.

    maps: of its map, by method: the preferred method first, then the fastest.
    removal: of the check of one map that removes patches.
    one_pass: of a forward pass.
    """

    maps: Mapping[str, float]
    removal: float
    one_pass: float

    def seconds(self, methods: Sequence[str], images: int) -> float:
        """Return the seconds of all checks of these methods on so many images, and of the
        baselines' checks.
        """
        total = self.removal * images * (len(methods) + len(BASELINES))
        for name in methods:
            passes_of_map = self.maps[name] / self.one_pass
            randomised = min(images, randomised_images(passes_of_map))
            # a map of each image, then one more of some after every stage of `cascade`, which
            # randomises the head, PARTS groups of blocks, and what is before the blocks
            stages = PARTS + 2
            total += self.maps[name] * (images + stages * randomised)
        return total


def fitting_methods(costs: MapCosts, seconds: float, images: int) -> tuple[tuple[str, ...], int]:
    """Return the methods, and the number of images, whose checks fit into these seconds.

    More methods are better than more images. Methods are taken in the order of the costs. If not
    even the first method fits, another one may on the fewest images that judge a map. If nothing
    fits, there are no methods and 0 images.

    images: the number of images that there are.
    """
    names = tuple(costs.maps)
    plans = []  # the best first
    for method_count in range(len(names), 0, -1):
        for most in EXPLAINED:
            plans.append((names[:method_count], min(most, images)))
    fewest = min(EXPLAINED[-1], images)
    for name in names[1:]:
        plans.append(((name,), fewest))
    for methods, image_count in plans:
        if costs.seconds(methods, image_count) <= seconds:
            return methods, image_count
    return (), 0


@dataclass(frozen=True)
class CorruptionCosts:
    """Measured seconds of one image, and the number of epsilons.

    corrupted: of its predictions under all corruptions.
    one_pass: of a forward pass.
    epsilons: the number of epsilons of FGSM, which runs on the same images.
    """

    corrupted: float
    one_pass: float
    epsilons: int

    def seconds(self, images: int) -> float:
        """Return the seconds of corruptions and FGSM, with its self-checks and its sample."""
        passes = images * self.epsilons + _RUNS * min(CHECKED, images) + min(SAMPLED, images)
        return images * self.corrupted + PASSES_OF_GRADIENT * self.one_pass * passes


def corrupted_images(costs: CorruptionCosts, seconds: float, images: int) -> int:
    """Return on how many images corruptions and FGSM take these seconds at most.

    Returns 0 where that judges nothing.
    """
    least = min(FEWEST_JUDGED, images)
    for count in range(images, least - 1, -1):
        if costs.seconds(count) <= seconds:
            return count
    return 0


def mapped_images(a_map: float, one_pass: float, seconds: float, images: int) -> int:
    """Return on how many images maps are made for the question why the model fails.

    Returns 0 if too few fit. All images are classified before.

    a_map, one_pass: the seconds of a map, and of a forward pass, of one image.
    """
    most = min(MAPPED, images)
    fitting = most
    if a_map:
        seconds_for_maps = seconds - images * one_pass
        fitting = min(most, int(seconds_for_maps / a_map))
    if fitting < min(FEWEST_JUDGED, images):
        return 0
    return fitting


def changed_images(passes: int, one_pass: float, seconds: float, images: int) -> int:
    """Return on how many images it is measured what the model relies on; 0 where too few fit.

    passes: forward passes of each image.
    """
    seconds_per_image = _EDITED * passes * one_pass
    fitting = images
    if seconds_per_image:
        fitting = min(images, int(seconds / seconds_per_image))
    if fitting < min(FEWEST_JUDGED, images):
        return 0
    return fitting


def pass_seconds(row: AttackRow) -> float:
    """Return the seconds of one forward pass of one image in an attack that was run; 0 if it
    attacked nothing.
    """
    # `forwards` counts those with a backward pass, too: the backward pass takes the other passes
    passes = row.forwards + (PASSES_OF_GRADIENT - 1) * row.backwards
    if not passes:
        return 0.0
    return row.seconds / passes


def consider_candidates(
    candidates: Sequence[CandidateRow],
    budget: BudgetRow,
    *,
    images: int,
    shares: Mapping[float, float],
    defined: Callable[[Attack], bool] = lambda _: True,
    attacked: int | None = None,
) -> tuple[CandidateRow, ...]:
    """Return all candidates in their order, and FGSM at the end.

    The first that fits what is left is chosen.

    images: the number of images that there are.
    shares: as in `passes_of`.
    defined: a function that is True if the model has enough classes for an attack.
    attacked: the number of images on which FGSM ran (None: all).
    """
    # with fewer images than some candidates ask for, those become the same
    unique = dict.fromkeys(
        replace(candidate, images=min(candidate.images, images)) for candidate in candidates
    )
    rows: list[CandidateRow] = []
    is_chosen = False
    for candidate in unique:
        parts: list[Attack] = []
        for name in candidate.attacks:
            parts += ATTACKS[name].parts
        if not all(map(defined, parts)):
            rows.append(replace(candidate, state="undefined"))
            continue
        # FGSM runs with the candidate, because self-checks compare them
        fgsm = replace(candidate, attacks=FGSM, restarts=1)
        passes = passes_of(candidate, shares) + passes_of(fgsm, shares)
        seconds = budget.pass_seconds * passes
        state: CandidateState = "weaker" if is_chosen else "too long"
        if not is_chosen and seconds <= 60 * budget.left:
            state = "chosen"
            is_chosen = True
        rows.append(replace(candidate, minutes=seconds / 60, state=state))
    fgsm_state: CandidateState = "weaker" if is_chosen else "chosen"
    fgsm_images = images if attacked is None else attacked
    fgsm_row = CandidateRow(
        attacks=FGSM,
        restarts=1,
        epsilons=_FULL,
        images=fgsm_images,
        minutes=0.0,  # it was run already, with the corruptions
        state=fgsm_state,
    )
    return (*rows, fgsm_row)


def shares_left(curves: Sequence[AttackCurveRow]) -> dict[float, float]:
    """Return the share of images that the first attack leaves correct, by epsilon in 1/255.

    The curve over all attacks is left out: stronger attacks on survivors lower it.
    """
    return {row.epsilon: row.accuracy.value for row in curves if row.attack == curves[0].attack}


def passes_of(candidate: CandidateRow, shares: Mapping[float, float]) -> float:
    """Return the most forward passes that the attacks, their self-checks and the attack on a sample
    take.

    An image that is fooled at one epsilon is not attacked at larger ones. Nor do the later members
    of an ensemble attack it at this one.

    shares: by epsilon in 1/255 (0: clean), the share of the images that a weaker attack leaves
        correct; a stronger one leaves no more.
    """
    total = 0.0
    for name in candidate.attacks:
        checked = 0
        if not ATTACKS[name].slow:  # slow attacks have few steps in their self-checks
            checked = _RUNS * min(CHECKED, candidate.images)
        if name == example_attack((*FGSM, *candidate.attacks)):
            checked += min(SAMPLED, candidate.images)
        for index, member in enumerate(ATTACKS[name].parts):
            # images that the member attacks at each epsilon: the first one those left by the
            # epsilon before (0 before the first), later ones those left at this epsilon
            epsilons_of_shares = candidate.epsilons
            if index == 0:
                epsilons_of_shares = (0.0, *candidate.epsilons[:-1])
            # attacked images as a share of all images, summed over epsilons
            swept = 0.0
            for epsilon in epsilons_of_shares:
                swept += _largest_share(shares, epsilon)
            passes = float(member.passes(restarts=candidate.restarts))
            if member.gradients:
                passes *= PASSES_OF_GRADIENT
            total += (checked + candidate.images * swept) * passes
    return total


def _largest_share(shares: Mapping[float, float], epsilon: float) -> float:
    """Return the share of images left at an epsilon.

    If it was not measured, it is at most that of correct clean images, and without that 1.
    """
    return shares.get(epsilon, shares.get(0.0, 1.0))
