"""What each head writes: the classes or attributes that it separates best, tested by ablation.

"Concept" means a class or an attribute of the images. A head has a score for each concept:
- for a class, what the head adds directly to its logit, minus the mean over all classes;
- for an attribute, the projection of the head's output on a direction. The direction is the
  difference of the mean outputs with and without the attribute, in the other half of the images.

The area under the ROC curve (AUC) of the score measures how well the head separates the images with
the concept from all others (INVERT, Bykov 2023). The label names the concept of the highest AUC,
and those with AUCs that are not significantly lower. If there are more than MOST, the head gets no
label. The label holds if removing the head lowers the log-odds of the class label more in images
with these concepts than in the others.

Images that share a source (a group) are not independent. So variances of AUCs sum over sources
(Obuchowski 1997), and tests against chance use the mean score of each source. A permutation moves
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

from vitlens.analysis.ablation.outcomes import Outcomes
from vitlens.analysis.naming.rows import OfHead, WritesRow
from vitlens.analysis.naming.words import CORRELATES, MATTERS, NOTHING, SEVERAL, any_of
from vitlens.resampling import by_group
from vitlens.uncertainty import Estimate, holm, mean_points, welch, wilson

LEVEL: Final = 0.05  # significance level of a test, after Holm's correction
FEWEST: Final = 5  # a tested concept has at least so many sources of images, and as many lack it
# most concepts in a label: a head that separates more equally well writes none in particular
MOST: Final = 3
PERMUTATIONS: Final = 20  # random assignments of concepts to images, as the control
# nats of log-odds: if a concept's images lose less without a head, the head does not matter to it
LEAST: Final = 0.1

Scores = Float[Tensor, "images heads concepts"]
Truth = Bool[Tensor, "images concepts"]  # True for images with the concept
Groups = Int[Tensor, " images"]
Falls = Float[Tensor, "heads images"]  # of log-odds without each head, nats
Table = NDArray[np.float64]
_NONE: Final[Mapping[int, Falls]] = MappingProxyType({})  # no concept points to a class
Members = NDArray[np.bool_]  # (images,): True for images with one concept


@dataclass(frozen=True, eq=False, kw_only=True)
class Writes(WritesRow):
    """What one head writes, with the numbers of each image.

    scores (n,): the head's score for its best concept.
    falls (n,): the fall of the log-odds of the class label without the head, in nats.
    points (n,): the loss of accuracy without the head, in points.
    """

    scores: Tensor = field(repr=False)
    falls: Tensor = field(repr=False)
    points: Tensor = field(repr=False)


@dataclass(frozen=True, eq=False)
class Separation:
    """How well every head separates the images with each concept from the others.

    area (heads, concepts): the AUC.
    influences (sources, heads, concepts): how far each source of images moves the AUC. The sum of
        their squares over sources is DeLong's variance of the AUC.
    rarer_sources (concepts,): the number of sources of the rarer side: of the images with the
        concept, or of those without it.
    p (heads, concepts): one-sided p-value of an AUC of at most 0.5, before any correction.
    """

    area: Table
    influences: Table
    rarer_sources: NDArray[np.int64]
    p: Table

    @property
    def freedom(self) -> NDArray[np.int64]:
        """Return the degrees of freedom of each AUC's standard error."""
        return self.rarer_sources - 1

    def interval(self, head: int, concept: int, images: int) -> Estimate:
        """Return an AUC with its 95 % interval, DeLong's on the logit scale.

        The logit scale keeps the interval within 0 and 1. At an AUC of 0 or 1 the variance is 0.
        The interval is then Wilson's, for none or all of the sources on the rarer side.
        """
        from scipy import stats
        from scipy.special import expit, logit

        value = float(self.area[head, concept])
        freedom = self.freedom[concept]
        if value in (0.0, 1.0):
            sources = int(self.rarer_sources[concept])
            bounds = wilson(round(value) * sources, sources)
            return Estimate(value, bounds.low, bounds.high, images, "")
        error = float(np.linalg.norm(self.influences[:, head, concept]))
        # delta method: the error of logit(value) is error / (value (1 - value))
        half_width = float(stats.t.ppf(0.975, freedom)) * error / (value * (1 - value))
        middle = float(logit(value))
        low = float(expit(middle - half_width))
        high = float(expit(middle + half_width))
        return Estimate(value, low, high, images, "")

    def p_of_equal_aucs(self, head: int, concept: int, best: int) -> float:
        """Return the p-value of equal AUCs of a head for two concepts (DeLong 1988, paired).

        It is two-sided, because the best concept was chosen for its AUC. It is 1 if the AUC of
        `best` is not higher.
        """
        from scipy import stats

        gap = float(self.area[head, best] - self.area[head, concept])
        if gap <= 0:
            return 1.0
        influences = self.influences[:, head, best] - self.influences[:, head, concept]
        error = float(np.linalg.norm(influences))
        freedom = min(self.freedom[best], self.freedom[concept])
        smallest_error = np.finfo(float).tiny  # avoids a division by 0
        return 2 * float(stats.t.sf(gap / max(error, smallest_error), freedom))

    def best_concepts(self, head: int, is_clear: NDArray[np.bool_]) -> list[int]:
        """Return a head's best clear concept, then its rivals from the highest AUC to the lowest.

        A rival's AUC is not significantly lower than that of the best concept. A rival must also be
        above chance itself, but without the correction for many tests: a concept of few images,
        which no test tells from the best, must not join every label.

        is_clear (concepts,): True if the AUC is above chance after the correction.
        """
        descending = np.argsort(-self.area[head], kind="stable").tolist()
        clear = [concept for concept in descending if is_clear[concept]]
        if not clear:
            return []
        best = clear[0]
        concepts = [best]
        for rival in descending:
            if rival == best or self.p[head, rival] > LEVEL:
                continue
            if self.p_of_equal_aucs(head, rival, best) > LEVEL:
                concepts.append(rival)
        return concepts


def separation(scores: Scores, truth: Truth, groups: Groups | None) -> Separation:
    """Measure how well heads separate the images with each concept from the others.

    groups: the source of each image.
    """
    areas = []
    influences = []
    rarer_sources = []
    p_values = []
    for concept in range(truth.shape[1]):
        values = scores[..., concept].double().numpy()
        has = truth[:, concept].numpy()
        sources_with = source_count(truth[:, concept], groups)
        sources_without = source_count(~truth[:, concept], groups)
        placed = placements(values, has)
        # (images, heads): the squares of their sums over sources add up to DeLong's variance
        influence = np.empty_like(values)
        influence[has] = _influence(placed.of_members, placed.area, sources_with)
        influence[~has] = _influence(placed.of_others, placed.area, sources_without)
        source_influences, _ = by_group(influence, groups)
        areas.append(placed.area)
        influences.append(source_influences)
        rarer_sources.append(min(sources_with, sources_without))
        p_values.append(_p_of_chance(values, has, groups))
    return Separation(
        area=np.stack(areas, -1),
        influences=np.stack(influences, -1),
        rarer_sources=np.asarray(rarer_sources),
        p=np.stack(p_values, -1),
    )


def _influence(image_placements: Table, area: Table, sources: int) -> Table:
    """Return how far each image of one side moves the AUC, the mean of these placements."""
    bessel = float(np.sqrt(sources / (sources - 1)))  # for an unbiased variance
    return (image_placements - area) / len(image_placements) * bessel


class Placements(NamedTuple):
    """The AUCs of heads for one concept, and DeLong's placements. Ties count half.

    area (heads,): the AUC.
    of_members (images with the concept, heads): the share of the images without the concept that
        have a lower value.
    of_others (images without it, heads): the share of the images with the concept that have a
        higher value.
    """

    area: Table
    of_members: Table
    of_others: Table


def placements(values: Table, has: Members) -> Placements:
    """Return the AUC of each column of values (images, heads), and its placements."""
    from scipy.stats import rankdata

    values_with = values[has]
    values_without = values[~has]
    ranks = rankdata(values, axis=0)
    above = (ranks[has] - rankdata(values_with, axis=0)) / len(values_without)
    below = 1 - (ranks[~has] - rankdata(values_without, axis=0)) / len(values_with)
    return Placements(area=above.mean(0), of_members=above, of_others=below)


def _p_of_chance(values: Table, has: Members, groups: Groups | None) -> Table:
    """Return the one-sided p-value of an AUC of at most 0.5, by Mann and Whitney's test.

    The test compares the mean scores of sources.
    """
    from scipy import stats

    if groups is not None:
        # A source may have images with and without the concept: it then has two means, one for each
        # of its sides. Odd sides hold the images with the concept, and np.unique lists sides in the
        # order of by_group.
        source_sides = 2 * _source_numbers(len(values), groups) + has
        sums, counts = by_group(values, source_sides)
        values = sums / counts[:, None]
        has = np.unique(source_sides) % 2 == 1
    count = len(has)
    count_with = int(has.sum())
    count_without = count - count_with
    error = np.sqrt((count + 1) / (12 * count_with * count_without))  # of the AUC under chance
    p: Table = stats.norm.sf((placements(values, has).area - 0.5) / error)
    return p


def of_halves(
    outputs: Float[Tensor, "images heads width"], truth: Truth, groups: Groups | None
) -> Scores:
    """Return the projection of every output on the difference of means for each concept.

    The images are cut into two halves. The means, with and without the concept, are over the other
    half, so no image takes part in its direction. Outputs are centred in their half.
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
    """Return True for the images of every other source.

    Sources are ordered by their share of images with the concept. If FEWEST sources have the
    concept and FEWEST lack it, both halves have images with it and without it.
    """
    sources = _source_numbers(len(has), groups)
    images_with, counts = by_group(has.double().numpy(), sources)
    descending = np.argsort(-images_with / counts, kind="stable")
    is_source_chosen = np.zeros(len(descending), dtype=bool)
    is_source_chosen[descending[::2]] = True
    return torch.from_numpy(is_source_chosen[sources])


def at_random(
    scores: Scores, truth: Truth, groups: Groups | None, *, seed: int, draws: int = PERMUTATIONS
) -> float:
    """Return the largest AUC of any head for any concept, with concepts permuted over sources.

    In each draw, every source receives the concepts of one image of a random source. The result is
    the largest AUC over all draws, at least 0.5.
    """
    from scipy.stats import rankdata

    generator = np.random.default_rng(seed)
    sources = _source_numbers(len(truth), groups)
    ranks = rankdata(scores.double().numpy(), axis=0)  # (images, heads, concepts)
    largest = 0.5
    for _ in range(draws):
        random_images = _random_image_of_each_source(sources, generator)
        donors = generator.permutation(len(random_images))  # (sources,): whose concepts it receives
        donor_images = random_images[donors[sources]]  # (images,)
        has = truth.numpy()[donor_images]  # (images, concepts)
        with_concept = has.sum(0)
        without = len(has) - with_concept
        is_used = (with_concept > 0) & (without > 0)
        # the AUC is (rank sum of the images with the concept - its minimum) / (number of pairs);
        # n are images, h heads and t concepts
        rank_sums = np.einsum("nt,nht->ht", has, ranks)[:, is_used]
        smallest_sums = (with_concept * (with_concept + 1) / 2)[is_used]
        pairs = (with_concept * without)[is_used]
        area = (rank_sums - smallest_sums) / pairs
        largest = max(largest, float(area.max(initial=0)))
    return largest


def _random_image_of_each_source(
    sources: NDArray[np.intp], generator: np.random.Generator
) -> NDArray[np.intp]:
    """Return the index of a random image of source 0, 1, ...; sources (images,)."""
    shuffled_images = generator.permutation(len(sources))
    # the first image of each source in the shuffled order
    _, first_places = np.unique(sources[shuffled_images], return_index=True)
    return np.asarray(shuffled_images[first_places])


def balanced_means(scores: Scores, truth: Truth) -> Float[Tensor, "heads concepts"]:
    """Return the mean score of every head for each concept.

    Images with the concept have half of the weight, and the others the other half.
    """
    exact = scores.double()
    has = truth.double()
    lacks = 1 - has
    # n are images, h heads and t concepts
    mean_with = torch.einsum("nht,nt->ht", exact, has) / has.sum(0)
    mean_without = torch.einsum("nht,nt->ht", exact, lacks) / lacks.sum(0)
    return (mean_with + mean_without) / 2


def without_opposites(
    concepts: Sequence[int], truth: Truth, pushes: Float[Tensor, " concepts"]
) -> list[int]:
    """Return a head's concepts without those that are the negation of another one.

    Two such concepts are one contrast, e.g. the two classes of binary data, which have equal AUCs.
    The one that the head pushes up more stays.

    pushes: the head's `balanced_means`.
    """
    remaining: list[int] = []
    for concept in sorted(concepts, key=lambda concept: -float(pushes[concept])):
        are_negations = [bool((truth[:, concept] != truth[:, other]).all()) for other in remaining]
        if not any(are_negations):
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

    outcomes: the results of removing each of the heads, in their order.
    control: the largest AUC by chance, from `at_random`.
    groups (n,): the source of each image; images of one source count as one in every test and
        interval.
    pointed: for concepts that point to a class, which need not be the label, the fall of the
        log-odds of that class, by the index of the concept.
    """
    separated = separation(scores, truth, groups)
    best_concepts = _best_concepts(separated, scores, truth)
    falls = []
    for index, concepts_of_head in enumerate(best_concepts):
        falls.append(_falls(index, concepts_of_head, truth, outcomes, pointed))
    losses = _losses(best_concepts, truth, falls, outcomes.delta_accuracy, groups)
    p_holm = dict[int, float]()  # by the index of the head
    if losses:
        p_values = [loss.p for loss in losses.values()]
        p_holm = dict(zip(losses, holm(p_values)))
    results = []
    for index, head in enumerate(heads):
        concept_numbers = best_concepts[index]
        # without a concept above chance, the one of the highest AUC is shown
        best = concept_numbers[0] if concept_numbers else int(separated.area[index].argmax())
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
    """Return the concepts that each head separates best; none if no AUC is above chance."""
    # one correction over all heads and concepts
    p_holm = np.reshape(holm(separated.p.ravel().tolist()), separated.p.shape)
    is_clear = p_holm <= LEVEL
    pushes = balanced_means(scores, truth)
    by_head = []
    for head in range(len(is_clear)):
        concepts = separated.best_concepts(head, is_clear[head])
        by_head.append(without_opposites(concepts, truth, pushes[head]))
    return by_head


class _Loss(NamedTuple):
    """The losses without one head.

    lost, others_lost, margin: as in WritesRow.
    p: one-sided p-value of the margin, before Holm's correction.
    """

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

    If all its concepts point to classes, the fall is that of the classes to which the concepts of
    the image point. An image without any of the concepts has the mean over all these classes.

    pointed: see `writes`.
    """
    point_to_classes = all(concept in pointed for concept in concepts)
    if not concepts or not point_to_classes:
        return outcomes.delta_log_odds[head]
    # (images, concepts of the head)
    class_falls = torch.stack([pointed[concept][head] for concept in concepts], 1)
    has = truth[:, list(concepts)].double()
    has_any = has.sum(1, keepdim=True) > 0
    weights = torch.where(has_any, has, 1.0)
    return (class_falls * weights).sum(1) / weights.sum(1)


def _losses(
    best_concepts: Sequence[Sequence[int]],
    truth: Truth,
    falls: Sequence[Tensor],
    accuracy_losses: Tensor,
    groups: Groups | None,
) -> dict[int, _Loss]:
    """Return the losses of images with and without a head's concepts, by the index of the head.

    A head is left out if it has no concept or more than MOST. It is also left out if too few
    sources lack its concepts, so that there is nothing to compare with.

    falls: the fall of the log-odds (images,) without each head.
    accuracy_losses (heads, images): the loss of accuracy without each head, in points.
    """
    losses = {}
    for head, concepts in enumerate(best_concepts):
        has_any = truth[:, concepts].any(-1)
        has_label = 0 < len(concepts) <= MOST
        if not has_label or source_count(~has_any, groups) < FEWEST:
            continue
        margin, two_sided = welch(
            means_by_source(falls[head], has_any, groups),
            means_by_source(falls[head], ~has_any, groups),
            unit="nats",
        )
        losses[head] = _Loss(
            lost=_mean_of(accuracy_losses[head], has_any, groups),
            others_lost=_mean_of(accuracy_losses[head], ~has_any, groups),
            margin=margin,
            p=two_sided / 2 if margin.value > 0 else 1 - two_sided / 2,
        )
    return losses


def _mean_of(points: Tensor, rows: Bool[Tensor, " images"], groups: Groups | None) -> Estimate:
    """Return the mean over the images that `rows` selects."""
    groups_of_rows = None if groups is None else groups[rows]
    return mean_points(points[rows], groups=groups_of_rows)


def means_by_source(values: Tensor, rows: Bool[Tensor, " images"], groups: Groups | None) -> Table:
    """Return the mean value of each source over those of its images that `rows` selects."""
    groups_of_rows = None if groups is None else groups[rows]
    sums, counts = by_group(values[rows].numpy(), groups_of_rows)
    return sums / counts


def _source_numbers(images: int, groups: Groups | None) -> NDArray[np.intp]:
    """Return the number of each image's source, from 0."""
    if groups is None:
        return np.arange(images)
    _, numbers = np.unique(groups.cpu().numpy(), return_inverse=True)
    return numbers.ravel()


def source_count(rows: Bool[Tensor, " images"], groups: Groups | None) -> int:
    """Return the number of sources of the images that `rows` selects."""
    return int(rows.sum()) if groups is None else len(groups[rows].unique())


class Concepts(NamedTuple):
    """The classes and attributes that are tested.

    For each of them, FEWEST sources have an image with it, and FEWEST have an image without it.

    classes: numbers of the tested classes.
    attributes: names of the tested attributes.
    rare: names of the other attributes.
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
