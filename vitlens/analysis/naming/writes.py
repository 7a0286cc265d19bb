"""What each head writes: the classes, or attributes of the images, that it separates best, and
whether they need it.

The score of a class is what the head adds to its logit directly, above the mean over all classes of
the model. That of an attribute is the projection of the head's output on the difference of means of
the images with and without it, taken from the other half of the images. The area under the ROC
curve (AUC) of the score says how well the head separates the images of the class from all others
(INVERT, Bykov 2023). The word names the class of the highest AUC together with those whose AUC is
not significantly lower; more than MOST such classes are no word. The word holds where, without the
head, the log-odds of the label fall more in images of these classes than in the others.

Images that share a source (a group) are not independent. Variances of AUCs sum over sources
(Obuchowski 1997), tests against chance use the mean score of each source, and a permutation moves
whole sources.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.ablation.bench import Outcomes
from vitlens.analysis.naming.words import CORRELATES, MATTERS, NOTHING, SEVERAL, any_of
from vitlens.resampling import by_group
from vitlens.uncertainty import Estimate, holm, mean_points, welch, wilson

LEVEL: Final = 0.05  # of a test, after Holm's correction
FEWEST: Final = 5  # sources of images with a thing, and without it
# things in a word: a head that separates more of them equally well writes none in particular
MOST: Final = 3
PERMUTATIONS: Final = 20  # of what is true of the images: the control
LEAST: Final = 0.1  # nats of log-odds: a head of which a thing loses less does not matter to it

Scores = Float[Tensor, "images heads things"]
Truth = Bool[Tensor, "images things"]
Groups = Int[Tensor, " images"]
Table = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Writes:
    """What one head writes.

    word: the things in `alike`, None where there are none or too many; best: the thing of the
    highest AUC that is above chance, else of the highest; auc: of the best thing, with DeLong's
    interval; control: the largest AUC of a head with as many things that are assigned to the images
    at random; state: one of words.STATES; lost, others_lost: points of accuracy that the images
    with and without the word's things lose without the head; margin: by how much the log-odds of
    the label fall more in the former, nats; p: of that, after Holm's correction over heads; these
    four are None without a word; alike: the best thing and those whose AUC is not significantly
    lower, empty where no AUC is above chance. scores, falls, points (n,): of each image, what the
    head adds to the best thing, and what it loses without the head, nats of log-odds and points.
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
    alike: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Separation:
    """How well every head separates the images with each thing from the others.

    area (heads, things): the AUC; influences (sources, heads, things): the part of each source of
    images in its error, whose sum of squares is the variance; freedom (things,): degrees of freedom
    of the standard error; p (heads, things): of an AUC of at most 0.5, one-sided, before any
    correction.
    """

    area: Table
    influences: Table
    freedom: Table
    p: Table

    def interval(self, head: int, thing: int, images: int) -> Estimate:
        """Return an AUC with its 95 % interval, DeLong's on the logit scale, which keeps it within
        0 and 1.

        Where all images are on the right side the variance is 0; the interval is then Wilson's, as
        if each source of the rarer side were one success.
        """
        from scipy import stats
        from scipy.special import expit, logit

        value = float(self.area[head, thing])
        error = float(np.linalg.norm(self.influences[:, head, thing]))
        sources = int(self.freedom[thing]) + 1
        if value in (0.0, 1.0):
            bounds = wilson(round(value) * sources, sources)
            return Estimate(value, bounds.low, bounds.high, images, "")
        half = float(stats.t.ppf(0.975, self.freedom[thing])) * error / (value * (1 - value))
        middle = float(logit(value))
        return Estimate(value, float(expit(middle - half)), float(expit(middle + half)), images, "")

    def p_lower(self, head: int, thing: int, best: int) -> float:
        """Return the p that a head's AUC for a thing is not lower than for another (DeLong 1988,
        paired).

        Two-sided, as the other thing was chosen for its AUC.
        """
        from scipy import stats

        gap = float(self.area[head, best] - self.area[head, thing])
        if gap <= 0:
            return 1.0
        error = float(
            np.linalg.norm(self.influences[:, head, best] - self.influences[:, head, thing])
        )
        freedom = min(self.freedom[best], self.freedom[thing])
        return 2 * float(stats.t.sf(gap / max(error, np.finfo(float).tiny), freedom))

    def alike(self, head: int, clear: NDArray[np.bool_]) -> list[int]:
        """Return the thing of a head's highest AUC among clear ones, then those whose AUC is not
        significantly lower.

        clear (things,): True where the AUC is above chance after correction. The others are
        compared where they are above chance before it, so that a thing of few images, which no test
        excludes, does not join every word.
        """
        order = np.argsort(-self.area[head], kind="stable").tolist()
        best = next((thing for thing in order if clear[thing]), None)
        if best is None:
            return []
        rivals = [thing for thing in order if thing != best and self.p[head, thing] <= LEVEL]
        return [best, *(thing for thing in rivals if self.p_lower(head, thing, best) > LEVEL)]


def separation(scores: Scores, truth: Truth, groups: Groups | None) -> Separation:
    """Return how well heads separate the images with each thing, by sources of images; groups: the
    source of each.
    """
    areas = []
    influences = []
    freedom = []
    p_values = []
    for thing in range(truth.shape[1]):
        values = scores[..., thing].double().numpy()
        held = truth[:, thing].numpy()
        sources = [source_count(truth[:, thing], groups), source_count(~truth[:, thing], groups)]
        area, above, below = placements(values, held)
        influence = np.empty_like(values)
        influence[held] = (above - area) / len(above) * np.sqrt(sources[0] / (sources[0] - 1))
        influence[~held] = (below - area) / len(below) * np.sqrt(sources[1] / (sources[1] - 1))
        areas.append(area)
        influences.append(by_group(influence, groups)[0])
        freedom.append(min(sources) - 1)
        p_values.append(_p_of_chance(values, held, groups))
    return Separation(
        np.stack(areas, -1), np.stack(influences, -1), np.asarray(freedom), np.stack(p_values, -1)
    )


def placements(values: Table, held: NDArray[np.bool_]) -> tuple[Table, Table, Table]:
    """Return the AUC of each column of values (images, heads), and DeLong's placements of the
    images on both sides.

    The placement of an image with the thing is the share of the others that it is above; of one
    without, the share of those with the thing that are above it. Ties count half.
    """
    from scipy.stats import rankdata

    with_it = values[held]
    without = values[~held]
    ranks = rankdata(values, axis=0)
    above = (ranks[held] - rankdata(with_it, axis=0)) / len(without)
    below = 1 - (ranks[~held] - rankdata(without, axis=0)) / len(with_it)
    return above.mean(0), above, below


def _p_of_chance(values: Table, held: NDArray[np.bool_], groups: Groups | None) -> Table:
    """Return the one-sided p of an AUC of at most 0.5 by Mann and Whitney's test of the mean scores
    of sources.
    """
    from scipy import stats

    if groups is not None:
        parts = 2 * _members(len(values), groups) + held  # a source may have images on both sides
        sums, counts = by_group(values, parts)
        values = sums / counts[:, None]
        held = np.unique(parts) % 2 == 1
    n = len(held)
    with_it = int(held.sum())
    spread = np.sqrt((n + 1) / (12 * with_it * (n - with_it)))
    p: Table = stats.norm.sf((placements(values, held)[0] - 0.5) / spread)
    return p


def of_halves(
    outputs: Float[Tensor, "images heads width"], truth: Truth, groups: Groups | None
) -> Scores:
    """Return the projection of every output on the difference of means of the other half, centred
    in its half.
    """
    scores = outputs.new_zeros(*outputs.shape[:2], truth.shape[1])
    for thing in range(truth.shape[1]):
        held = truth[:, thing]
        half = balanced_half(held, groups)
        for part in (half, ~half):
            others = outputs[~part]
            has = held[~part]
            direction = others[has].mean(0) - others[~has].mean(0)
            centred = outputs[part] - outputs[part].mean(0)
            scores[part, :, thing] = (centred * direction).sum(-1)
    return scores


def balanced_half(held: Bool[Tensor, " images"], groups: Groups | None) -> Bool[Tensor, " images"]:
    """Return the images of every other source, in the order of the share of a source's images that
    have the thing.

    Of a thing with FEWEST sources on either side both halves then have images with it and without
    it.
    """
    members = _members(len(held), groups)
    sums, counts = by_group(held.double().numpy(), members)
    order = np.argsort(-sums / counts, kind="stable")
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[::2]] = True
    return torch.from_numpy(chosen[members])


def at_random(
    scores: Scores, truth: Truth, groups: Groups | None, *, seed: int, draws: int = PERMUTATIONS
) -> float:
    """Return the largest AUC of any head for any thing when what is true of the sources is
    permuted, over draws.
    """
    from scipy.stats import rankdata

    generator = np.random.default_rng(seed)
    members = _members(len(truth), groups)
    ranks = rankdata(scores.double().numpy(), axis=0)
    largest = 0.5
    for _ in range(draws):
        order = generator.permutation(len(truth))
        sources, places = np.unique(members[order], return_index=True)
        drawn = order[places]  # an image of each source
        moved = generator.permutation(len(sources))
        held = truth.numpy()[drawn[moved[members]]]
        with_it = held.sum(0)
        without = len(held) - with_it
        used = (with_it > 0) & (without > 0)
        rank_sums = np.einsum("nt,nht->ht", held, ranks)[:, used]
        area = (rank_sums - (with_it * (with_it + 1) / 2)[used]) / (with_it * without)[used]
        largest = max(largest, float(area.max(initial=0)))
    return largest


def balanced_means(scores: Scores, truth: Truth) -> Float[Tensor, "heads things"]:
    """Return the mean score of every head for each thing, images with it and without it weighing
    half each.
    """
    exact = scores.double()
    held = truth.double()
    with_it = torch.einsum("nht,nt->ht", exact, held) / held.sum(0)
    without = torch.einsum("nht,nt->ht", exact, 1 - held) / (1 - held).sum(0)
    return (with_it + without) / 2


def without_opposites(
    members: Sequence[int], truth: Truth, pushes: Float[Tensor, " things"]
) -> list[int]:
    """Return a head's things without those that are true where another one is false.

    Two such things are one contrast: of two classes the AUCs are equal. The one that the head
    pushes up more stays, by `balanced_means`.
    """
    kept: list[int] = []
    for thing in sorted(members, key=lambda thing: -float(pushes[thing])):
        if not any(bool((truth[:, thing] != truth[:, other]).all()) for other in kept):
            kept.append(thing)
    return [thing for thing in members if thing in kept]


def writes(
    scores: Scores,
    truth: Truth,
    things: Sequence[str],
    outcomes: Outcomes,
    *,
    control: float,
    groups: Groups | None = None,
) -> list[Writes]:
    """Return the word for every head.

    outcomes: without each of the same heads, in their order; control: see at_random; groups (n,):
    of images that share a source, which count as one in every test and interval.
    """
    found = separation(scores, truth, groups)
    clear = np.reshape(holm(found.p.ravel().tolist()), found.p.shape) <= LEVEL
    pushes = balanced_means(scores, truth)
    alike = []
    for head in range(len(clear)):
        members = found.alike(head, clear[head])
        alike.append(without_opposites(members, truth, pushes[head]))
    falls = outcomes.delta_log_odds
    points = outcomes.delta_accuracy
    held: dict[int, Tensor] = {}  # the images with a word's things, by head
    margins: dict[int, Estimate] = {}
    p_values: dict[int, float] = {}
    for head, members in enumerate(alike):
        images = truth[:, members].any(-1)
        if 0 < len(members) <= MOST and source_count(~images, groups) >= FEWEST:
            held[head] = images
            margins[head], p = welch(
                *(_means(falls[head][rows], groups, rows) for rows in (images, ~images)),
                unit="nats",
            )
            p_values[head] = p / 2 if margins[head].value > 0 else 1 - p / 2  # one-sided
    adjusted = dict(zip(p_values, holm(list(p_values.values())) if p_values else ()))
    words = []
    for head, members in enumerate(alike):
        best = members[0] if members else int(found.area[head].argmax())
        names = tuple(things[thing] for thing in members)
        named = head in held
        state = SEVERAL if members else NOTHING
        lost = others_lost = None
        if named:
            matters = adjusted[head] <= LEVEL and margins[head].value >= LEAST
            state = MATTERS if matters else CORRELATES
            lost = _mean_of(points[head], held[head], groups)
            others_lost = _mean_of(points[head], ~held[head], groups)
        words.append(
            Writes(
                word=any_of(names) if named else None,
                best=things[best],
                auc=found.interval(head, best, len(truth)),
                control=control,
                state=state,
                scores=scores[:, head, best],
                falls=falls[head],
                points=points[head],
                lost=lost,
                others_lost=others_lost,
                margin=margins.get(head),
                p=adjusted.get(head),
                alike=names,
            )
        )
    return words


def _mean_of(points: Tensor, rows: Bool[Tensor, " images"], groups: Groups | None) -> Estimate:
    return mean_points(points[rows], groups=None if groups is None else groups[rows])


def _means(values: Tensor, groups: Groups | None, rows: Bool[Tensor, " images"]) -> Table:
    sums, counts = by_group(values.numpy(), None if groups is None else groups[rows])
    return sums / counts


def _members(images: int, groups: Groups | None) -> NDArray[np.intp]:
    """Return the number of each image's source, from 0."""
    if groups is None:
        return np.arange(images)
    return np.unique(groups.cpu().numpy(), return_inverse=True)[1].ravel()


def source_count(held: Bool[Tensor, " images"], groups: Groups | None) -> int:
    """Return the number of sources with an image that has the thing."""
    return int(held.sum()) if groups is None else len(groups[held].unique())


class Things(NamedTuple):
    """What is tested.

    classes: by number, and attributes: by name, of which FEWEST sources of images have an image
    with, and FEWEST one without; rare: the other attributes.
    """

    classes: list[int]
    attributes: list[str]
    rare: list[str]


def things_of(
    labels: Int[Tensor, " images"],
    classes: Sequence[str],
    attributes: Mapping[str, Tensor],
    groups: Groups | None,
) -> Things:
    """Return the classes and attributes that enough sources of images have, and lack."""
    present = [number for number in labels.unique().tolist() if 0 <= number < len(classes)]
    numbers = [number for number in present if _is_frequent(labels == number, groups)]
    names = [name for name, held in attributes.items() if _is_frequent(held.bool(), groups)]
    return Things(numbers, names, [name for name in attributes if name not in names])


def _is_frequent(held: Bool[Tensor, " images"], groups: Groups | None) -> bool:
    return min(source_count(held, groups), source_count(~held, groups)) >= FEWEST
