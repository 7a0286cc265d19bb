"""The verdict on the robustness of a model under attack."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.commands.attack.record import (
    AttackCheckRow,
    AttackCurveRow,
    AttackedModelRow,
    AttackRecord,
    SurvivorsRow,
)
from vitlens.report.claims import FEWEST
from vitlens.report.document import State
from vitlens.report.prose import Marked, say
from vitlens.report.verdicts import LIMITS, Verdict
from vitlens.uncertainty import Estimate

_KEPT: Final = 0.8  # share of the clean accuracy that no undefended model keeps at FAR
# share of survivors broken by stronger attacks, above which the first attacks were too weak
_MISSED: Final = 0.1


def describe_check(row: AttackCheckRow) -> Marked:
    """Return the name, attack and result of a self-check."""
    return Marked(say("“{{ row.name }}” of {{ row.attack }}: {{ row.found|whole }}", row=row))


def failed_checks(record: AttackRecord, model: str) -> list[AttackCheckRow]:
    """Return the failed self-checks of the attacks on a model."""
    return [row for row in record.checks if row.model == model and row.state == "failed"]


@dataclass(frozen=True)
class Evidence:
    """The evidence on which the robustness of a model is judged.

    at: the strongest attack at 1/255.
    failed: self-checks.
    far: the strongest attack at 8/255 or more.
    again: the survivors that were attacked again.
    """

    row: AttackedModelRow
    at: AttackCurveRow
    curves: Sequence[AttackCurveRow]
    failed: Sequence[AttackCheckRow]
    far: AttackCurveRow | None
    again: SurvivorsRow | None

    @property
    def has_enough_images(self) -> bool:
        """Return True if there are enough images for a verdict."""
        return (self.row.clean.n or 0) >= FEWEST

    def verdict(self) -> Verdict:
        """Return the verdict; no model is praised after faulty or weak attacks.

        Every attack gives an upper bound of robust accuracy. A bound below the limit cannot pass,
        so it is not inconclusive.
        """
        state, words, doubts = self._judge()
        is_measured = self.has_enough_images and self.row.clean.value > 0
        if state == "inconclusive" and is_measured and not_robust(self.at.accuracy):
            state = "warn"
            words += "; as an upper bound it lies below the limit all the same"
        because = say(
            words,
            at=self.at,
            few=FEWEST,
            failed=self.failed,
            fault=describe_check(self.failed[0]) if self.failed else "",
            far=self.far,
            again=self.again,
        )
        return Verdict(state, because, "robustness", doubts)

    def _judge(self) -> tuple[State, str, bool]:
        """Return the state, the template of its reason, and whether the measurement is in doubt."""
        words = "accuracy under {{ at.title }} at {{ at.at }}"
        state = LIMITS["robustness"].judge(self.at.accuracy)
        clean = self.row.clean.value
        if not clean:
            return "inconclusive", "it classifies no clean image correctly", False
        if min(curve.accuracy.value for curve in self.curves) >= clean:
            words = (
                "no attack fooled it at any epsilon, which says more about these attacks than "
                "about the model"
            )
            return "inconclusive", words, True
        if not self.has_enough_images:
            return "inconclusive", words + ", on fewer than {{ few }} images", False
        if self.failed and state in ("pass", "warn"):
            words += (
                ", but {{ failed|length }} self-check{{ failed|s }} failed ({{ fault }}): it is "
                "too high by an unknown amount"
            )
            return "inconclusive", words, True
        if self.again is not None and self.again.missed > _MISSED * self.again.survivors:
            words += (
                "; but stronger attacks broke {{ again.missed }} of its {{ again.survivors }} "
                "survivors at {{ again.at }}: these attacks are too weak"
            )
            return "warn" if state == "pass" else state, words, True
        if self.again is not None and (
            self.again.margin is not None or self.again.square is not None
        ):
            words += (
                "; at {{ again.at }} it keeps {{ again.after|alone }}, also under a margin loss "
                "and Square on its {{ again.survivors }} survivors"
            )
            return state, words, False
        if state == "pass" and self.far is not None and self.far.accuracy.value >= _KEPT * clean:
            words += (
                "; but the attacks are too weak: at {{ far.at }} it still has "
                "{{ far.accuracy|alone }}, which undefended models rarely keep"
            )
            return "warn", words, True
        return state, words, False


def not_robust(upper_bound: Estimate) -> bool:
    """Return True if accuracy under an attack, also a weak one, shows that a model cannot pass."""
    return LIMITS["robustness"].out_of_reach(upper_bound)
