"""The checks of maps as rows, and the one rule by which a map passes them; free of torch.

A map passes if all of these hold:

- Removing patches in its order has a larger effect than in three other orders, with two
  replacements of removed
  patches. These are the orders of a random map, a map of the centre, and its maps of other images.
- It changes when the weights are randomised.
- It stays in place under shifts of at most one pixel.

Otherwise its verdict says what it lacks: a row holds the reasons as words of `Lack`, and
`JudgedMap` puts them into a sentence. Of fixed maps, which nothing can make again, the last two
cannot be tested: the best verdict on them is "inconclusive".
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

from vitlens.analysis.faithfulness.checks import ENOUGH, KEPT, SIMILAR, Judgement
from vitlens.analysis.faithfulness.defaults import CENTRE, RANDOM
from vitlens.record import OfModel, by, col
from vitlens.report.claims import above
from vitlens.report.document import State
from vitlens.report.numbers import percent
from vitlens.report.prose import finalize, listed, say
from vitlens.uncertainty import Estimate, Side, beyond

ATTENTION = "attention"  # the mean attention map of a layer
ROLLOUT = "rollout"  # the rollout up to a layer
HEAD = "head"  # the attention map of one head
SHUFFLED: Final = "other images"  # a method's maps of other images
BASELINES: Final = {
    RANDOM: "a random map",
    CENTRE: "a map of the centre",
    SHUFFLED: "its maps of other images",
}
IMPUTED: Final = "imputed"  # ROAD's replacement of removed patches
# replacements; no method chooses by the first ones
JUDGING: Final = (IMPUTED, "mean", "black", "absent", "blur")
REMOVALS: Final = 2  # replacements with which a map is judged
WEIGHTS = "weights"
SHIFTS = "shifts"
ON_OBJECT = "object"
REPLACED: Final = {  # what happens to removed patches
    IMPUTED: "imputed",
    "mean": "in the mean colour",
    "black": "in black",
    "absent": "left out",
    "blur": "blurred",
}
CHECKS: Final = {  # names of checks in figures
    IMPUTED: "imputed (ROAD)",
    "mean": "mean colour",
    "black": "black",
    "absent": "left out",
    "blur": "blurred",
    WEIGHTS: "random weights",
    SHIFTS: "shifts",
    ON_OBJECT: "object",
}
UNIFORM: Final = 0.5  # bits of information below which a map is uniform, as for the label of heads
IMPOSSIBLE: Final = "n/a"  # in figures, of a check that cannot be run
FIXED: Final = 0.75  # share of a map's information above which the image decides little of it
JUMPS: Final = "jumps"  # a fault of maps that are still worth looking at
_BEST_FIRST: Final[tuple[State, ...]] = ("pass", "warn", "inconclusive", "fail")
Lack = Literal[
    "random",
    "centre",
    "other images",  # this and the two above: baselines that a map does not beat
    "unusable maps",
    "few images tried",
    "other images not tried",
    "one map",
    "ignores the weights",
    "fixed maps",
    "not finite",
    "uniform maps",
    "few images",
    "predictions unchanged",
    "interval holds the threshold",
    "jumps",
    "may jump",
]
_LACKS: Final[Mapping[Lack, str]] = {  # as predicates
    "unusable maps": "has uniform maps, or none that are finite",
    "few images tried": f"was tried on fewer than {ENOUGH} images",
    "other images not tried": "was not compared with its maps of other images",
    "one map": "is the same map for every image",
    "ignores the weights": "ignores the weights: its maps hardly change when these are randomised",
    "fixed maps": "could not be tested with random weights or shifts (its maps are fixed)",
    "not finite": "has maps that are not finite, so that the weights were not randomised",
    "uniform maps": "may ignore the weights (all its maps are uniform)",
    "few images": f"may ignore the weights (fewer than {ENOUGH} images have a usable map)",
    "predictions unchanged": f"may ignore the weights (random weights keep {percent(KEPT)} or more "
    "of the predictions, so no map had to change)",
    "interval holds the threshold": "may ignore the weights (when these are randomised its maps "
    f"still correlate with those before by about {SIMILAR:g}, the limit)",
    "jumps": "jumps when images are shifted by at most a pixel",
    "may jump": "may move when images are shifted by at most a pixel",
}
_FAULTS: Final[Mapping[Lack, str]] = {  # short enough for a figure
    "unusable maps": "uniform",
    "one map": "one map for all images",
    "ignores the weights": "ignores the weights",
    "jumps": JUMPS,
    "random": "not above random",
}


@dataclass(frozen=True)
class OnObjectRow(OfModel):
    """The score of maps on objects with known masks, averaged over images.

    score: pointing (the maximum lies on the object), mass (the share of mass on the object), or
        roc_auc.
    baseline: the map that ignores the image with the highest mean.
    difference: paired, in percentage points.
    layer, head: of maps of one layer or head.
    """

    maps: str = col("maps")
    score: str = col("score")
    estimate: Estimate = col("on the object", better="higher")
    baseline: str = col("best map that ignores the image")
    of_baseline: Estimate = col("its score")
    difference: Estimate = col("difference", better="higher")
    layer: int | None = col("layer", default=None)
    head: int | None = col("head", default=None)

    @property
    def side(self) -> Side:
        """Return the side of the baseline on which the maps are significantly."""
        return beyond(self.difference, 0.0)

    @property
    def above(self) -> bool:
        """Return True if the maps lie on the object significantly more than the baseline."""
        return self.side is Side.ABOVE


@dataclass(frozen=True, kw_only=True)
class MapRow(OfModel):
    """The maps of one method or layer, averaged over images; rows of commands add to it.

    maps: their name in metrics.
    pointing: the share of maps whose highest value lies on the object.
    of_baseline: the same of the best map that ignores the image.
    difference: paired over images. Values are None without masks, or with too few images.
    """

    maps: str = col("name in metrics")
    information: Estimate = col(
        "information",
        term="log2 of the number of patches minus the entropy of the map; 0 bits for a uniform map",
    )
    by_place: Estimate | None = col(
        "the same in other images",
        term="the share of a map's information that the mean map of the other images explains",
        default=None,
    )
    pointing: Estimate | None = col(
        "highest point on the object",
        better="higher",
        metric="localisation/{model}/pointing/{maps}",
        default=None,
    )
    baseline: str | None = col("best map that ignores the image", default=None)
    of_baseline: Estimate | None = col("of a map that ignores the image", default=None)
    difference: Estimate | None = col("difference", better="higher", default=None)


Row = TypeVar("Row", bound=MapRow)


def fixed_maps(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose maps hold information but are nearly the same for every image."""
    fixed = []
    for row in rows:
        is_informative = (row.information.low or 0.0) >= UNIFORM
        if is_informative and above(row.by_place, FIXED, len(rows)):
            fixed.append(row)
    return fixed


@dataclass(frozen=True)
class MixedHeadsRow:
    """One attention module that mixes the weights over heads after the softmax (talking heads,
    CaiT).
    """

    module: str


def mixed_heads_words(rows: Sequence[MixedHeadsRow]) -> str:
    """Return a note that the weights are those before the mixing."""
    return say(
        "In {{ n }} layer{{ n|s }} (talking heads) a linear map mixes the attention weights over "
        "heads. The weights here are those before it, not those that multiply the values.",
        n=len(rows),
    )


@dataclass(frozen=True)
class MapCheckRow(OfModel):
    """One check of the maps of one method.

    value: its score.
    baseline: the hardest baseline.
    margin: the paired difference from it, corrected for the number of methods.
    lacks: why it does not pass.
    behind: the best method minus this one in the same check; None for the best.
    needed: True if the verdict depends on this check.
    """

    method: str = col("method")
    check: str = col("check")
    state: State = col("judgement")
    value: Estimate | None = col("score", default=None)
    baseline: str = col("hardest baseline", default="")
    margin: Estimate | None = col("above it", default=None)
    lacks: tuple[Lack, ...] = col("lacks", default=())
    behind: Estimate | None = col("behind the best", default=None)
    needed: bool = col("needed", default=True)

    @property
    def checked_with(self) -> str:
        """Return the name of the check in figures."""
        return CHECKS[self.check]

    @property
    def is_impossible(self) -> bool:
        """Return True if the check cannot be run on these maps, as they are fixed."""
        return "fixed maps" in self.lacks

    @property
    def colour(self) -> float:
        """Return its place on the colour scale of a figure, from -1 (passed) to 1 (failed)."""
        return {"pass": -1.0, "warn": 0.4, "fail": 1.0}.get(self.state, 0.0)

    @property
    def words(self) -> str:
        """Return a sign for the state, and the score."""
        if self.is_impossible:
            return IMPOSSIBLE
        sign = {"pass": "✓", "warn": "~", "fail": "✗"}.get(self.state, "?")
        if self.value is None:
            return sign
        return f"{sign} {self.value.value:.2f}"


@dataclass(frozen=True)
class JudgedMap(OfModel):
    """The verdict on one method of a model.

    lacks: why it does not pass, as a predicate.
    fault: why it fails, short enough for a figure.
    not_passed: checks.
    value, baseline, margin: of the first removal check.
    alike: True if its score is not significantly below the best.
    """

    method: str = col("method")
    state: State = col("verdict")
    lacks: str = col("lacks", unit="text")
    fault: str = col("fault")
    not_passed: tuple[str, ...] = col(
        "not passed",
        term="the checks that a map fails, that could not decide, or that were not run",
    )
    value: Estimate | None = col(
        "removal score",
        term="the area under the target's probability when patches are removed from the lowest up, "
        "minus that when they are removed from the highest down; 0 for a random order",
        default=None,
    )
    baseline: str = col("hardest baseline", default="")
    margin: Estimate | None = col("above the hardest baseline", default=None)
    alike: bool = col("not distinguishable from the best", default=False)

    @property
    def because(self) -> str:
        """Return the reason for the verdict."""
        lacks = self.lacks or "passes every check"
        return say("{{ method }} {{ lacks|whole }}", method=self.method, lacks=lacks)

    @property
    def missing(self) -> str:
        """Return the checks that it does not pass, as a predicate."""
        checks = list(map(finalize, self.not_passed))
        return say(
            "did not pass the check{{ checks|s }} {{ names }}", checks=checks, names=listed(checks)
        )


def judged_by(replacements: Collection[str]) -> list[str]:
    """Return the replacements of removed patches with which maps are judged, of those that were
    tried.
    """
    judging = [name for name in JUDGING if name in replacements]
    return judging[:REMOVALS]


def removal_check(
    model: str,
    method: str,
    substrate: str,
    value: Estimate,
    margins: Mapping[str, Estimate],
    *,
    usable: int,
    one_map: bool = False,
    behind: Estimate | None = None,
) -> MapCheckRow:
    """Return the check that removing patches in the order of a map has a larger effect than in that
    of each baseline.

    margins: the paired differences from the baselines, corrected for the number of methods.
    usable: the number of maps that are finite and not uniform.
    one_map: True if all maps are the same.
    """
    hardest = min(margins, key=lambda name: margins[name].value)
    state: State = "pass"
    lacks: tuple[Any, ...] = tuple(
        name for name in margins if beyond(margins[name], 0.0) is not Side.ABOVE
    )
    if not usable:
        state = "fail"
        lacks = ("unusable maps",)
    elif (value.n or 0) < ENOUGH:
        state = "inconclusive"
        lacks = ("few images tried",)
    elif one_map and SHUFFLED in margins:
        state = "fail"
        lacks = ("one map",)
    elif RANDOM in lacks:
        state = "fail"
    elif lacks:
        state = "warn"
    elif SHUFFLED not in margins:
        state = "inconclusive"
        lacks = ("other images not tried",)
    return MapCheckRow(
        model=model,
        method=method,
        check=substrate,
        state=state,
        value=value,
        baseline=BASELINES[hardest],
        margin=margins[hardest],
        lacks=lacks,
        behind=behind,
    )


def map_check(model: str, method: str, check: str, judged: Judgement) -> MapCheckRow:
    """Return the check that maps change with the weights (WEIGHTS), or follow shifts of at most one
    pixel (SHIFTS).
    """
    lacks: tuple[Any, ...] = ()
    if judged.lack:
        lacks = (judged.lack,)
    return MapCheckRow(model, method, check, judged.state, judged.value, lacks=lacks)


def object_check(row: OnObjectRow) -> MapCheckRow:
    """Return the check that maps lie on the object more than maps that ignore the image; no verdict
    depends on it.
    """
    state: State = "warn"
    if row.above:
        state = "pass"
    return MapCheckRow(
        model=row.model,
        method=row.maps,
        check=ON_OBJECT,
        state=state,
        value=row.estimate,
        baseline=row.baseline,
        margin=row.difference,
        needed=False,
    )


def judged_maps(rows: Sequence[MapCheckRow]) -> tuple[JudgedMap, ...]:
    """Return the verdicts on all methods of one model, sorted by verdict, then by the score of the
    first removal.
    """
    needed = [row for row in rows if row.needed]
    verdicts = []
    for method, checks in by(needed, "method").items():
        verdicts.append(_judged(method, checks))
    return tuple(sorted(verdicts, key=_best_first))


def _best_first(verdict: JudgedMap) -> tuple[int, float]:
    score = verdict.value.value if verdict.value else 0.0
    return _BEST_FIRST.index(verdict.state), -score


def best_map(rows: Sequence[MapCheckRow]) -> JudgedMap | None:
    """Return the best method of a model, None if nothing was checked."""
    return next(iter(judged_maps(rows)), None)


def _judged(method: str, rows: Sequence[MapCheckRow]) -> JudgedMap:
    """Return the verdict on one method by its checks."""
    by_check = {row.check: row for row in rows}
    removals = [by_check[name] for name in judged_by(by_check)]
    untested = _untested(by_check, removals)
    states: list[State] = []
    not_passed: list[str] = []
    for row in rows:
        if not row.is_impossible:
            states.append(row.state)
        if row.state != "pass":
            not_passed.append(CHECKS[row.check])
    if untested:
        states.append("inconclusive")
        not_passed += untested
    state: State = max(states, key=_BEST_FIRST.index, default="inconclusive")
    if state == "pass" and any(row.is_impossible for row in rows):
        state = "inconclusive"
    reasons = _reasons(rows, removals, untested)
    verdict = JudgedMap(
        model=rows[0].model,
        method=method,
        state=state,
        lacks=str(listed(reasons)) if reasons else "",
        fault=_fault(rows) if state == "fail" else "",
        not_passed=tuple(not_passed),
    )
    if not removals:
        return verdict
    first = removals[0]
    return replace(
        verdict,
        value=first.value,
        baseline=first.baseline,
        margin=first.margin,
        alike=first.behind is not None and beyond(first.behind, 0.0) is not Side.ABOVE,
    )


def _untested(by_check: Collection[str], removals: Sequence[MapCheckRow]) -> list[str]:
    """Return the names of checks that were not run."""
    untested = []
    if not removals:
        untested.append("removed patches")
    elif len(removals) < REMOVALS:
        untested.append("a second replacement of removed patches")
    for check in (WEIGHTS, SHIFTS):
        if check not in by_check:
            untested.append(CHECKS[check])
    return untested


def _reasons(
    rows: Sequence[MapCheckRow], removals: Sequence[MapCheckRow], untested: Sequence[str]
) -> list[str]:
    """Return why a method does not pass, as predicates."""
    reasons = []
    for lacks, checks in by(removals, "lacks").items():
        if lacks and lacks[0] in BASELINES:
            baselines = listed([BASELINES[baseline] for baseline in lacks], "or")
            replacements = " and ".join(REPLACED[row.check] for row in checks)
            reasons.append(f"does not beat {baselines} with patches {replacements}")
        elif lacks:
            reasons.append(_LACKS[lacks[0]])
    for row in rows:
        if row.lacks and row.check not in REPLACED:
            reasons.append(_LACKS[row.lacks[0]])
    if untested:
        reasons.append(f"was not tested with {listed(untested)}")
    return list(dict.fromkeys(reasons))


def _fault(rows: Sequence[MapCheckRow]) -> str:
    """Return the most serious fault of a method, short enough for a figure; "" without one."""
    for lack, fault in _FAULTS.items():
        if any(lack in row.lacks for row in rows):
            return fault
    return ""


def mass_of(rows: Sequence[OnObjectRow], kind: str) -> list[OnObjectRow]:
    """Return the rows of the mass of one kind of map, by layer."""
    return [row for row in rows if row.score == "mass" and row.maps == kind]
