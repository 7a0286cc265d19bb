"""What could overturn the findings of this attack, the most serious first; at most five."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from vitlens.analysis.robustness.verdict import CheckState
from vitlens.commands.attack.comparable import strongest
from vitlens.commands.attack.epsilons import epsilon_words
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import ATTACKED, CHECKS, CURVES, TRANSFER
from vitlens.records import Record
from vitlens.report.document import Sentence
from vitlens.report.numbers import in_words

_MOST: Final = 5
_DOWNWARDS: Final = (
    "Attacks within an epsilon were tried at the largest epsilon first, then at smaller ones down to the first at "
    "which an image was still classified correctly; smaller epsilons were not tried for that image and count as "
    'survived. The self-check "from below" tries some of them.'
)
_PIXELS: Final = (
    "Adversarial pixels are floating-point values: saved with 8 bits, each changes by up to half of 1/255, which at "
    "the smallest epsilons undoes a part of the attack."
)


def limits(record: Record) -> Iterator[Sentence]:
    """At most five."""
    return islice(_limits(record), _MOST)


def _limits(record: Record) -> Iterator[Sentence]:
    yield from _inconclusive(record)
    yield from _bounds(record)
    if record.options(AttackOptions).downwards:
        yield Sentence(_DOWNWARDS, says="setting")
    yield from _transfers(record)
    yield Sentence(_PIXELS, says="setting")
    for row in record.rows(CURVES)[:1]:
        yield Sentence(
            f"{row.n:,} images were attacked, with one set of weights of each model: another training of the same "
            "architecture may be more or less robust.",
            (row,),
        )


def _inconclusive(record: Record) -> Iterator[Sentence]:
    """Self-checks that failed or could not have failed."""
    rows = record.rows(CHECKS)
    failed = [row for row in rows if row.check.state is CheckState.FAILED]
    open_ = [row for row in rows if row.check.state is CheckState.INCONCLUSIVE]
    if failed:
        yield Sentence(
            f"{len(failed)} of the {len(rows)} self-checks failed: accuracies under attack are higher than a sound "
            "attack would find, and models compared by them may change places.",
            rows,
        )
    elif open_:
        yield Sentence(
            f"{len(open_)} of the {len(rows)} self-checks could not have failed, as nothing was fooled in them: they "
            "are no evidence that the attacks are sound.",
            rows,
        )


def _bounds(record: Record) -> Iterator[Sentence]:
    """The strongest attack on the model that keeps most at the smallest L∞ epsilon is only an upper bound."""
    rows = [row for row in record.rows(CURVES) if row.norm == "linf" and row.epsilon > 0 and row.accuracy > 0]
    if not rows:
        return
    least = min(row.epsilon for row in rows)
    per_model = {row.model: strongest([each for each in rows if (each.model, each.epsilon) == (row.model, least)])
                 for row in rows}  # fmt: skip
    row = max((each for each in per_model.values() if each is not None), key=lambda each: each.accuracy)
    how = next(each for each in record.rows(ATTACKED) if (each.model, each.attack) == (row.model, row.attack))
    starts = "1 start" if how.restarts == 1 else f"{how.restarts} starts"
    yield Sentence(
        f"The {in_words(row.estimate, with_n=False)} that {row.model} keeps at {epsilon_words(row.epsilon, row.norm)} "
        f"is an upper bound, found by {row.title} with {how.steps} steps and {starts}: a stronger attack may lower it.",
        (row, how),
    )


def _transfers(record: Record) -> Iterator[Sentence]:
    """That transfer was measured with an attack that was not made for it."""
    rows = [row for row in record.rows(TRANSFER) if row.made_for != row.shown_to and row.estimate is not None]
    if rows:
        row = max(rows, key=lambda row: row.rate or 0.0)
        yield Sentence(
            f"The transfer from {row.made_for} to {row.shown_to}, {in_words(row.estimate)}, is that of an attack that "
            "stops at its first success; one designed for transfer may fool more.",
            (row,),
        )
