"""The verdict on the robustness of a model under attack."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

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


def describe_first(checks: Sequence[AttackCheckRow]) -> str:
    """Return the first of these self-checks as `describe_check` does, "" without any."""
    if not checks:
        return ""
    return describe_check(checks[0])


def failed_checks(record: AttackRecord, model: str) -> list[AttackCheckRow]:
    """Return the failed self-checks of the attacks on a model."""
    return [row for row in record.checks if row.model == model and row.state == "failed"]


class _Judgement(NamedTuple):
    """A state with the template of its reason.

    doubts: True if the measurement of robustness is in doubt.
    """

    state: State
    words: str
    doubts: bool


@dataclass(frozen=True)
class Evidence:
    """The evidence on which the robustness of a model is judged.

    row: the model over all attacks.
    judged: the strongest attack at 1/255.
    curves: all attacks on the model at all epsilons above 0.
    failed: the failed self-checks of these attacks.
    far: the strongest attack at 8/255 or more; None if none was run.
    again: the survivors that were attacked again; None if they were not.
    """

    row: AttackedModelRow
    judged: AttackCurveRow
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
        if state == "inconclusive" and is_measured and not_robust(self.judged.accuracy):
            state = "warn"
            words += "; even this upper bound lies below the limit"
        because = say(
            words,
            judged=self.judged,
            few=FEWEST,
            failed=self.failed,
            fault=describe_first(self.failed),
            far=self.far,
            again=self.again,
        )
        return Verdict(state, because, limit="robustness", doubts=doubts)

    def _judge(self) -> _Judgement:
        """Judge the accuracy at 1/255, then every reason to mistrust it.

        The first that holds decides: no correct clean image; no image fooled; few images; a failed
        self-check; many survivors broken by stronger attacks; few of them broken, which supports
        the accuracy; too much accuracy at 8/255.
        """
        words = "accuracy under {{ judged.title }} at {{ judged.at }}"
        state = LIMITS["robustness"].judge(self.judged.accuracy)
        clean = self.row.clean.value
        if not clean:
            words = "it classifies no clean image correctly"
            return _Judgement("inconclusive", words, doubts=False)
        lowest = min(curve.accuracy.value for curve in self.curves)
        if lowest >= clean:
            words = (
                "no attack fooled it at any epsilon, which says more about these attacks than "
                "about the model"
            )
            return _Judgement("inconclusive", words, doubts=True)
        if not self.has_enough_images:
            words += ", on fewer than {{ few }} images"
            return _Judgement("inconclusive", words, doubts=False)
        if self.failed and state in ("pass", "warn"):
            words += (
                ", but {{ failed|length }} self-check{{ failed|s }} failed ({{ fault }}): it is "
                "too high by an unknown amount"
            )
            return _Judgement("inconclusive", words, doubts=True)
        if self.again is not None and self.again.missed > _MISSED * self.again.survivors:
            words += (
                "; but stronger attacks broke {{ again.missed }} of its {{ again.survivors }} "
                "survivors at {{ again.at }}: these attacks are too weak"
            )
            if state == "pass":
                state = "warn"
            return _Judgement(state, words, doubts=True)
        if self.again is not None and self.again.was_attacked:
            words += (
                "; at {{ again.at }} it keeps {{ again.after|alone }}, also under "
                "{{ again.attacks }} on its {{ again.survivors }} survivors"
            )
            return _Judgement(state, words, doubts=False)
        keeps_too_much = self.far is not None and self.far.accuracy.value >= _KEPT * clean
        if state == "pass" and keeps_too_much:
            words += (
                "; but the attacks are too weak: at {{ far.at }} it still has "
                "{{ far.accuracy|alone }}, which undefended models rarely keep"
            )
            return _Judgement("warn", words, doubts=True)
        return _Judgement(state, words, doubts=False)


def not_robust(upper_bound: Estimate) -> bool:
    """Return True if accuracy under an attack, also a weak one, shows that a model cannot pass."""
    return LIMITS["robustness"].out_of_reach(upper_bound)
