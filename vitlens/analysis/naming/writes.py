"""What each head writes, in a word, and whether that class, or attribute of the images, suffers most without the head.

The word is the thing that the head's direct contribution tells best from the others (INVERT, Bykov 2023): a class, by
the area under the ROC curve of what the head adds to its logit, above the mean of the classes; or an attribute, by that
of the projection of its output on the difference of the means of the images with and without it, those of one half of
the images for the other half. It holds where the log-odds of the label fall more without the head in the images that
have the thing than in the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.ablation.bench import Outcomes
from vitlens.analysis.naming.words import CORRELATES, MATTERS, NOTHING
from vitlens.uncertainty import Estimate, by_group, holm, student_mean, welch

LEVEL: Final = 0.05  # of a test, after Holm's correction
FEWEST: Final = 5  # images with a thing, and without it
PERMUTATIONS: Final = 20  # of what is true of the images: the control
LEAST: Final = 0.1  # nats of log-odds: a head of which a thing loses less does not matter to it

Scores = Float[Tensor, "images heads things"]
Truth = Bool[Tensor, "images things"]
Table = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Writes:
    """What one head writes.

    word: the thing, None where none is told better than by chance; auc: of the best thing, with DeLong's interval;
    control: the largest AUC of a head with as many things that are assigned to the images at random; state: one of
    words.STATES; lost, others_lost: points of accuracy that the images with and without the thing lose without the
    head; margin: by how much the log-odds of the label fall more in the former, nats; p: of that, after Holm's
    correction over heads; these four are None without a word. scores, falls, points (n,): of each image, what the head
    adds to the best thing, and what it loses without the head, nats of log-odds and points.
    """

    word: str | None
    best: str
    auc: Estimate
    control: float
    state: str
    scores: Tensor = field(repr=False)
    falls: Tensor = field(repr=False)
    points: Tensor = field(repr=False)
    lost: Estimate | None = None
    others_lost: Estimate | None = None
    margin: Estimate | None = None
    p: float | None = None


def areas(scores: Float[Tensor, "images *units"], truth: Bool[Tensor, " images"]) -> tuple[Table, Table]:
    """The area under the ROC curve of each unit and its variance (DeLong 1988), ties counting half: (units,) each."""
    from scipy.stats import rankdata

    values, held = scores.double().numpy(), truth.numpy()
    with_it, without = values[held], values[~held]
    ranks = rankdata(values, axis=0)
    above = (ranks[held] - rankdata(with_it, axis=0)) / len(without)  # the share of the others that each is above
    below = (ranks[~held] - rankdata(without, axis=0)) / len(with_it)  # of those with it that are below each other
    area = above.mean(0)
    return area, above.var(0, ddof=1) / len(with_it) + below.var(0, ddof=1) / len(without)


def of_halves(outputs: Float[Tensor, "images heads width"], truth: Truth, half: Bool[Tensor, " images"]) -> Scores:
    """The projection of every output on the difference of means of the other half, centred in its own half."""
    found = outputs.new_zeros(*outputs.shape[:2], truth.shape[1])
    for own in (half, ~half):
        other = outputs[~own]
        for thing in range(truth.shape[1]):
            has = truth[~own, thing]
            direction = other[has].mean(0) - other[~has].mean(0)
            found[own, :, thing] = ((outputs[own] - outputs[own].mean(0)) * direction).sum(-1)
    return found


def tell(scores: Scores, truth: Truth) -> tuple[Table, Table]:
    """The AUC (heads, things) of every head for every thing, and its variance."""
    each = [areas(scores[..., thing], truth[:, thing]) for thing in range(truth.shape[1])]
    return np.stack([area for area, _ in each], -1), np.stack([variance for _, variance in each], -1)


def at_random(scores: Scores, truth: Truth, *, seed: int, draws: int = PERMUTATIONS) -> float:
    """The largest AUC of any head for any thing when what is true of the images is permuted, over draws."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(truth), generator=generator) for _ in range(draws)]
    return max(float(tell(scores, truth[order])[0].max()) for order in orders)


def writes(
    scores: Scores, truth: Truth, things: Sequence[str], outcomes: Outcomes, *, control: float,
    groups: Tensor | None = None,
) -> list[Writes]:  # fmt: skip
    """The word for every head; outcomes: without each of the same heads, in their order; control: see at_random;
    groups (n,): of images that share a source, whose means the test and the intervals are of."""
    from scipy import stats

    area, variance = tell(scores, truth)
    n, with_it = len(truth), truth.sum(0).numpy()
    spread = np.sqrt((n + 1) / (12 * with_it * (n - with_it)))  # of an AUC where the thing makes no difference
    chance = np.asarray(holm(stats.norm.sf((area - 0.5) / spread).ravel().tolist())).reshape(area.shape)
    best = area.argmax(1)
    heads = np.arange(len(area))
    named = chance[heads, best] <= LEVEL
    falls, points = log_odds(outcomes.clean_loss) - log_odds(outcomes.loss), outcomes.delta_accuracy
    margins: dict[int, tuple[Estimate, float]] = {}
    for head in heads[named].tolist():
        held = truth[:, best[head]]
        gap, p = welch(*(_means(falls[head][rows], groups, rows) for rows in (held, ~held)), unit="nats")
        margins[head] = gap, p / 2 if gap.value > 0 else 1 - p / 2  # one-sided
    adjusted = dict(zip(margins, holm([p for _, p in margins.values()]) if margins else ()))
    found = []
    for head in heads.tolist():
        thing, half = things[best[head]], 1.96 * float(np.sqrt(variance[head, best[head]]))
        value = float(area[head, best[head]])
        auc = Estimate(value, max(0.0, value - half), min(1.0, value + half), n, "")
        each = (scores[:, head, best[head]], falls[head], points[head])
        if head not in margins:
            found.append(Writes(None, thing, auc, control, NOTHING, *each))
            continue
        has = truth[:, best[head]]
        lost, others = (
            student_mean(points[head][rows], groups=None if groups is None else groups[rows], unit="points")
            for rows in (has, ~has)
        )
        margin, p = margins[head][0], adjusted[head]
        state = MATTERS if p <= LEVEL and margin.value >= LEAST else CORRELATES
        found.append(Writes(thing, thing, auc, control, state, *each, lost, others, margin, p))
    return found


def log_odds(loss: Float[Tensor, "*images"]) -> Float[Tensor, "*images"]:
    """The log-odds of the label's probability, from the cross-entropy: where a model is certain, a head that matters
    changes these, and hardly its loss. Bounded where rounding leaves nothing of the loss."""
    return -loss.double().clamp(1e-9, 700).expm1().log()


def _means(values: Tensor, groups: Tensor | None, rows: Tensor) -> Table:
    sums, counts = by_group(values.numpy(), None if groups is None else groups[rows])
    return sums / counts


def things_of(
    labels: Int[Tensor, " images"], classes: Sequence[str], attributes: Mapping[str, Tensor]
) -> tuple[list[int], list[str]]:
    """The classes, by number, and the attributes of which there are FEWEST images with and without."""
    count, n = torch.bincount(labels, minlength=len(classes)), len(labels)
    numbers = [number for number, each in enumerate(count.tolist()) if FEWEST <= each <= n - FEWEST]
    names = [name for name, held in attributes.items() if FEWEST <= int(held.sum()) <= n - FEWEST]
    return numbers, names
