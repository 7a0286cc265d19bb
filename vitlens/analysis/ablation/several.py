"""Removal of several units, and the similarity of heads.

Units are removed in an order, one after another, or in pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench, ImageIndices, silent
from vitlens.analysis.ablation.importance import MeanChange, mean_changes
from vitlens.analysis.ablation.outcomes import Outcomes
from vitlens.analysis.ablation.units import Removal, Unit
from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.evaluation.intervals import resampled_means, sizes_of_groups
from vitlens.analysis.features.cka import CKAStream
from vitlens.lens.capture import capture
from vitlens.lens.trace import layer_at
from vitlens.resampling import drawn_interval, enough_to_draw
from vitlens.uncertainty import Estimate, fewest_images

TOLERATED = 1.0  # points of accuracy that the removal of units may cost
# Points that are ignored as rounding errors, so that 78 % - 77 % counts as 1 point.
_ROUNDING = 1e-9
_TOKENS_AT_ONCE = 4096  # tokens that are added to a similarity at a time


def removal_curves(
    bench: Bench,
    orders: Mapping[str, Sequence[Unit]],
    *,
    points: int,
    images: ImageIndices | None = None,
    what: str,
) -> dict[str, Outcomes]:
    """Return the outcomes without the first units of each order, by the name of the order.

    The replacement of a removed unit is that of the unchanged model.

    orders: orders of the same units, by their names.
    points: the most numbers of removed units; they are evenly spaced from none to all.
    images: the indices of some images of the bench, None for all.
    what: the title of the progress display.
    """
    removals_by_order: dict[str, list[Removal]] = {}
    # orders may share sets, e.g. none and all of the units, which are measured once
    different_sets: dict[frozenset[Unit], Removal] = {}
    for name, order in orders.items():
        # with few units, several points have the same number
        counts = sorted({round(len(order) * point / (points - 1)) for point in range(points)})
        removals_by_order[name] = [tuple(order[:count]) for count in counts]
        for removal in removals_by_order[name]:
            different_sets[frozenset(removal)] = removal
    row_of_set = {units: row for row, units in enumerate(different_sets)}
    outcomes = bench.without(list(different_sets.values()), images, what=what)
    curves = {}
    for name, removals in removals_by_order.items():
        curves[name] = outcomes.rows([row_of_set[frozenset(removal)] for removal in removals])
    return curves


def share_removable(
    curve: Outcomes, *, groups: Tensor | None = None, seed: int = 0
) -> Estimate | None:
    """Return the share of a curve's units that can be removed for at most one point of accuracy.

    No measured number of removals up to this share costs more. The share has a 95 % bootstrap
    interval over images (or groups), if there are at least 6. The result is None if the removal of
    all units does not significantly cost more than a point. The share then says nothing about the
    units.
    """
    accuracy_before = accuracy(curve.correct[0], groups=groups)
    accuracy_after_all = accuracy(curve.correct[-1], groups=groups)
    least_tolerated = accuracy_before.value - TOLERATED / 100
    if accuracy_after_all.high is None or accuracy_after_all.high >= least_tolerated:
        return None
    correct = curve.correct.double()  # as (sets, images), from no removed units to all
    units = len(curve.sets[-1])
    shares = torch.tensor([len(removal) / units for removal in curve.sets], dtype=torch.float64)

    def removable(accuracies: Float[Tensor, "draws sets"]) -> Float[Tensor, " draws"]:
        """Return the largest share up to which all removals are tolerated, for each draw."""
        is_tolerated = 100 * (accuracies[:, :1] - accuracies) <= TOLERATED + _ROUNDING
        # cumprod is 0 from the first set on that is not tolerated
        tolerated_sets = is_tolerated.long().cumprod(1).sum(1)
        return shares[tolerated_sets - 1]

    share = float(removable(correct.mean(1)[None])[0])
    sizes = sizes_of_groups(len(curve), groups)
    if not enough_to_draw(sizes):
        return Estimate(share, n=len(curve))
    drawn = removable(resampled_means(correct, groups=groups, seed=seed))
    low, high = drawn_interval(drawn.numpy(), sizes)
    return Estimate(share, float(low), float(high), len(curve))


def greedy_order(
    bench: Bench,
    units: Sequence[Unit],
    *,
    every: int = 1,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Removal, float]:
    """Remove the unit that raises the loss least, rank the others again without it, and so on.

    Returns the units in the order of their removal, and the cost per image in full forward passes.

    The clean pass of each round is that of the model without the units that are already removed. So
    each candidate takes only a replay from its layer on, on average half a forward pass. For h
    heads there are about h²/2 replays, so about h²/4 passes per image. `every` divides this cost.

    every: the number of units that are removed before the others are ranked again.
    advance: called with the number of units that were just removed.
    """
    quiet_bench = replace(bench.with_means(units), progress=silent, memory=None)
    passes = 0.0
    if quiet_bench.means is not bench.means:  # the means took a pass
        passes += 1
    removed: Removal = ()
    candidates = list(units)
    while candidates:
        outcomes = quiet_bench.without([(unit,) for unit in candidates], removed=removed)
        passes += outcomes.forward_equivalents
        least_loss_first = outcomes.loss.sum(1).argsort(stable=True).tolist()
        candidates = [candidates[index] for index in least_loss_first]
        removed_now = candidates[:every]
        advance(len(removed_now))
        removed = (*removed, *removed_now)
        candidates = candidates[every:]
    return removed, passes


class PairEffects(NamedTuple):
    """The effects of removing pairs of units, as changes of the loss in nats.

    synergy: for each pair, the effect of removing both units minus the sum of their single effects.
        It is positive if one unit compensates for the removal of the other. It is negative if they
        depend on each other: once one is removed, the removal of the other costs less. Intervals
        and tests are paired over images (or groups). Holm corrects for the number of pairs.
    both (pairs,): the mean effect of removing both units of each pair.
    single (units,): the mean effect of removing each unit.
    note: a remark for a report, or "".
    """

    synergy: MeanChange
    both: Float[Tensor, " pairs"]
    single: Float[Tensor, " units"]
    note: str


def pairwise(
    bench: Bench,
    units: Sequence[Unit],
    pairs: Sequence[tuple[int, int]],
    images: ImageIndices | None = None,
    *,
    what: str,
) -> PairEffects:
    """Return the effects of removing pairs of units.

    pairs: the indices in `units` of the two units of each pair.
    images: the indices of some images of the bench, None for all.
    what: the title of the progress display.
    """
    single_sets: list[Removal] = [(unit,) for unit in units]
    pair_sets: list[Removal] = [(units[first], units[second]) for first, second in pairs]
    outcomes = bench.without(single_sets + pair_sets, images, what=what)
    single = outcomes.delta_loss[: len(units)]  # as (units, images)
    both = outcomes.delta_loss[len(units) :]  # as (pairs, images)
    first = single[[pair[0] for pair in pairs]]
    second = single[[pair[1] for pair in pairs]]
    beyond_sum = both - first - second
    groups = bench.groups
    if groups is not None and images is not None:
        groups = groups[images]
    one_family = ["pairs"] * len(pairs)  # Holm corrects over all pairs
    (synergy,) = mean_changes((beyond_sum,), families=one_family, groups=groups, seed=bench.seed)
    notes = [outcomes.note]
    clusters = len(sizes_of_groups(both.shape[1], groups))
    fewest = fewest_images(len(pairs))
    if 1 < clusters < fewest:
        notes.append(
            f"with {clusters} images (or groups) no pair of heads can be significant after Holm's "
            f"correction for {len(pairs)} tests: that takes at least {fewest}"
        )
    elif not synergy.low.isfinite().all():
        notes.append("no intervals and no tests: they need at least 2 images (or groups)")
    return PairEffects(synergy, both.mean(1), single.mean(1), "; ".join(filter(None, notes)))


def head_similarity(
    bench: Bench, heads: Sequence[Unit], images: ImageIndices | None = None
) -> Float[Tensor, "heads others"]:
    """Return the linear CKA of the outputs of every pair of heads, over tokens and images.

    The estimator is unbiased and exact over any number of images (see
    vitlens/analysis/features/cka.py). It is near 0, possibly below, for unrelated heads. It is NaN
    for heads of layers that have different tokens. Heads with windows (Swin) are only compared
    within a layer.
    """
    comparable = _comparable_heads(bench, heads)
    places = [f"blocks.{head.layer}.heads" for head in heads]
    # one stream for each list of comparable heads; `rows` below are their indices in `heads`
    streams = [CKAStream(centred=False) for _ in comparable]
    for image_indices in bench.share(images).split(bench.size):
        batch = bench.images[image_indices].to(bench.model.device)
        captured = capture(bench.model, batch, sorted(set(places)))
        for stream, rows in zip(streams, comparable):
            # for each head (batch, .., tokens, head_dim)
            outputs = [heads[row].of_output(captured[places[row]]) for row in rows]
            if bench.model.device.type == "mps":  # this device has no float64
                outputs = [output.cpu() for output in outputs]
            tokens_per_image = outputs[0][0, ..., 0].numel()
            images_at_once = max(1, _TOKENS_AT_ONCE // tokens_per_image)
            for start in range(0, len(image_indices), images_at_once):
                some = slice(start, start + images_at_once)
                # a row of the similarity is a token of an image
                stream.add([output[some].flatten(0, -2) for output in outputs])
    matrix = torch.full((len(heads), len(heads)), torch.nan, dtype=torch.float64)
    for stream, rows in zip(streams, comparable):
        stream.join(bench.processes.total)
        index = torch.tensor(rows)
        matrix[index[:, None], index] = stream.cka()
    return matrix


def _comparable_heads(bench: Bench, heads: Sequence[Unit]) -> list[list[int]]:
    """Return the indices of heads, in one list for all heads that have the same tokens.

    For layers with windows, these are the heads of one layer.
    """
    by_tokens = dict[tuple[int, ...], list[int]]()
    for row, head in enumerate(heads):
        layer = layer_at(bench.model, head.layer)
        tokens: tuple[int, ...] = (layer.queries,)
        if layer.windows != 1:
            tokens = (layer.queries, layer.windows, layer.index)
        by_tokens.setdefault(tokens, []).append(row)
    return list(by_tokens.values())
