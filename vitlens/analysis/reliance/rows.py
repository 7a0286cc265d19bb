"""Rows about the reliance of a model on cues; free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.analysis.reliance.cues import CUES, Cue, Intervention
from vitlens.arrays import Masks, Pixels, Stack
from vitlens.record import OfModel, col, head_name
from vitlens.uncertainty import LEVEL, Estimate

FEWEST: Final = 20  # an intervention that changes fewer images is not judged
LEAST_RATIO: Final = 0.5  # a control is matched if its distance is half to twice as large
# points of predictions changed beyond the control; a smaller effect is no reliance
SMALLEST_RELIANCE: Final = 5.0
# a head carries a cue if at least this share of the effect, beyond the control's, passes it
SMALLEST_SHARE: Final = 0.05
SMALLEST_AREA: Final = 0.6  # maps with a smaller AUC do not show that a cue decides
_EXPLAINED: Final = 0.8  # a part of a cue explains it if it has at least this share of its effect
_HALF: Final = 0.5  # a cue comes after one that it holds if that has this share of its effect


@dataclass(frozen=True)
class OfIntervention:
    """A row about one intervention on a cue."""

    cue: str = col("cue")
    intervention: str = col("intervention")

    @property
    def of_cue(self) -> Cue:
        """Return the cue."""
        return CUES[self.cue]

    @property
    def of_intervention(self) -> Intervention:
        """Return the intervention."""
        by_name = {candidate.name: candidate for candidate in self.of_cue.interventions}
        return by_name[self.intervention]

    @property
    def title(self) -> str:
        """Return the cue in words."""
        return self.of_cue.title

    @property
    def change(self) -> str:
        """Return the changed images in words, after "on images"."""
        return self.of_intervention.change

    @property
    def cue_and_change(self) -> str:
        """Return the cue and the intervention, for tables."""
        return f"{self.title}: {self.change}"


@dataclass(frozen=True, kw_only=True)
class RelianceRow(OfModel, OfIntervention):
    """The effect of one intervention, and of its control, on the predictions of one model.

    n: the number of images that the intervention changes.
    unchanged: the number of other images, which do not have the cue.
    size, control_size: the mean absolute distance of the pixels from before.
    changed_by, changed_by_control: the share of predictions that the intervention (its control)
        changes.
    changed: the difference of both shares.
    lost: the accuracy after the control minus that after the intervention.
    gained: the accuracy after the intervention minus that before.
    errors: the number of errors before.
    fixed: the number of errors that become right.
    broken: the number of correct predictions that become wrong.
    control_fixed, control_broken: the same numbers after the control.
    p, p_lost, p_gained: the p-values of `changed`, `lost` and `gained`, by `paired_test`.
    p_holm, p_lost_holm, p_gained_holm: the p-values, corrected over all matched rows.
    """

    n: int = col("images")
    unchanged: int = col("images without the cue")
    size: float = col("size of the change")
    control_size: float = col("size of the control")
    changed_by: Estimate = col("predictions changed")
    changed_by_control: Estimate = col("by the control")
    changed: Estimate = col(
        "changed beyond the control",
        term="predictions that the intervention changes minus those that its control changes, in "
        "points",
        metric="reliance/{model}/{cue}/{intervention}",
    )
    lost: Estimate = col(
        "accuracy lost beyond the control",
        better="lower",
        metric="accuracy_lost_without/{model}/{cue}/{intervention}",
    )
    gained: Estimate = col(
        "accuracy gained", term="accuracy without the cue minus accuracy with it"
    )
    errors: int = col("errors")
    fixed: int = col("errors fixed")
    broken: int = col("broken")
    control_fixed: int = col("fixed by the control")
    control_broken: int = col("broken by the control")
    p: float = col("p")
    p_lost: float = col("p of the accuracy lost")
    p_gained: float = col("p of the accuracy gained")
    p_holm: float | None = col("p (Holm)", default=None)
    p_lost_holm: float | None = col("p of the accuracy lost (Holm)", default=None)
    p_gained_holm: float | None = col("p of the accuracy gained (Holm)", default=None)

    @property
    def is_matched(self) -> bool:
        """Return True if the control changes the pixels by half to twice as much."""
        return self.size > 0 and LEAST_RATIO <= self.control_size / self.size <= 1 / LEAST_RATIO

    @property
    def control(self) -> str:
        """Return the control in words, "unmatched" if it is not matched."""
        return self.of_intervention.control if self.is_matched else "unmatched"

    @property
    def is_relied_on(self) -> bool:
        """Return True if the cue changes predictions, or misleads the model."""
        return self.changes_predictions or self.misleads

    @property
    def changes_predictions(self) -> bool:
        """Return True if significantly more predictions change than under a matched control.

        The difference must also be at least 5 points.
        """
        is_significant = self.p_holm is not None and self.p_holm <= LEVEL
        return self.is_matched and is_significant and self.changed.value >= SMALLEST_RELIANCE

    @property
    def changes_accuracy(self) -> bool:
        """Return True if the intervention costs or gains accuracy beyond a matched control."""
        return self.is_matched and self.p_lost_holm is not None and self.p_lost_holm <= LEVEL

    @property
    def misleads(self) -> bool:
        """Return True if the cue causes errors: accuracy rises without it, beyond the control.

        A change that only disturbs does not make predictions right. So the control may even disturb
        more predictions than the intervention.
        """
        is_gain = self.p_gained_holm is not None and self.p_gained_holm <= LEVEL
        is_large = self.gained.value >= SMALLEST_RELIANCE
        is_beyond_control = self.changes_accuracy and self.lost.value < 0
        return is_gain and is_large and is_beyond_control

    @property
    def strength(self) -> float:
        """Return the predictions changed beyond the control, in points.

        If the cue misleads and the accuracy gained is larger, return that.
        """
        if self.misleads:
            return max(self.changed.value, self.gained.value)
        return self.changed.value


@dataclass(frozen=True, kw_only=True)
class ReliancePairRow(OfIntervention):
    """The difference of two models under one intervention, on the same images.

    All differences are first minus second.

    changed: the difference of the predictions changed beyond the control.
    lost: the difference of the accuracy lost beyond the control.
    p, p_lost: the p-values of `changed` and `lost`, by `paired_test`.
    is_matched: True if the control is matched.
    changed_by: the difference of the predictions that the intervention changes, without a control.
    relying: the models of the two that rely on the cue.
    accuracy: the difference of the accuracy after the intervention.
    p_holm, p_lost_holm: the p-values, corrected over all matched rows.
    """

    first: str = col("first")
    second: str = col("second")
    changed: Estimate = col(
        "first minus second: changed beyond the control",
        metric="reliance_difference/{first}/{second}/{cue}/{intervention}",
    )
    lost: Estimate = col("first minus second: accuracy lost beyond the control")
    p: float = col("p")
    p_lost: float = col("p of the accuracy lost")
    is_matched: bool = col("control matched")
    changed_by: float = col("first minus second: predictions changed", unit="points")
    relying: tuple[str, ...] = col("models that rely on it", default=())
    accuracy: Estimate | None = col("first minus second: accuracy without the cue", default=None)
    p_holm: float | None = col("p (Holm)", default=None)
    p_lost_holm: float | None = col("p of the accuracy lost (Holm)", default=None)

    @property
    def more(self) -> str:
        """Return the model that relies more on the cue, "" for neither.

        It must rely on the cue, and the difference must be significant and not small. The
        difference must not come from the control only: the intervention itself must also change
        more of the model's predictions.
        """
        if not self.is_matched or self.p_holm is None or self.p_holm > LEVEL:
            return ""
        sign = 1 if self.changed.value > 0 else -1
        if min(sign * self.changed.value, sign * self.changed_by) < SMALLEST_RELIANCE:
            return ""
        model = self.first if sign > 0 else self.second
        return model if model in self.relying else ""


@dataclass(frozen=True, kw_only=True)
class CueHeadRow(OfModel, OfIntervention):
    """The part of a cue's effect that passes through one head, on all images.

    share: the share of the change of the logits that the intervention causes.
    control: the same share for the control.
    p_holm: the p-value that both are equal, paired over images and corrected for all heads.
    accuracy: the accuracy gained if only this head sees the changed image.
    """

    layer: int = col("layer")
    head: int = col("head")
    share: Estimate = col(
        "share of the effect", term="of the change of the logits; 100 % is all of it"
    )
    control: Estimate = col("share of the control's effect")
    p_holm: float = col("p (Holm)")
    accuracy: Estimate = col(
        "accuracy gained", unit="points", term="when only this head sees the changed image"
    )

    name = head_name

    @property
    def carries(self) -> bool:
        """Return True if a clearly larger share of the effect than of the control passes it."""
        gain = self.share.value - self.control.value
        return self.p_holm <= LEVEL and gain >= SMALLEST_SHARE


@dataclass(frozen=True, kw_only=True)
class CueMapRow(OfModel, OfIntervention):
    """The evidence of one method's maps in the region of a cue.

    A cue decides an image if the intervention changes the prediction and its control does not.

    method: the name of the attribution method.
    decided: the mean share of the map's positive evidence in the region, on images that the cue
        decides.
    others: the same on other images.
    area: the AUC of the share, minus that of a uniform map, for images that the cue decides.
    p_holm: the p-value of an AUC of 0.5, corrected over the methods.
    """

    method: str = col("method")
    decided: Estimate = col("evidence there where the cue decides", unit="fraction")
    others: Estimate = col("evidence there on other images", unit="fraction")
    area: Estimate = col(
        "ROC-AUC", better="higher", term="how well the share tells these images from the others"
    )
    p_holm: float | None = col("p (Holm)", default=None)

    @property
    def shows(self) -> bool:
        """Return True if the maps have more evidence in the region when the cue decides."""
        return self.p_holm is not None and self.p_holm <= LEVEL and self.area.value >= SMALLEST_AREA


@dataclass(frozen=True, kw_only=True)
class CueExampleRow(OfModel, OfIntervention):
    """One image of the examples of a cue.

    label: the class of the image.
    before, after: the predictions before and after the intervention.
    """

    label: str = col("class")
    before: str = col("prediction")
    after: str = col("prediction without the cue")


@dataclass(frozen=True)
class CueExampleArrays:
    """The pictures of a model's examples, in the order of their rows.

    before, after: the pixels before and after the intervention.
    regions: True for pixels that may differ.
    maps: the maps of one method, if there are any.
    """

    before: Pixels
    after: Pixels
    regions: Masks
    maps: Stack | None = None


@dataclass(frozen=True)
class LeftOutCueRow:
    """A cue, or an intervention on it, that could not be tested, with the reason."""

    cue: str = col("cue")
    reason: str = col("reason", unit="text")

    @property
    def title(self) -> str:
        """Return the cue in words."""
        return CUES[self.cue].title


def rank_interventions(rows: Sequence[RelianceRow], model: str) -> tuple[RelianceRow, ...]:
    """Return the strongest intervention on each cue that a model relies on.

    The largest effect comes first. A cue is left out if one of its parts has at least 80 % of its
    effect. It comes last if a cue that it holds has at least half of its effect.
    """
    strongest: dict[str, RelianceRow] = {}
    for row in rows:
        if row.model != model or not row.is_relied_on:
            continue
        best = strongest.get(row.cue)
        if best is None or row.strength > best.strength:
            strongest[row.cue] = row
    unexplained = list[RelianceRow]()
    for row in strongest.values():
        parts = [strongest[name] for name in row.of_cue.parts if name in strongest]
        if not _any_has_share(parts, _EXPLAINED, row):
            unexplained.append(row)

    def lateness_and_weakness(row: RelianceRow) -> tuple[bool, float]:
        held = [strongest[name] for name in row.of_cue.holds if name in strongest]
        comes_last = _any_has_share(held, _HALF, row)
        return comes_last, -row.strength

    return tuple(sorted(unexplained, key=lateness_and_weakness))


def _any_has_share(rows: Sequence[RelianceRow], share: float, whole: RelianceRow) -> bool:
    """Return True if the effect of one of the rows is at least this share of that of `whole`."""
    return any(row.strength >= share * whole.strength for row in rows)


def suspects(rows: Sequence[RelianceRow], model: str) -> tuple[RelianceRow, ...]:
    """Return the cues that a model relies on but should not.

    Cues that mislead it come first, then those of the background. A cue misleads if any
    intervention on it shows that. If the strongest intervention does not, the one that gains most
    accuracy stands for the cue.
    """
    chosen = list[RelianceRow]()
    all_misleading = [row for row in rows if row.model == model and row.misleads]
    for row in rank_interventions(rows, model):
        misleading = [other for other in all_misleading if other.cue == row.cue]
        if misleading and not row.misleads:
            chosen.append(max(misleading, key=lambda other: other.gained.value))
        elif row.misleads or row.of_intervention.region == "background":
            chosen.append(row)
    return tuple(sorted(chosen, key=lambda row: not row.misleads))  # False comes before True


def rank_pairs(pairs: Sequence[ReliancePairRow]) -> tuple[ReliancePairRow, ...]:
    """Return the largest difference of each pair of models for each cue, the largest first.

    Cues that no model of a pair relies more on are left out.
    """
    strongest: dict[tuple[str, str, str], ReliancePairRow] = {}
    for row in pairs:
        if not row.more:
            continue
        key = (row.first, row.second, row.cue)
        best = strongest.get(key)
        if best is None or abs(row.changed.value) > abs(best.changed.value):
            strongest[key] = row
    return tuple(sorted(strongest.values(), key=lambda row: -abs(row.changed.value)))
