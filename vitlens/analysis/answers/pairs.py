"""Paired tests of the models of an evaluation: which images each of two models classifies correctly."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from vitlens.analysis.answers.evaluate import Evaluation
from vitlens.errors import InputError
from vitlens.uncertainty import holm, mcnemar


@dataclass(frozen=True)
class Pair:
    """Two models on the same images: how many are classified correctly by both, by one only, or by neither.

    p: McNemar's exact test of equal accuracy; p_holm: corrected for the number of pairs.
    """

    first: str
    second: str
    both_right: int
    only_first_right: int
    only_second_right: int
    both_wrong: int
    p: float
    p_holm: float


def pairs(evaluations: Sequence[Evaluation]) -> tuple[Pair, ...]:
    """Every pair of models, in their order. Raises InputError unless all were evaluated on the same labels."""
    if any(not evaluations[0].labels.equal(other.labels) for other in evaluations[1:]):
        raise InputError("expected models evaluated on the same images, found different labels")
    counted = []
    for first, second in combinations(evaluations, 2):
        first_correct, second_correct = first.correct, second.correct
        only_first, only_second = (
            int((first_correct & ~second_correct).sum()),
            int((~first_correct & second_correct).sum()),
        )
        counts = (
            int((first_correct & second_correct).sum()),
            only_first,
            only_second,
            int((~first_correct & ~second_correct).sum()),
        )
        counted.append((first.alias, second.alias, counts, mcnemar(only_first, only_second)))
    adjusted = holm([p for *_, p in counted])
    return tuple(Pair(first, second, *counts, p, q) for (first, second, counts, p), q in zip(counted, adjusted))
