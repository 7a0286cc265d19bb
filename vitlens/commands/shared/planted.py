"""Judge a report by the generating factors of drawn images, which no analysis reads.

Training data with a planted cause, and the factor by which test images show it, are in PLANTED.
`factor_rows` measures which models use a cause, and `judgement` says if the report names it.
"""

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

    says: how it was planted.
    cues: the cues by which an analysis may name it.
    remedied: for each bundled model that was trained on these data, the name of the same
        architecture trained without the cause, and its accuracy on the 1,800 test scenes.
    """

    says: str
    cues: tuple[str, ...]
    remedied: Mapping[str, tuple[str, float]]


# by factor: a factor is True for the test images in which the cause would lead to the label
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
    """Return the bundled model like this one that was trained without the planted cause.

    Returns "" for a model that was not trained with one.
    """
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

    factors: by name, (n,), the value of each image.
    correct: by model, (n,), True for images that it classifies correctly.
    groups: (n,), the source of each image, None if no images share one.
    """
    for factor in PLANTED:
        if factor not in factors:
            continue
        holds = np.asarray(factors[factor], dtype=bool)
        if holds.all() or not holds.any():
            continue
        for model, is_correct in correct.items():
            accuracy_true = _accuracy_on(holds, is_correct, groups)
            accuracy_false = _accuracy_on(~holds, is_correct, groups)
            yield FactorRow(
                model=model,
                factor=factor,
                accuracy_true=accuracy_true,
                accuracy_false=accuracy_false,
                difference=difference_of(accuracy_true, accuracy_false),
            )


def _accuracy_on(
    selected: NDArray[np.bool_], is_correct: NDArray[np.bool_], groups: NDArray[np.integer] | None
) -> Estimate:
    """Return the accuracy on the selected images. All arguments are (n,)."""
    selected_groups = None if groups is None else groups[selected]
    return share_of(is_correct[selected], groups=selected_groups)


def judgement(
    rows: Sequence[FactorRow], cues_by_model: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield, for each planted cause, whether a report recovered it.

    cues_by_model: by model, the cues that the report names as misleading.
    """
    for factor, planted in PLANTED.items():
        rows_of_factor = [row for row in rows if row.factor == factor]
        using = [row for row in rows_of_factor if row.is_used]
        rightly_named = []  # models that use the cause, and of which the report names it
        wrongly_named = []  # models that do not use it, and of which the report names it
        for row in rows_of_factor:
            named_cues = set(cues_by_model.get(row.model, ()))
            if named_cues.isdisjoint(planted.cues):
                continue
            if row.is_used:
                rightly_named.append(row)
            else:
                wrongly_named.append(row)
        if using:
            yield _recovery_words(planted, using, rightly_named)
        elif rows_of_factor and not wrongly_named:
            yield say(
                "**Known answer.** {{ models }} {{ do }} not use the cause that can be planted "
                "in these data ({{ planted|whole }}), and this report does not name it.",
                planted=planted.says,
                models=_models_in_bold(rows_of_factor),
                do=_do(rows_of_factor),
            )
        if wrongly_named:
            yield say(
                "This report is wrong: it names a cause that, by the generating factors, "
                "{{ models }} {{ do }} not use.",
                models=_models_in_bold(wrongly_named),
                do=_do(wrongly_named),
            )


def _models_in_bold(rows: Sequence[FactorRow]) -> str:
    return listed([say("**{{ row.model }}**", row=row) for row in rows])


def _do(rows: Sequence[FactorRow]) -> str:
    return "does" if len(rows) == 1 else "do"


def _recovery_words(
    planted: Planted, using: Sequence[FactorRow], named: Sequence[FactorRow]
) -> str:
    """Return whether the report recovered a cause.

    using: the models that use the cause.
    named: those of them of which the report names it.
    """
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
        "{% if named|length == using|length %}This report recovered it{% elif named %}This "
        "report recovered it for {{ named|length }} of {{ using|length }} models{% else %}This "
        "report did not recover it{% endif %}, from pixels, masks and predictions only. Where it "
        "leads to the label, test accuracy is {{ with_cause }}; elsewhere "
        "{{ elsewhere }}.{% if remedied %} Trained without it: {{ remedied }}.{% endif %}",
        planted=planted.says,
        with_cause=listed(with_cause),
        elsewhere=listed(elsewhere),
        remedied=listed(remedied) if remedied else "",
        named=named,
        using=using,
    )
