"""Which maps may be trusted: the verdict on one method and on a model, by one rule; free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.analysis.faithfulness.cascade import ENOUGH, KEPT, SIMILAR, Cascade
from vitlens.commands.shared.maps.rows import BASELINES, MapCheck
from vitlens.report.document import Cell, State, Verdict
from vitlens.uncertainty import Estimate, Side, beyond, widened

THRESHOLD: Final = (
    "ROAD score (insertion − deletion without it): pass above a random map and a map of the centre, warn above the "
    "random map alone; the randomisation check must be passed"
)
CHECK_WORDS: Final = (
    "How a map is judged: patches are removed in the order of the map and in reverse, and the difference of the areas "
    "under the target's probability is compared, image by image (removed patches are imputed from their surroundings, "
    "ROAD, Rong 2022; where that was not run they are replaced, insertion − deletion, Petsiuk 2018), with that of two "
    "maps that ignore the model: a random one and one of the image's centre. The intervals are as wide as the "
    "number of methods requires. In the randomisation check (Adebayo 2018) the weights are permuted from the head "
    "down. A method fails it where the mean rank correlation with the trained model's maps is "
    f"{SIMILAR:g} or more at every stage down to the middle block, or with all weights random; it is inconclusive "
    f"where an interval holds that value, with fewer than {ENOUGH} images, and where the model keeps "
    f"{100 * KEPT:.0f} % or more of its predictions, so that no map had to change."
)
_BEST_FIRST: Final[tuple[State, ...]] = ("pass", "warn", "inconclusive", "fail")
_OBSTACLES: Final = {
    "uniform maps": "all its maps are uniform",
    "few images": "it had too few images",
    "predictions unchanged": "randomised weights hardly changed the predictions, so no map had to change",
    "interval holds the threshold": "the interval of the similarity holds the threshold",
}


@dataclass(frozen=True)
class JudgedMap:
    """One method's verdict. margin: the score that judges beyond the harder baseline, at the width of `looks`."""

    check: MapCheck
    state: State
    because: str
    harder: str
    margin: Estimate | None

    @property
    def fault(self) -> str:
        """Why it fails, in the few words that fit a figure; "" for a method that does not."""
        if self.state != "fail":
            return ""
        if self.check.unusable == self.check.images:
            return "uniform"
        fixed = self.check.cascade is not None and self.check.cascade.state == "fails"
        return "fails randomisation" if fixed else "not above random"


def judged_map(check: MapCheck, looks: int = 1) -> JudgedMap:
    """The verdict on one method that is one of so many looks.

    It fails where all its maps are uniform or broken, where it fails the randomisation check, and where it is not shown
    to be above random; it is inconclusive where that check is, or with fewer than ENOUGH images.
    """
    known = {margin.against: widened(margin.estimate, looks) for margin in check.margins if margin.against in BASELINES}
    harder = min(known, key=lambda name: known[name].value, default="")
    above = [name for name in known if beyond(known[name], 0.0) is Side.ABOVE]
    state, because = _judged(check, above)
    return JudgedMap(check, state, because, harder, known.get(harder))


def judged_maps(checks: Sequence[MapCheck]) -> tuple[JudgedMap, ...]:
    """All methods of a model, the best first: by verdict, then by the score that judges."""
    judged = (judged_map(check, len(checks)) for check in checks)
    return tuple(sorted(judged, key=lambda each: (_BEST_FIRST.index(each.state), -each.check.estimate.value)))


def explanation_verdict(alias: str, checks: Sequence[MapCheck], *, untested: str) -> Verdict:
    """Which map of a model may be trusted, judged by its best one. untested: what to add where nothing was checked."""
    subject = f"explanation of {alias}"
    if not checks:
        return Verdict(subject, "not tested", None, THRESHOLD, untested)
    best = judged_maps(checks)[0]
    of = f"the best verdict of {len(checks)} methods" if len(checks) > 1 else "the only method that was checked"
    return Verdict(subject, best.state, best.margin, THRESHOLD, f"{best.check.method}, {of}: {best.because}")


def cascade_words(cascade: Cascade | None) -> str:
    """The randomisation check in a word or two, for a table."""
    if cascade is None:
        return "not run"
    return cascade.state if not cascade.obstacle else f"inconclusive ({cascade.obstacle})"


def in_three_decimals(one: Estimate | None) -> Cell:
    """A number with its interval in three decimals, for a table of many columns."""
    if one is None or one.low is None or one.high is None:
        return None if one is None else f"{one.value:.3f}"
    return f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})"


def _judged(check: MapCheck, above: Sequence[str]) -> tuple[State, str]:
    if check.unusable == check.images:
        return "fail", "every map is uniform or not finite"
    if check.cascade is not None and check.cascade.state == "fails":
        return "fail", "its maps hardly change when the weights are randomised"
    if check.images < ENOUGH:
        return "inconclusive", "too few images"
    if "random" not in above:
        return "fail", f"its {check.judged_by} is not shown to exceed that of a random map"
    if check.cascade is None:
        return "inconclusive", "the randomisation check was not run, as maps are not finite"
    if check.cascade.state == "inconclusive":
        return "inconclusive", f"the randomisation check is inconclusive: {_OBSTACLES[check.cascade.obstacle]}"
    if "centre" not in above:
        return "warn", f"its {check.judged_by} is above that of a random map, not shown to be above that of the centre"
    return "pass", f"its {check.judged_by} exceeds that of both baselines, and its maps change with the weights"
