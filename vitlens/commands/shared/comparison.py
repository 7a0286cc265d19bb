"""Models on the same images: one row a pair, one claim on which is better, one judgement, one
table; free of torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.shared.calibration import FEW
from vitlens.record import col
from vitlens.report.claims import FEWEST, SMALLEST, Claim, found, unjudged
from vitlens.report.prose import listed, say
from vitlens.report.sections import Section
from vitlens.report.verdicts import LIMITS, Verdict
from vitlens.uncertainty import LEVEL, Estimate, accuracy_difference, holm, paired_test

UNDECIDED: Final = "undecided"


@dataclass(frozen=True)
class PairRow:
    """Two models on the same images: how many images both, only one, or none predicts correctly.

    p: the p-value of `paired_test`.
    p_holm: corrected for the number of tests.
    difference: the difference of their accuracy, None where a command records it elsewhere.
    better: the model that is significantly better by at least SMALLEST points, or UNDECIDED; always
        UNDECIDED for fewer than FEW images.
    """

    first: str = col("first")
    second: str = col("second")
    both_right: int = col("both correct")
    only_first_right: int = col("only the first correct")
    only_second_right: int = col("only the second correct")
    both_wrong: int = col("both wrong")
    p: float = col("p", metric="mcnemar_p/{first}/{second}")
    p_holm: float = col("p (Holm)")
    difference: Estimate | None = col(
        "first minus second", metric="accuracy_difference/{first}/{second}", default=None
    )
    better: str = col("better", default=UNDECIDED)

    @property
    def decided(self) -> bool:
        """Return True if one of the two is better."""
        return self.better != UNDECIDED

    def gain(self, of: str) -> Estimate:
        """Return the difference as one of the two models minus the other."""
        difference = self.difference
        if difference is None:  # recorded elsewhere
            difference = Estimate(0.0, unit="points")
        return signed(difference, keep=of == self.first)


def signed(difference: Estimate, keep: bool) -> Estimate:
    """Return a difference if `keep`, else its negative."""
    if keep:
        return difference
    # the negative of the upper end is the lower end
    low = None if difference.high is None else -difference.high
    high = None if difference.low is None else -difference.low
    return replace(difference, value=-difference.value, low=low, high=high)


def comparison_rows(
    correct: Sequence[tuple[str, str, NDArray[np.bool_], NDArray[np.bool_]]],
    *,
    groups: NDArray[Any] | None = None,
    seed: int = 0,
) -> list[PairRow]:
    """Return the rows of comparisons whose p-values are corrected together.

    correct: for each comparison, the first model, the second model, and (n,) for each of the two,
        True for images that it classifies correctly.
    """
    p_values = []
    for _, _, first_correct, second_correct in correct:
        p_values.append(paired_test(first_correct, second_correct, groups=groups))
    rows = []
    for comparison, p, p_holm in zip(correct, p_values, holm(p_values)):
        first, second, first_correct, second_correct = comparison
        gain = accuracy_difference(first_correct, second_correct, groups=groups, seed=seed)
        has_enough_images = len(first_correct) >= FEW
        better = UNDECIDED
        if has_enough_images and p_holm <= LEVEL and abs(gain.value) >= SMALLEST:
            better = first if gain.value > 0 else second
        row = PairRow(
            first=first,
            second=second,
            both_right=int((first_correct & second_correct).sum()),
            only_first_right=int((first_correct & ~second_correct).sum()),
            only_second_right=int((second_correct & ~first_correct).sum()),
            both_wrong=int((~first_correct & ~second_correct).sum()),
            p=p,
            p_holm=p_holm,
            difference=gain,
            better=better,
        )
        rows.append(row)
    return rows


def in_pairs(
    correct: Mapping[str, NDArray[np.bool_]], *, groups: NDArray[Any] | None = None, seed: int = 0
) -> tuple[PairRow, ...]:
    """Return the rows of all pairs of models, in their order."""
    pairs = [
        (first, second, correct[first], correct[second])
        for first, second in combinations(correct, 2)
    ]
    return tuple(comparison_rows(pairs, groups=groups, seed=seed))


def which_is_better(accuracies: Mapping[str, Estimate], rows: Sequence[PairRow]) -> Iterator[Claim]:
    """Yield the models that the one with the highest accuracy exceeds, then those it does not."""
    top = max(accuracies, key=lambda name: accuracies[name].value)
    pairs: dict[str, PairRow] = {}  # the comparison of `top` with each other model
    for row in rows:
        if row.first == top:
            pairs[row.second] = row
        elif row.second == top:
            pairs[row.first] = row
    alike = [other for other, row in pairs.items() if not row.decided]
    title = ""
    if not alike and len(pairs) > 1:
        title = say(
            "{{ top }} classifies more images correctly than the {{ n }} other models",
            top=top,
            n=len(pairs),
        )
    for other, row in pairs.items():
        if not row.decided:
            continue
        if len(pairs) == 1:
            title = say(
                "{{ top }} classifies more images correctly than {{ other }}", top=top, other=other
            )
        claim = _better_claim(accuracies, top, other, row)
        yield replace(claim, title=title)
    if alike:
        yield _no_lead_claim(accuracies, top, alike, pairs)


def _better_claim(accuracies: Mapping[str, Estimate], top: str, other: str, row: PairRow) -> Claim:
    """Return the claim that a model is better than another one."""
    values = {
        "top": top,
        "other": other,
        "accuracy": accuracies[top],
        "other_accuracy": accuracies[other],
        "row": row,
    }
    return Claim(
        "which is better",
        f"{top} and {other}",
        say(
            "**{{ top }}** classifies {{ accuracy|value }} of the images correctly, "
            "**{{ other }}** {{ other_accuracy|value }}. The difference is {{ size }} "
            "(McNemar's exact test, {% if row.p_holm < 0.001 %}p < 0.001{% else %}p = "
            "{{ row.p_holm|number }}{% endif %}).",
            size=row.gain(top),
            **values,
        ),
        brief=say(
            "By accuracy, **{{ top }}**: it classifies {{ accuracy|value }} of "
            "{{ accuracy.n }} images correctly, **{{ other }}** "
            "{{ other_accuracy|value }}. Chance alone would give such a "
            "difference in {{ row.p_holm|frequency }} tests.",
            **values,
        ),
        effect=row.gain(top),
        p=row.p_holm,
        kind="answer",
        better=top,
    )


def _no_lead_claim(
    accuracies: Mapping[str, Estimate],
    top: str,
    alike: Sequence[str],
    pairs: Mapping[str, PairRow],
) -> Claim:
    """Return the claim that the best model has no significant lead over some others.

    alike: these models.
    pairs: the comparison of the best model with each other model.
    """
    row = pairs[alike[0]]
    is_only_pair = len(pairs) == 1
    return Claim(
        "no difference",
        top,
        say(
            "**{{ top }}** has the highest accuracy, {{ accuracy|alone }}, but no "
            "significant lead over {{ alike|names }}{% if is_only_pair %}: "
            "{{ size|alone }}, p = {{ row.p_holm|number }}{{ size|borderline(row.p_holm) }}"
            "{% endif %}.",
            top=top,
            accuracy=accuracies[top],
            alike=alike,
            is_only_pair=is_only_pair,
            size=row.gain(top),
            row=row,
        ),
        brief=_no_difference_words(accuracies, top, row) if is_only_pair else "",
        title=say(
            "{{ top }} has no significant lead over {{ alike[:2]|join(' or ') }} in accuracy",
            top=top,
            alike=alike,
        ),
        kind="answer",
        is_null=True,
    )


def _no_difference_words(accuracies: Mapping[str, Estimate], top: str, row: PairRow) -> str:
    """Return that neither of two models is shown to be better, in short."""
    other = row.second if row.first == top else row.first
    values = {
        "top": top,
        "other": other,
        "accuracy": accuracies[top],
        "other_accuracy": accuracies[other],
        "row": row,
    }
    if accuracies[top].value == accuracies[other].value:
        return say(
            "Neither: both classify {{ accuracy|value }} of {{ accuracy.n }} images correctly.",
            **values,
        )
    return say(
        "Neither is shown to be: **{{ top }}** classifies {{ accuracy|value }} of "
        "{{ accuracy.n }} images correctly, **{{ other }}** {{ other_accuracy|value }}. Chance "
        "may explain this: equally good models would differ so much in "
        "{{ row.p_holm|frequency }} tests.",
        **values,
    )


def accuracy_claims(accuracies: Mapping[str, Estimate], rows: Sequence[PairRow]) -> Iterator[Claim]:
    """Yield the judgement of each model's accuracy compared with that of the best model.

    The subject of each claim is the two models.
    """
    top = max(accuracies, key=lambda name: accuracies[name].value)
    if (accuracies[top].n or 0) < FEW:
        because = say("ranking models takes at least {{ few }} images; raise --limit", few=FEW)
        yield unjudged("accuracy", " and ".join(accuracies), because, limit="accuracy")
        return
    for row in rows:
        if top not in (row.first, row.second):
            continue
        other = row.second if row.first == top else row.first
        gain = row.gain(other)
        state = LIMITS["accuracy"].judge_difference(gain)
        if state in ("warn", "fail") and not row.decided:
            state = "inconclusive"
        because = say(
            "{{ other }} {% if gain.value < 0 %}is {{ behind|value }} behind{% else %}is level "
            "with{% endif %} {{ top }}{% if not decided %}, not significant{% endif %}",
            other=other,
            top=top,
            gain=gain,
            behind=row.gain(top),
            decided=row.p_holm <= LEVEL,
        )
        verdict = Verdict(state, because, "accuracy")
        yield Claim(
            "accuracy", f"{row.first} and {row.second}", verdict=verdict, effect=gain, p=row.p_holm
        )


def accuracy_effects(rows: Sequence[PairRow]) -> Iterator[Claim]:
    """Yield the difference in accuracy of each pair of models, with an uncorrected p-value."""
    for row in rows:
        if row.difference is None:
            continue
        ahead, behind = row.first, row.second
        if row.difference.value < 0:
            ahead, behind = row.second, row.first
        yield found(
            "which is better",
            f"{row.first} and {row.second}",
            "**{{ ahead }}** classifies {{ effect|alone }} more images correctly than "
            "**{{ behind }}**.",
            row.gain(ahead),
            given={"ahead": ahead, "behind": behind},
            headline="{{ ahead }} classifies more images correctly than {{ behind }}",
            p=row.p,
            kind="comparison",
        )


def too_few_images(scores: Sequence[Any], images: int, purpose: str) -> Iterator[str]:
    """Yield a note that there are too few images for a purpose, with each model's accuracy.

    purpose: what the images are too few for, "to compare models"; nothing is yielded for enough.
    """
    if images >= FEW:
        return
    accuracies = [say("{{ s.model }} {{ s.accuracy|alone }}", s=score) for score in scores]
    yield say(
        "{{ n }} image{{ n|s }} {{ n|are }} too few {{ purpose|whole }}: {{ accuracies }}.",
        n=images,
        purpose=purpose,
        accuracies=listed(accuracies),
    )


def not_equal(rows: Sequence[PairRow]) -> Iterator[str]:
    """Yield a note that no significant difference is no evidence of equality.

    It is about the first pair of which this can be said.
    """
    undecided = [row for row in rows if _may_be_read_as_equal(row)]
    for row in undecided[:1]:
        yield say(
            "That {{ row.first }} and {{ row.second }} do not differ significantly is "
            "no evidence that they are equal: the difference may be up to "
            "{{ largest|number(1) }} points.",
            row=row,
            largest=_largest_difference(row),
        )


def _may_be_read_as_equal(row: PairRow) -> bool:
    differing_images = row.only_first_right + row.only_second_right
    has_interval = row.gain(row.first).low is not None
    return row.p_holm > LEVEL and differing_images > 0 and has_interval


def _largest_difference(row: PairRow) -> float:
    """Return the end of a difference's interval that is farther from 0, in points."""
    gap = row.gain(row.first)
    return max(abs(end) for end in (gap.low, gap.high) if end is not None)


def _counts_in_words(row: PairRow) -> str:
    words = (
        "Only {{ first }} is correct on {{ only_first_right }} image{{ only_first_right|s }}, "
        "only {{ second }} on {{ only_second_right }}, both on {{ both_right }}."
    )
    if row.p_holm <= LEVEL and abs(row.gain(row.first).value) < SMALLEST:
        words += " This difference is significant, but too small to matter."
    return words


SECTION: Final = Section(
    "Which model is correct on which images?",
    lambda record: record.pairs if record.images >= FEWEST else (),
    says=_counts_in_words,
    about=("accuracy",),
    columns=("first", "second", "difference", "p_holm", "better"),
)
