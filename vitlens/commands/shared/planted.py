"""Judge a report by the generating factors of drawn images, which no analysis reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.record import OfModel, col
from vitlens.report.prose import listed, say
from vitlens.uncertainty import Estimate, difference_of, share_of

# points of accuracy from which on, with an interval above 0, a model uses a factor
REAL: Final = 5.0


@dataclass(frozen=True)
class Planted:
    """A cause that was planted in training data.

    says: how.
    cues: by which an analysis may name it.
    remedied: for each bundled model that was trained on these data, the one of the same
        architecture that was trained without the cause, and its accuracy on the 1,800 test scenes.
    """

    says: str
    cues: tuple[str, ...]
    remedied: Mapping[str, tuple[str, float]]


# by the factor that says, of each test image, whether the cause would lead to its label
PLANTED: Final[Mapping[str, Planted]] = MappingProxyType(
    {
        "hue_agrees": Planted(
            "in 90 % of the training scenes of digits-shortcut, the hue of the background goes "
            "with the class",
            ("background-colour", "colour"),
            {"vit-shortcut": ("vit-digits", 0.881), "cnn-shortcut": ("cnn-digits", 0.941)},
        ),
    }
)


def remedy_of(model: str) -> str:
    """Return the bundled model that was trained without the planted cause, "" where there is
    none."""
    for planted in PLANTED.values():
        if model in planted.remedied:
            name, _ = planted.remedied[model]
            return name
    return ""


@dataclass(frozen=True, kw_only=True)
class FactorRow(OfModel):
    """The accuracy of one model where a factor is true, and where it is false."""

    factor: str = col("factor")
    accuracy_true: Estimate = col("accuracy where it holds")
    accuracy_false: Estimate = col("accuracy elsewhere")
    difference: Estimate = col("difference")

    @property
    def is_used(self) -> bool:
        """Return True if the model is significantly better where the factor holds."""
        low = self.difference.low
        return low is not None and low > 0 and self.difference.value >= REAL


def factor_rows(
    factors: Mapping[str, NDArray[np.generic]],
    correct: Mapping[str, NDArray[np.bool_]],
    groups: NDArray[np.integer] | None,
) -> Iterator[FactorRow]:
    """Yield a row for each planted factor and model.

    correct: by model, (n,), whether each prediction is correct.
    groups: (n,) of images that share a source.
    """
    for factor in PLANTED:
        if factor not in factors:
            continue
        holds = np.asarray(factors[factor], dtype=bool)
        if holds.all() or not holds.any():
            continue
        for model, answers in correct.items():
            accuracy_true = _accuracy(answers, holds, groups)
            accuracy_false = _accuracy(answers, ~holds, groups)
            yield FactorRow(
                model=model,
                factor=factor,
                accuracy_true=accuracy_true,
                accuracy_false=accuracy_false,
                difference=difference_of(accuracy_true, accuracy_false),
            )


def _accuracy(
    answers: NDArray[np.bool_], side: NDArray[np.bool_], groups: NDArray[np.integer] | None
) -> Estimate:
    return share_of(answers[side], groups=None if groups is None else groups[side])


def judgement(
    rows: Sequence[FactorRow], cues_by_model: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield, for each planted cause, whether a report recovered it.

    cues_by_model: by model, the cues that the report names as misleading.
    """
    for factor, planted in PLANTED.items():
        of_factor = [row for row in rows if row.factor == factor]
        using = [row for row in of_factor if row.is_used]
        right = []  # models that use the cause, and of which the report names it
        wrong = []  # models that do not use it, and of which the report names it
        for row in of_factor:
            named_cues = set(cues_by_model.get(row.model, ()))
            if named_cues.isdisjoint(planted.cues):
                continue
            if row.is_used:
                right.append(row)
            else:
                wrong.append(row)
        if using:
            yield _recovered(planted, using, right)
        elif of_factor and not wrong:
            yield say(
                "**Known answer.** {{ models }} {{ do }} not use the cause that can be planted "
                "in these data ({{ planted|whole }}), and this report does not name it.",
                planted=planted.says,
                models=listed([say("**{{ row.model }}**", row=row) for row in of_factor]),
                do=_do(of_factor),
            )
        if wrong:
            yield say(
                "This report is wrong: it names a cause that, by the generating factors, "
                "{{ models }} {{ do }} not use.",
                models=listed([say("**{{ row.model }}**", row=row) for row in wrong]),
                do=_do(wrong),
            )


def _do(rows: Sequence[FactorRow]) -> str:
    return "does" if len(rows) == 1 else "do"


def _recovered(planted: Planted, using: Sequence[FactorRow], right: Sequence[FactorRow]) -> str:
    with_cause = [
        say("{{ row.accuracy_true|value }} for **{{ row.model }}**", row=row) for row in using
    ]
    elsewhere = [say("{{ row.accuracy_false|value }}", row=row) for row in using]
    remedied = []
    for row in using:
        if row.model in planted.remedied:
            name, accuracy = planted.remedied[row.model]
            remedied.append(
                say("**{{ name }}** {{ accuracy|percent(1) }}", name=name, accuracy=accuracy)
            )
    return say(
        "**Known answer.** A cause was planted in these data: {{ planted|whole }}. "
        "{% if right|length == using|length %}This report recovered it{% elif right %}This "
        "report recovered it for {{ right|length }} of {{ using|length }} models{% else %}This "
        "report did not recover it{% endif %}, from pixels, masks and predictions only. Where it "
        "leads to the label, test accuracy is {{ with_cause }}; elsewhere "
        "{{ elsewhere }}.{% if remedied %} Trained without it: {{ remedied }}.{% endif %}",
        planted=planted.says,
        with_cause=listed(with_cause),
        elsewhere=listed(elsewhere),
        remedied=listed(remedied) if remedied else "",
        right=right,
        using=using,
    )
