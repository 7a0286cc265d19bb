"""What each head writes: the classes or attributes that it separates best, tested by ablation.

Classes and attributes of the images are concepts in short. The score of a class is what the head
adds to its logit directly, above the mean over all classes of the model. That of an attribute is
the projection of the head's output on the difference of means of the images with and without it,
taken from the other half of the images. The area under the ROC curve (AUC) of the score measures
how well the head separates the images with the concept from all others (INVERT, Bykov 2023). The
label names the concept of the highest AUC, and those with AUCs that are not significantly lower;
more than MOST such concepts are no label. The label holds where, without the head, the log-odds of
the class label fall more in images with these concepts than in the others.

Images that share a source (a group) are not independent. Variances of AUCs sum over sources
(Obuchowski 1997), tests against chance use the mean score of each source, and a permutation moves
all images of a source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.ablation.bench import Outcomes
from vitlens.analysis.naming.rows import OfHead, WritesRow
from vitlens.analysis.naming.words import CORRELATES, MATTERS, NOTHING, SEVERAL, any_of
from vitlens.resampling import by_group
from vitlens.uncertainty import Estimate, holm, mean_points, welch, wilson

LEVEL: Final = 0.05  # of a test, after Holm's correction
FEWEST: Final = 5  # sources of images with a concept, and without it
# concepts in a label: a head that separates more of them equally well writes none in particular
MOST: Final = 3
PERMUTATIONS: Final = 20  # of the concepts of the images: the control
LEAST: Final = 0.1  # nats of log-odds: a head does not matter to a concept that loses less

Scores = Float[Tensor, "images heads concepts"]
Truth = Bool[Tensor, "images concepts"]  # True for images with the concept
Groups = Int[Tensor, " images"]
Falls = Float[Tensor, "heads images"]  # of log-odds without each head, nats
Table = NDArray[np.float64]
_NONE: Final[Mapping[int, Falls]] = MappingProxyType({})
Members = NDArray[np.bool_]  # (images,): True for images with one concept


@dataclass(frozen=True, eq=False, kw_only=True)
class Writes(WritesRow):
    """What one head writes, with the numbers of each image.

    scores, falls, points (n,): what the head adds to the best concept; what the image loses without
    the head, nats of log-odds; the same in points of accuracy.
    """

    scores: Tensor = field(repr=False)
    falls: Tensor = field(repr=False)
    points: Tensor = field(repr=False)


@dataclass(frozen=True, eq=False)
class Separation:
    """How well every head separates the images with each concept from the others.

    area (heads, concepts): the AUC; influences (sources, heads, concepts): the part of each source
    of images in its error, with the variance as the sum of squares; freedom (concepts,): degrees of
    freedom of the standard error; p (heads, concepts): of an AUC of at most 0.5, one-sided, before
    any correction.
    """

    area: Table
    influences: Table
    freedom: Table
    p: Table

    def interval(self, head: int, concept: int, images: int) -> Estimate:
        """Return an AUC with its 95 % interval, DeLong's on the logit scale.

        The logit scale keeps it within 0 and 1. Where all images are on the right side the variance
        is 0; the interval is then Wilson's, as if each source of the rarer side were one success.
        """
        from scipy import stats
        from scipy.special import expit, logit

        value = float(self.area[head, concept])
        error = float(np.linalg.norm(self.influences[:, head, concept]))
        sources = int(self.freedom[concept]) + 1
        if value in (0.0, 1.0):
            bounds = wilson(round(value) * sources, sources)
            return Estimate(value, bounds.low, bounds.high, images, "")
        half = float(stats.t.ppf(0.975, self.freedom[concept])) * error / (value * (1 - value))
        middle = float(logit(value))
        return Estimate(value, float(expit(middle - half)), float(expit(middle + half)), images, "")

    def p_lower(self, head: int, concept: int, best: int) -> float:
        """Return the p of equal AUCs of a head for two concepts (DeLong 1988, paired).

        Two-sided, as the best concept was chosen for its AUC; 1 where its AUC is not higher.
        """
        from scipy import stats

        gap = float(self.area[head, best] - self.area[head, concept])
        if gap <= 0:
            return 1.0
        influences = self.influences[:, head, best] - self.influences[:, head, concept]
        error = float(np.linalg.norm(influences))
        freedom = min(self.freedom[best], self.freedom[concept])
        return 2 * float(stats.t.sf(gap / max(error, np.finfo(float).tiny), freedom))

    def alike(self, head: int, is_clear: NDArray[np.bool_]) -> list[int]:
        """Return a head's best clear concept, and the concepts that it separates as well.

        The AUCs of the latter are not significantly lower. is_clear (concepts,): True where the AUC
        is above chance after correction. The others are compared where they are above chance before
        it, so that a concept of few images, which no test excludes, does not join every label.
        """
        order = np.argsort(-self.area[head], kind="stable").tolist()
        clear = [concept for concept in order if is_clear[concept]]
        if not clear:
            return []
        best = clear[0]
        concepts = [best]
        for rival in order:
            is_above_chance = self.p[head, rival] <= LEVEL
            if rival != best and is_above_chance and self.p_lower(head, rival, best) > LEVEL:
                concepts.append(rival)
        return concepts


def separation(scores: Scores, truth: Truth, groups: Groups | None) -> Separation:
    """Return how well heads separate the images with each concept from the others.

    groups: the source of each image.
    """
    areas = []
    influences = []
    freedom = []
    p_values = []
    for concept in range(truth.shape[1]):
        values = scores[..., concept].double().numpy()
        has = truth[:, concept].numpy()
        sources_with = source_count(truth[:, concept], groups)
        sources_without = source_count(~truth[:, concept], groups)
        area, above, below = placements(values, has)
        influence = np.empty_like(values)
        influence[has] = (above - area) / len(above) * _sample_factor(sources_with)
        influence[~has] = (below - area) / len(below) * _sample_factor(sources_without)
        areas.append(area)
        influences.append(by_group(influence, groups)[0])
        freedom.append(min(sources_with, sources_without) - 1)
        p_values.append(_p_of_chance(values, has, groups))
    return Separation(
        area=np.stack(areas, -1),
        influences=np.stack(influences, -1),
        freedom=np.asarray(freedom),
        p=np.stack(p_values, -1),
    )


def _sample_factor(count: int) -> float:
    """Return the factor from deviations of a mean to those of an unbiased variance (Bessel)."""
    return float(np.sqrt(count / (count - 1)))


def placements(values: Table, has: Members) -> tuple[Table, Table, Table]:
    """Return the AUC of each column of values (images, heads), and DeLong's placements.

    The placements are of the images on both sides. The placement of an image with the concept is
    the share of the others that it is above; of one without, the share of those with the concept
    that are above it. Ties count half.
    """
    from scipy.stats import rankdata

    values_with = values[has]
    values_without = values[~has]
    ranks = rankdata(values, axis=0)
    above = (ranks[has] - rankdata(values_with, axis=0)) / len(values_without)
    below = 1 - (ranks[~has] - rankdata(values_without, axis=0)) / len(values_with)
    return above.mean(0), above, below


def _p_of_chance(values: Table, has: Members, groups: Groups | None) -> Table:
    """Return the one-sided p of an AUC of at most 0.5, by Mann and Whitney's test.

    It compares the mean scores of sources.
    """
    from scipy import stats

    if groups is not None:
        # a source may have images on both sides
        parts = 2 * _source_numbers(len(values), groups) + has
        sums, counts = by_group(values, parts)
        values = sums / counts[:, None]
        has = np.unique(parts) % 2 == 1
    count = len(has)
    count_with = int(has.sum())
    spread = np.sqrt((count + 1) / (12 * count_with * (count - count_with)))
    area, _, _ = placements(values, has)
    p: Table = stats.norm.sf((area - 0.5) / spread)
    return p


def of_halves(
    outputs: Float[Tensor, "images heads width"], truth: Truth, groups: Groups | None
) -> Scores:
    """Return the projection of every output on a difference of means.

    The means are over the images of the other half with the concept, and without it. Outputs are
    centred in their half.
    """
    scores = outputs.new_zeros(*outputs.shape[:2], truth.shape[1])
    for concept in range(truth.shape[1]):
        has = truth[:, concept]
        first_half = balanced_half(has, groups)
        for half in (first_half, ~first_half):
            other_outputs = outputs[~half]
            other_has = has[~half]
            direction = other_outputs[other_has].mean(0) - other_outputs[~other_has].mean(0)
            centred = outputs[half] - outputs[half].mean(0)
            scores[half, :, concept] = (centred * direction).sum(-1)
    return scores


def balanced_half(has: Bool[Tensor, " images"], groups: Groups | None) -> Bool[Tensor, " images"]:
    """Return the images of every other source, ordered by the share of images with the concept.

    Of a concept with FEWEST sources on either side both halves then have images with it and without
    it.
    """
    sources = _source_numbers(len(has), groups)
    sums, counts = by_group(has.double().numpy(), sources)
    order = np.argsort(-sums / counts, kind="stable")
    is_chosen = np.zeros(len(order), dtype=bool)
    is_chosen[order[::2]] = True
    return torch.from_numpy(is_chosen[sources])


def at_random(
    scores: Scores, truth: Truth, groups: Groups | None, *, seed: int, draws: int = PERMUTATIONS
) -> float:
    """Return the largest AUC of any head for any concept when the concepts of sources are permuted.

    It is the largest over all draws.
    """
    from scipy.stats import rankdata

    generator = np.random.default_rng(seed)
    sources = _source_numbers(len(truth), groups)
    ranks = rankdata(scores.double().numpy(), axis=0)
    largest = 0.5
    for _ in range(draws):
        order = generator.permutation(len(truth))
        numbers, places = np.unique(sources[order], return_index=True)
        image_of_source = order[places]
        permuted = generator.permutation(len(numbers))
        has = truth.numpy()[image_of_source[permuted[sources]]]
        with_concept = has.sum(0)
        without = len(has) - with_concept
        is_used = (with_concept > 0) & (without > 0)
        rank_sums = np.einsum("nt,nht->ht", has, ranks)[:, is_used]
        smallest_sums = (with_concept * (with_concept + 1) / 2)[is_used]
        area = (rank_sums - smallest_sums) / (with_concept * without)[is_used]
        largest = max(largest, float(area.max(initial=0)))
    return largest


def balanced_means(scores: Scores, truth: Truth) -> Float[Tensor, "heads concepts"]:
    """Return the mean score of every head for each concept, half the weight on images with it."""
    exact = scores.double()
    has = truth.double()
    mean_with = torch.einsum("nht,nt->ht", exact, has) / has.sum(0)
    mean_without = torch.einsum("nht,nt->ht", exact, 1 - has) / (1 - has).sum(0)
    return (mean_with + mean_without) / 2


def without_opposites(
    concepts: Sequence[int], truth: Truth, pushes: Float[Tensor, " concepts"]
) -> list[int]:
    """Return a head's concepts without those that are the negation of another one.

    Two such concepts are one contrast: of two classes the AUCs are equal. The one that the head
    pushes up more stays, by `balanced_means`.
    """
    remaining: list[int] = []
    for concept in sorted(concepts, key=lambda concept: -float(pushes[concept])):
        is_negation = [bool((truth[:, concept] != truth[:, other]).all()) for other in remaining]
        if not any(is_negation):
            remaining.append(concept)
    return [concept for concept in concepts if concept in remaining]


def writes(
    heads: Sequence[OfHead],
    scores: Scores,
    truth: Truth,
    concepts: Sequence[str],
    outcomes: Outcomes,
    *,
    control: float,
    groups: Groups | None = None,
    pointed: Mapping[int, Falls] = _NONE,
) -> list[Writes]:
    """Return what every head writes.

    outcomes: without each of the heads, in their order; control: see at_random; groups (n,): of
    images that share a source, which count as one in every test and interval; pointed: for concepts
    that point to a class, which need not be the label, the fall of that class's log-odds, by the
    number of the concept.
    """
    separated = separation(scores, truth, groups)
    alike = _best_concepts(separated, scores, truth)
    falls = [_falls(head, alike[head], truth, outcomes, pointed) for head in range(len(heads))]
    losses = _losses(alike, truth, falls, outcomes.delta_accuracy, groups)
    p_values = [loss.p for loss in losses.values()]
    p_holm = dict(zip(losses, holm(p_values) if p_values else ()))
    results = []
    for index, head in enumerate(heads):
        concept_numbers = alike[index]
        best = int(separated.area[index].argmax())
        if concept_numbers:
            best = concept_numbers[0]
        names = tuple(concepts[number] for number in concept_numbers)
        result = Writes(
            model=head.model,
            layer=head.layer,
            head=head.head,
            word=None,
            best=concepts[best],
            auc=separated.interval(index, best, len(truth)),
            control=control,
            state=SEVERAL if names else NOTHING,
            alike=names,
            scores=scores[:, index, best],
            falls=falls[index],
            points=outcomes.delta_accuracy[index],
        )
        if index in losses:
            loss = losses[index]
            matters = p_holm[index] <= LEVEL and loss.margin.value >= LEAST
            result = replace(
                result,
                word=any_of(names),
                state=MATTERS if matters else CORRELATES,
                lost=loss.lost,
                others_lost=loss.others_lost,
                margin=loss.margin,
                p=p_holm[index],
            )
        results.append(result)
    return results


def _best_concepts(separated: Separation, scores: Scores, truth: Truth) -> list[list[int]]:
    """Return the concepts that each head separates best, none without an AUC above chance."""
    p_holm = np.reshape(holm(separated.p.ravel().tolist()), separated.p.shape)
    is_clear = p_holm <= LEVEL
    pushes = balanced_means(scores, truth)
    by_head = []
    for head in range(len(is_clear)):
        concepts = separated.alike(head, is_clear[head])
        by_head.append(without_opposites(concepts, truth, pushes[head]))
    return by_head


class _Loss(NamedTuple):
    """The losses without one head; see WritesRow. p: one-sided, before Holm's correction."""

    lost: Estimate
    others_lost: Estimate
    margin: Estimate
    p: float


def _falls(
    head: int,
    concepts: Sequence[int],
    truth: Truth,
    outcomes: Outcomes,
    pointed: Mapping[int, Falls],
) -> Float[Tensor, " images"]:
    """Return the fall of the log-odds of the label without a head.

    Where all its concepts point to classes, it is that of the class to which the concept of the
    image points, and of an image without any the mean over these classes.
    """
    if not concepts or not all(concept in pointed for concept in concepts):
        return outcomes.delta_log_odds[head]
    of_classes = torch.stack([pointed[concept][head] for concept in concepts], 1)
    has = truth[:, list(concepts)].double()
    weights = torch.where(has.sum(1, keepdim=True) > 0, has, 1.0)
    return (of_classes * weights).sum(1) / weights.sum(1)


def _losses(
    alike: Sequence[Sequence[int]],
    truth: Truth,
    falls: Sequence[Tensor],
    points: Tensor,
    groups: Groups | None,
) -> dict[int, _Loss]:
    """Return the losses of images with and without a head's concepts, by the index of the head.

    Heads with no concept or too many are left out, and concepts that too few sources lack.
    """
    losses = {}
    for head, concepts in enumerate(alike):
        has = truth[:, concepts].any(-1)
        if not 0 < len(concepts) <= MOST or source_count(~has, groups) < FEWEST:
            continue
        margin, two_sided = welch(
            means_by_source(falls[head], has, groups),
            means_by_source(falls[head], ~has, groups),
            unit="nats",
        )
        losses[head] = _Loss(
            lost=_mean_of(points[head], has, groups),
            others_lost=_mean_of(points[head], ~has, groups),
            margin=margin,
            p=two_sided / 2 if margin.value > 0 else 1 - two_sided / 2,
        )
    return losses


def _mean_of(points: Tensor, rows: Bool[Tensor, " images"], groups: Groups | None) -> Estimate:
    return mean_points(points[rows], groups=None if groups is None else groups[rows])


def means_by_source(values: Tensor, rows: Bool[Tensor, " images"], groups: Groups | None) -> Table:
    """Return the mean value of each source, over these images of it."""
    sums, counts = by_group(values[rows].numpy(), None if groups is None else groups[rows])
    return sums / counts


def _source_numbers(images: int, groups: Groups | None) -> NDArray[np.intp]:
    """Return the number of each image's source, from 0."""
    if groups is None:
        return np.arange(images)
    return np.unique(groups.cpu().numpy(), return_inverse=True)[1].ravel()


def source_count(rows: Bool[Tensor, " images"], groups: Groups | None) -> int:
    """Return the number of sources of these images."""
    return int(rows.sum()) if groups is None else len(groups[rows].unique())


class Concepts(NamedTuple):
    """The classes and attributes that are tested.

    classes: by number; attributes: by name; of each, FEWEST sources have an image with it, and
    FEWEST one without; rare: the other attributes.
    """

    classes: list[int]
    attributes: list[str]
    rare: list[str]


def tested_concepts(
    labels: Int[Tensor, " images"],
    classes: Sequence[str],
    attributes: Mapping[str, Tensor],
    groups: Groups | None,
) -> Concepts:
    """Return the classes and attributes that enough sources of images have, and lack."""
    numbers = []
    for number in labels.unique().tolist():
        if 0 <= number < len(classes) and _is_frequent(labels == number, groups):
            numbers.append(number)
    frequent: list[str] = []
    rare: list[str] = []
    for name, has in attributes.items():
        names = frequent if _is_frequent(has.bool(), groups) else rare
        names.append(name)
    return Concepts(numbers, frequent, rare)


def _is_frequent(has: Bool[Tensor, " images"], groups: Groups | None) -> bool:
    return min(source_count(has, groups), source_count(~has, groups)) >= FEWEST
