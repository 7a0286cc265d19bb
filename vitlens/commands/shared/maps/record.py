"""The checks of maps as rows, and the one rule by which a map passes them; free of torch.

A map passes if all of these hold:

- Removing patches in its order has a larger effect than in three other orders, with two
  replacements of removed patches. These are the orders of a random map, a map of the centre, and
  its maps of other images.
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

# kinds of maps on objects: the mean attention map of a layer, the rollout up to a layer, and the
# attention map of one head
ATTENTION = "attention"
ROLLOUT = "rollout"
HEAD = "head"

# baselines of a removal check; SHUFFLED are the method's maps of other images
SHUFFLED: Final = "other images"
BASELINES: Final = {
    RANDOM: "a random map",
    CENTRE: "a map of the centre",
    SHUFFLED: "its maps of other images",
}

# checks: each replacement of removed patches is one, and these three
WEIGHTS = "weights"
SHIFTS = "shifts"
ON_OBJECT = "object"
IMPUTED: Final = "imputed"  # ROAD's replacement of removed patches
# replacements in the order in which they judge; no attribution method removes patches in the first
# ways itself, so these favour none
JUDGING: Final = (IMPUTED, "mean", "black", "absent", "blur")
_NOT_RUN: Final = " (not run)"  # the end of the name of a needed check that was not run
REMOVALS: Final = 2  # replacements with which a map is judged
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
    "other images",
    # the three above are baselines that a map does not beat; all others have words in _LACKS
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
# predicates, of which the method is the subject
_LACKS: Final[Mapping[Lack, str]] = {
    "unusable maps": "has uniform maps, or none that are finite",
    "few images tried": f"was tried on fewer than {ENOUGH} images",
    "other images not tried": "was not compared with its maps of other images",
    "one map": "is the same map for every image",
    "ignores the weights": "ignores the weights: its maps change too little when these are "
    "randomised",
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
# short enough for a figure, the most serious first
_FAULTS: Final[Mapping[Lack, str]] = {
    "unusable maps": "uniform",
    "one map": "one map for all images",
    "ignores the weights": "ignores the weights",
    "jumps": JUMPS,
    "random": "not above random",
}
# of a check in a figure, by its state; others are undecided
_COLOURS: Final[Mapping[State, float]] = {"pass": -1.0, "warn": 0.4, "fail": 1.0}
_SIGNS: Final[Mapping[State, str]] = {"pass": "✓", "warn": "~", "fail": "✗"}


@dataclass(frozen=True)
class OnObjectRow(OfModel):
    """The score of maps on objects with known masks, averaged over images.

    maps: the method, or the kind of map of a layer.
    score: pointing (the maximum lies on the object), mass (the share of mass on the object), or
        roc_auc.
    baseline: of the maps that ignore the image, the one with the highest mean.
    of_baseline: its score.
    difference: the score minus that of the baseline, paired by image, in percentage points.
    layer, head: the layer and head of the maps, None for maps of the whole model or layer.
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
    by_place: the share of the information that maps of other images hold, too; None for too few
        images.
    pointing: the share of maps with the highest value on the object; None, as the next three,
        without masks.
    baseline: the best map that ignores the image.
    of_baseline: the share for this map.
    difference: `pointing` minus `of_baseline`, paired by image.
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

    check: a key of CHECKS.
    value: the score of the method.
    baseline: the hardest baseline.
    margin: the paired difference from it, corrected for the number of methods.
    lacks: why it does not pass, () if it does.
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
        return _COLOURS.get(self.state, 0.0)

    @property
    def words(self) -> str:
        """Return a sign for the state, and the score."""
        if self.is_impossible:
            return IMPOSSIBLE
        sign = _SIGNS.get(self.state, "?")
        if self.value is None:
            return sign
        return f"{sign} {self.value.value:.2f}"


@dataclass(frozen=True)
class JudgedMap(OfModel):
    """The verdict on one method of a model.

    lacks: why it does not pass, as a predicate; "" if it passes.
    fault: why it fails, short enough for a figure.
    not_passed: the checks that it fails, or that could not decide; with "(not run)" those that were
        not run, with "(n/a)" those that cannot be run on fixed maps.
    value, baseline, margin: those of the first removal check.
    alike: True if its score is not significantly below that of the best method.
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
    def failed(self) -> tuple[str, ...]:
        """Return the checks that were run, or cannot be run, and that it does not pass."""
        return tuple(name for name in self.not_passed if not name.endswith(_NOT_RUN))

    @property
    def untested(self) -> tuple[str, ...]:
        """Return the needed checks that were not run."""
        names = [name for name in self.not_passed if name.endswith(_NOT_RUN)]
        return tuple(name.removesuffix(_NOT_RUN) for name in names)

    @property
    def missing(self) -> str:
        """Return the checks that it fails, and those that were not run, as a predicate."""
        failed = [finalize(name) for name in self.failed]
        untested = [finalize(name) for name in self.untested]
        return say(
            "{% if failed %}did not pass the check{{ failed|s }} {{ failed_names }}{% endif %}"
            "{% if failed and untested %}, and {% endif %}"
            "{% if untested %}was not checked with {{ untested_names }}{% endif %}",
            failed=failed,
            failed_names=listed(failed),
            untested=untested,
            untested_names=listed(untested),
        )


def judged_by(replacements: Collection[str]) -> list[str]:
    """Return the replacements of removed patches with which maps are judged.

    replacements: those that were tried; other names are ignored.
    """
    tried = [name for name in JUDGING if name in replacements]
    return tried[:REMOVALS]


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
    """Return the check that removing patches in a map's order has a larger effect than in others.

    substrate: the replacement of removed patches.
    value: the score of the method.
    margins: the paired differences from the baselines, corrected for the number of methods.
    usable: the number of maps that are finite and not uniform.
    one_map: True if all maps are the same.
    behind: the best method minus this one, None for the best.
    """
    hardest = min(margins, key=lambda name: margins[name].value)
    not_beaten = tuple(name for name in margins if beyond(margins[name], 0.0) is not Side.ABOVE)
    state: State = "pass"
    lacks: tuple[Any, ...] = ()
    if not usable:
        state = "fail"
        lacks = ("unusable maps",)
    elif (value.n or 0) < ENOUGH:
        state = "inconclusive"
        lacks = ("few images tried",)
    elif one_map and SHUFFLED in margins:
        state = "fail"
        lacks = ("one map",)
    elif RANDOM in not_beaten:
        state = "fail"
        lacks = not_beaten
    elif not_beaten:
        state = "warn"
        lacks = not_beaten
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
    """Return the check of WEIGHTS, that maps change with them, or of SHIFTS, that maps follow them.

    judged: the judgement of this check.
    """
    lacks: tuple[Any, ...] = ()
    if judged.lack:
        lacks = (judged.lack,)
    return MapCheckRow(
        model=model,
        method=method,
        check=check,
        state=judged.state,
        value=judged.value,
        lacks=lacks,
    )


def object_check(row: OnObjectRow) -> MapCheckRow:
    """Return the check that maps lie on the object more than maps that ignore the image.

    No verdict depends on it.
    """
    return MapCheckRow(
        model=row.model,
        method=row.maps,
        check=ON_OBJECT,
        state="pass" if row.above else "warn",
        value=row.estimate,
        baseline=row.baseline,
        margin=row.difference,
        needed=False,
    )


def judged_maps(rows: Sequence[MapCheckRow]) -> tuple[JudgedMap, ...]:
    """Return the verdicts on all methods of one model, the best first.

    They are sorted by state, then by the score of the first removal check.
    """
    needed = [row for row in rows if row.needed]
    verdicts = []
    for method, checks in by(needed, "method").items():
        verdicts.append(_judged(method, checks))
    return tuple(sorted(verdicts, key=_best_first))


def _best_first(verdict: JudgedMap) -> tuple[int, float]:
    """Return the key that sorts verdicts."""
    score = 0.0 if verdict.value is None else verdict.value.value
    return _BEST_FIRST.index(verdict.state), -score


def best_map(rows: Sequence[MapCheckRow]) -> JudgedMap | None:
    """Return the best method of a model, None if nothing was checked."""
    verdicts = judged_maps(rows)
    return verdicts[0] if verdicts else None


def _judged(method: str, rows: Sequence[MapCheckRow]) -> JudgedMap:
    """Return the verdict on one method by its needed checks.

    Of the replacements of removed patches, `judged_by` chose at most two, so all of them judge.
    """
    by_check = {row.check: row for row in rows}
    removals = [by_check[name] for name in judged_by(by_check)]
    untested = _untested(by_check, removals)
    states: list[State] = []  # the worst of them is the verdict
    not_passed: list[str] = []
    for row in rows:
        if not row.is_impossible:
            states.append(row.state)
        if row.state != "pass":
            name = CHECKS[row.check]
            not_passed.append(f"{name} ({IMPOSSIBLE})" if row.is_impossible else name)
    if untested:
        states.append("inconclusive")
        not_passed += [f"{name}{_NOT_RUN}" for name in untested]
    state: State = max(states, key=_BEST_FIRST.index, default="inconclusive")
    # checks that cannot be run are no faults, but without them a map does not pass
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
    """Return the names of needed checks that were not run.

    by_check: the checks that were run.
    removals: the removal checks that judge.
    """
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
    # replacements with which the same is lacking share a reason
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
