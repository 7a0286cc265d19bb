"""Which images two models classify correctly: the models of an evaluation, two at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from vitlens.analysis.answers.evaluate import Evaluation
from vitlens.errors import InputError
from vitlens.uncertainty import holm, mcnemar


@dataclass(frozen=True)
class Pair:
    """Two models on the same images: how many both, one alone, or none gets right.

    p: McNemar's exact test that they are right equally often; p_holm: corrected for the number of pairs.
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
    """Every pair of models, in the order given. Raises InputError unless all answered images with the same labels."""
    if any(not evaluations[0].labels.equal(other.labels) for other in evaluations[1:]):
        raise InputError("expected models that answered the same images, found other labels")
    found = []
    for first, second in combinations(evaluations, 2):
        one, two = first.correct, second.correct
        only_first, only_second = int((one & ~two).sum()), int((~one & two).sum())
        counts = int((one & two).sum()), only_first, only_second, int((~one & ~two).sum())
        found.append((first.alias, second.alias, counts, mcnemar(only_first, only_second)))
    adjusted = holm([p for *_, p in found])
    return tuple(Pair(first, second, *counts, p, q) for (first, second, counts, p), q in zip(found, adjusted))
