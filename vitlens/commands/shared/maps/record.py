"""The checks of maps as rows, and the one rule by which a map passes them; free of torch.

A map passes only if removing patches in its order tells more than in the order of a random map, of a map of the centre
and of the maps of other images, with two replacements of removed patches; if it changes when the weights are
randomised; and if it stays in place under shifts of at most a pixel. Otherwise the verdict says what it lacks: a row
holds the reasons as words of `Lack`, and `JudgedMap` says them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from vitlens.analysis.faithfulness.checks import ENOUGH, KEPT, SIMILAR, Judgement
from vitlens.analysis.faithfulness.defaults import CENTRE, RANDOM
from vitlens.record import OfModel, by, col
from vitlens.report.claims import above
from vitlens.report.document import State
from vitlens.report.numbers import percent
from vitlens.report.prose import listed, say
from vitlens.uncertainty import Estimate, Side, beyond

# maps of a layer: its mean, the rollout up to it, a head's
ATTENTION = "attention"
ROLLOUT = "rollout"
HEAD = "head"
SHUFFLED: Final = "other images"  # the method's own maps, of other images
BASELINES: Final = {RANDOM: "a random map", CENTRE: "a map of the centre", SHUFFLED: "its maps of other images"}
IMPUTED: Final = "imputed"  # ROAD's replacement of removed patches
JUDGING: Final = (IMPUTED, "mean", "black", "absent", "blur")  # replacements, those that no method chooses by first
REMOVALS: Final = 2  # with which a map is judged
WEIGHTS = "weights"
SHIFTS = "shifts"
ON_OBJECT = "object"
REPLACED: Final = {  # what becomes of removed patches
    IMPUTED: "imputed",
    "mean": "in the mean colour",
    "black": "in black",
    "absent": "left out",
    "blur": "blurred",
}
CHECKS: Final = {
    **{name: words.removeprefix("in the ").removeprefix("in ") for name, words in REPLACED.items()},
    IMPUTED: "imputed (ROAD)",
    WEIGHTS: "random weights",
    SHIFTS: "shifts",
    ON_OBJECT: "object",
}
UNIFORM: Final = 0.5  # bits, below which a map is uniform; as the label of heads
FIXED: Final = 0.75  # of a map's information: beyond it, what the image itself decides is a small rest
JUMPS: Final = "jumps"  # a fault that leaves the map worth looking at
_BEST_FIRST: Final[tuple[State, ...]] = ("pass", "warn", "inconclusive", "fail")
Lack = Literal[
    "random",
    "centre",
    "other images",  # the baselines that a map does not beat
    "unusable maps",
    "few images tried",
    "other images not tried",
    "ignores the weights",
    "not finite",
    "uniform maps",
    "few images",
    "predictions unchanged",
    "interval holds the threshold",
    "jumps",
    "may jump",
]
_LACKS: Final[Mapping[Lack, str]] = {
    "unusable maps": "has uniform maps, or none that are finite",
    "few images tried": f"was tried on fewer than {ENOUGH} images",
    "other images not tried": "was not compared with its maps of other images",
    "ignores the weights": "ignores the weights: its maps hardly change when these are randomised",
    "not finite": "has maps that are not finite, so that the weights were not randomised",
    "uniform maps": "may ignore the weights (all its maps are uniform)",
    "few images": f"may ignore the weights (fewer than {ENOUGH} images have a usable map)",
    "predictions unchanged": f"may ignore the weights (random weights keep {percent(KEPT)} or more of the predictions, "
    "so no map had to change)",
    "interval holds the threshold": "may ignore the weights (when these are randomised its maps still correlate with "
    f"those before by about {SIMILAR:g}, the limit)",
    "jumps": "jumps when images are shifted by at most a pixel",
    "may jump": "may move when images are shifted by at most a pixel",
}
_FAULTS: Final[Mapping[Lack, str]] = {  # in the few words that fit a figure
    "unusable maps": "uniform",
    "ignores the weights": "ignores the weights",
    "jumps": JUMPS,
    "random": "not above random",
}


@dataclass(frozen=True)
class OnObjectRow(OfModel):
    """Where maps lie on objects with known masks, means over images.

    score: pointing (their maximum lies on the object), mass (the share of their mass), roc_auc; baseline: which map
    that ignores the image has the greatest mean; difference: paired, of shares in percentage points. layer, head: of
    the maps, where they are of one.
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
        """On which side of the baseline the maps are, significantly."""
        return beyond(self.difference, 0.0)

    @property
    def above(self) -> bool:
        """Return True if they lie on the object significantly more than the baseline."""
        return self.side is Side.ABOVE


@dataclass(frozen=True, kw_only=True)
class MapRow(OfModel):
    """The maps of one method or layer, means over images, which a command's row adds to. maps: their name in metrics;
    pointing: how often a map's highest point lies on the object; of_baseline: the same of the best map that ignores
    the image; difference: paired over images. None where there are no masks, or too few images."""

    maps: str = col("name in metrics")
    information: Estimate = col(
        "information", term="log2 of the number of patches minus the entropy of the map: 0 bits are a uniform map"
    )
    by_place: Estimate | None = col(
        "the same in other images",
        term="the share of a map's information that the mean map of the other images explains",
        default=None,
    )
    pointing: Estimate | None = col(
        "highest point on the object", better="higher", metric="localisation/{model}/pointing/{maps}", default=None
    )
    baseline: str | None = col("best map that ignores the image", default=None)
    of_baseline: Estimate | None = col("of a map that ignores the image", default=None)
    difference: Estimate | None = col("difference", better="higher", default=None)


Row = TypeVar("Row", bound=MapRow)


def fixed_maps(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose maps hold information and are nearly the same for every image."""
    return [r for r in rows if above(r.by_place, FIXED, len(rows)) and (r.information.low or 0.0) >= UNIFORM]


@dataclass(frozen=True)
class MixedHeadsRow:
    """One attention module that mixes the weights over heads after the softmax (talking heads, CaiT)."""

    module: str


def mixed_heads_words(rows: Sequence[MixedHeadsRow]) -> str:
    """Return a note that the weights are those before the mixing."""
    return say(
        "In {{ n }} layer{{ n|s }} (talking heads) the attention weights are those before a linear map mixes them over "
        "heads: these are not the weights that multiply the values.",
        n=len(rows),
    )


@dataclass(frozen=True)
class MapCheckRow(OfModel):
    """One check of one method's maps. value: its score; baseline, margin: the hardest of the maps that it is held
    against, and the paired difference from it, at the width that all methods require; lacks: why it does not pass;
    behind: the best method minus this one in the same check, None for the best; needed: whether the verdict needs it.
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
        """Return the check as figures name it."""
        return CHECKS[self.check]

    @property
    def colour(self) -> float:
        """Return its place on a scale from passed to failed, for a figure."""
        return {"pass": -1.0, "warn": 0.4, "fail": 1.0}.get(self.state, 0.0)

    @property
    def words(self) -> str:
        """Return the state as a sign, and the score."""
        sign = {"pass": "✓", "warn": "~", "fail": "✗"}.get(self.state, "?")
        return sign if self.value is None else f"{sign} {self.value.value:.2f}"


@dataclass(frozen=True)
class JudgedMap(OfModel):
    """The verdict on one method of a model. lacks: why it does not pass, a predicate; fault: why it fails, in the few
    words that fit a figure; value, baseline, margin: of the first removal check; alike: whether its score cannot be
    told from that of the best; not_passed: checks."""

    method: str = col("method")
    state: State = col("verdict")
    lacks: str = col("lacks", unit="text")
    fault: str = col("fault")
    not_passed: tuple[str, ...] = col(
        "not passed", term="the checks that a map fails, that could not decide, or that were not run"
    )
    value: Estimate | None = col(
        "removal score",
        term="the area under the target's probability where patches are removed from the lowest up, minus that where "
        "they are removed from the highest down; 0 for a random order",
        default=None,
    )
    baseline: str = col("hardest baseline", default="")
    margin: Estimate | None = col("above the hardest baseline", default=None)
    alike: bool = col("not distinguishable from the best", default=False)

    @property
    def because(self) -> str:
        """Return why its maps are judged as they are."""
        return say("{{ m }} {{ lacks|whole if lacks else 'passes every check' }}", m=self.method, lacks=self.lacks)

    @property
    def missing(self) -> str:
        """Return the checks that it does not pass, a predicate."""
        checks = listed([say("{{ name }}", name=name) for name in self.not_passed])
        return say("did not pass the check{{ names|s }} {{ checks }}", names=self.not_passed, checks=checks)


def judged_by(known: Collection[str]) -> list[str]:
    """Return the replacements of removed patches by which maps are judged, of those that are known."""
    return [name for name in JUDGING if name in known][:REMOVALS]


def removal_check(
    model: str,
    method: str,
    substrate: str,
    value: Estimate,
    margins: Mapping[str, Estimate],
    *,
    usable: int,
    behind: Estimate | None = None,
) -> MapCheckRow:
    """Return whether removing patches in the order of a map tells more than in that of each baseline. margins: the
    paired differences from the baselines, as wide as all methods require; usable: maps that are finite and not uniform.
    """
    harder = min(margins, key=lambda name: margins[name].value)
    state: State = "pass"
    lacks: tuple[Any, ...] = tuple(base for base in margins if beyond(margins[base], 0.0) is not Side.ABOVE)
    if not usable:
        state = "fail"
        lacks = ("unusable maps",)
    elif (value.n or 0) < ENOUGH:
        state = "inconclusive"
        lacks = ("few images tried",)
    elif lacks:
        state = "fail" if RANDOM in lacks else "warn"
    elif SHUFFLED not in margins:
        state = "inconclusive"
        lacks = ("other images not tried",)
    return MapCheckRow(model, method, substrate, state, value, BASELINES[harder], margins[harder], lacks, behind)


def map_check(model: str, method: str, check: str, judged: Judgement) -> MapCheckRow:
    """Return whether maps change when the weights are randomised from the head down (WEIGHTS), or follow shifts of
    their images by at most a pixel (SHIFTS)."""
    lacks: tuple[Any, ...] = (judged.lack,) if judged.lack else ()
    return MapCheckRow(model, method, check, judged.state, judged.value, lacks=lacks)


def object_check(row: OnObjectRow) -> MapCheckRow:
    """Return whether maps lie on the object more than maps that ignore the image; the verdict does not need it."""
    state: State = "pass" if row.above else "warn"
    return MapCheckRow(row.model, row.maps, ON_OBJECT, state, row.estimate, row.baseline, row.difference, needed=False)


def judged_maps(rows: Sequence[MapCheckRow]) -> tuple[JudgedMap, ...]:
    """Return all methods of one model by their checks, the best first: by verdict, then by the score of the first
    removal."""
    found = [_judged(method, own) for method, own in by([row for row in rows if row.needed], "method").items()]
    return tuple(sorted(found, key=lambda row: (_BEST_FIRST.index(row.state), -row.value.value if row.value else 0.0)))


def best_map(rows: Sequence[MapCheckRow]) -> JudgedMap | None:
    """Return the best method of a model, None where nothing was checked."""
    return next(iter(judged_maps(rows)), None)


def _judged(method: str, rows: Sequence[MapCheckRow]) -> JudgedMap:
    known = {row.check: row for row in rows}
    removals = [known[name] for name in judged_by(known)]
    untested = [CHECKS[name] for name in (WEIGHTS, SHIFTS) if name not in known]
    if len(removals) < REMOVALS:
        untested = ["a second replacement of removed patches" if removals else "removed patches", *untested]
    states: list[State] = [row.state for row in rows]
    if untested:
        states.append("inconclusive")
    state = max(states, key=_BEST_FIRST.index)
    reasons = [
        f"does not beat {listed([BASELINES[base] for base in lacks], 'or')} with patches "
        f"{' and '.join(REPLACED[row.check] for row in own)}"
        if lacks[0] in BASELINES
        else _LACKS[lacks[0]]
        for lacks, own in by(removals, "lacks").items()
        if lacks
    ]
    reasons += [_LACKS[row.lacks[0]] for row in rows if row.check not in REPLACED and row.lacks]
    reasons += [f"was not tested with {listed(untested)}"] if untested else []
    faults = [fault for lack, fault in _FAULTS.items() if any(lack in row.lacks for row in rows)]
    first = removals[0] if removals else None
    return JudgedMap(
        rows[0].model,
        method,
        state,
        str(listed(reasons)) if reasons else "",
        faults[0] if state == "fail" else "",
        (*(CHECKS[row.check] for row in rows if row.state != "pass"), *untested),
        *((first.value, first.baseline, first.margin) if first else (None, "", None)),
        first is not None and first.behind is not None and beyond(first.behind, 0.0) is not Side.ABOVE,
    )


def mass_of(rows: Sequence[OnObjectRow], kind: str) -> list[OnObjectRow]:
    """Return the rows of the mass of one kind of map, by layer."""
    return [row for row in rows if row.score == "mass" and row.maps == kind]
