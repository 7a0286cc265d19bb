"""Removal of several units, and the similarity of heads.

Units are removed in an order, one after another, or in pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench, Outcomes, Removal, Some, Unit, silent
from vitlens.analysis.ablation.importance import MeanChange, mean_changes
from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.evaluation.intervals import resampled_means, sizes_of_groups
from vitlens.analysis.features.cka import CKAStream
from vitlens.lens.capture import capture
from vitlens.lens.trace import layer_at
from vitlens.resampling import drawn_interval, enough_to_draw
from vitlens.uncertainty import Estimate, fewest_images

TOLERATED = 1.0  # points of accuracy
_ROUNDING = 1e-9  # points: 78 % - 77 % is 1 point
_ROWS = 4096  # samples of a similarity at once


def removal_curves(
    bench: Bench,
    orders: Mapping[str, Sequence[Unit]],
    *,
    points: int,
    images: Some | None = None,
    what: str,
) -> dict[str, Outcomes]:
    """Return the outcomes without the first units of each order, by the name of the order.

    There are at most `points` numbers of units, evenly from none to all.

    images: some of the bench's (None: all).
    what: the title of the progress.

    A set that several orders share, as their first and last, is measured once. The replacement of a
    removed unit is that of the unchanged model.
    """
    removals_by_order: dict[str, list[Removal]] = {}
    different: dict[frozenset[Unit], Removal] = {}
    for name, order in orders.items():
        counts = sorted({round(len(order) * point / (points - 1)) for point in range(points)})
        removals_by_order[name] = [tuple(order[:count]) for count in counts]
        for removal in removals_by_order[name]:
            different[frozenset(removal)] = removal
    row_of = {units: row for row, units in enumerate(different)}
    outcomes = bench.without(list(different.values()), images, what=what)
    curves = {}
    for name, removals in removals_by_order.items():
        curves[name] = outcomes.rows([row_of[frozenset(removal)] for removal in removals])
    return curves


def share_removable(
    curve: Outcomes, *, groups: Tensor | None = None, seed: int = 0
) -> Estimate | None:
    """Return the share of a curve's units that can be removed for at most one point of accuracy.

    It is the greatest measured number of removals up to which no accuracy is lower. It has a 95 %
    bootstrap interval over images (or groups), unless they are fewer than 6. None where removing
    all units does not significantly cost more than a point (by the upper end of the accuracy's 95 %
    interval): the share then says nothing about the units.
    """
    with_all = accuracy(curve.correct[0], groups=groups)
    with_none = accuracy(curve.correct[-1], groups=groups)
    if with_none.high is None or with_none.high >= with_all.value - TOLERATED / 100:
        return None
    correct = curve.correct.double()
    units = len(curve.sets[-1])
    shares = torch.tensor([len(removal) / units for removal in curve.sets], dtype=torch.float64)

    def removable(accuracies: Float[Tensor, "draws removed"]) -> Float[Tensor, " draws"]:
        is_tolerated = 100 * (accuracies[:, :1] - accuracies) <= TOLERATED + _ROUNDING
        last_tolerated = is_tolerated.long().cumprod(1).sum(1) - 1
        return shares[last_tolerated]

    share = float(removable(correct.mean(1)[None])[0])
    counts = sizes_of_groups(len(curve), groups)
    if not enough_to_draw(counts):
        return Estimate(share, n=len(curve))
    drawn = removable(resampled_means(correct, groups=groups, seed=seed))
    low, high = drawn_interval(drawn.numpy(), counts)
    return Estimate(share, float(low), float(high), len(curve))


def greedy_order(
    bench: Bench,
    units: Sequence[Unit],
    *,
    every: int = 1,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Removal, float]:
    """Remove the unit that raises the loss least, rank the others again without it, and so on.

    Returns the order, the first removed first, and the full forward passes an image.

    every: units removed before ranking again.
    advance: called with the number of units removed.

    The clean pass of each round is that of the model without the units removed so far, so every
    candidate takes a replay from its layer on: for h heads about h²/2 replays of half a forward
    pass, so h²/4 passes an image instead of h²/2; `every` divides the cost.
    """
    quiet = replace(bench.with_means(units), progress=silent, memory=None)
    passes = 0.0
    if quiet.means is not bench.means:
        passes += 1
    removed: Removal = ()
    candidates = list(units)
    while candidates:
        outcomes = quiet.without([(unit,) for unit in candidates], removed=removed)
        passes += outcomes.forward_equivalents
        ranked = outcomes.loss.sum(1).argsort(stable=True).tolist()
        candidates = [candidates[index] for index in ranked]
        first = candidates[:every]
        advance(len(first))
        removed = (*removed, *first)
        candidates = candidates[every:]
    return removed, passes


class PairEffects(NamedTuple):
    """The effects of removing pairs of units, changes of the loss in nats.

    synergy: the effect of removing both minus the sum of the effects, with intervals and tests,
        paired over images (or groups), Holm over the pairs. Positive: one compensates for the
        removal of the other; negative: they depend on each other (once one is removed, removing the
        other costs less).
    both: the mean effect of removing both units of each pair.
    single: of removing each unit.
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
    images: Some | None = None,
    *,
    what: str,
) -> PairEffects:
    """Return the effects of removing pairs of units, as indices of the units.

    images: some of the bench's (None: all); what: the title of the progress.
    """
    single_sets: list[Removal] = [(unit,) for unit in units]
    pair_sets: list[Removal] = [(units[first], units[second]) for first, second in pairs]
    outcomes = bench.without(single_sets + pair_sets, images, what=what)
    single = outcomes.delta_loss[: len(units)]
    both = outcomes.delta_loss[len(units) :]
    first = single[[pair[0] for pair in pairs]]
    second = single[[pair[1] for pair in pairs]]
    beyond_sum = both - first - second
    groups = bench.groups
    if groups is not None and images is not None:
        groups = groups[images]
    (synergy,) = mean_changes(
        (beyond_sum,), families=[0] * len(pairs), groups=groups, seed=bench.seed
    )
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
    bench: Bench, heads: Sequence[Unit], images: Some | None = None
) -> Float[Tensor, "heads others"]:
    """Return the linear CKA of heads' outputs over tokens and images.

    It is 1 on the diagonal, NaN where the tokens of two layers differ. Unbiased, so that it is near
    0, also below, for different heads, and exact over any number of images (see
    vitlens/analysis/features/cka.py). The windows of Swin are compared within a layer.
    """
    comparable = _comparable_heads(bench, heads)
    places = [f"blocks.{head.layer}.heads" for head in heads]
    streams = [CKAStream(centred=False) for _ in comparable]
    for numbers in bench.share(images).split(bench.size):
        batch = bench.images[numbers].to(bench.model.device)
        captured = capture(bench.model, batch, sorted(set(places)))
        for stream, rows in zip(streams, comparable):
            outputs = [captured[places[row]].select(-3, heads[row].head or 0) for row in rows]
            if bench.model.device.type == "mps":  # which has no float64
                outputs = [output.cpu() for output in outputs]
            step = max(1, _ROWS // outputs[0][0, ..., 0].numel())
            for start in range(0, len(numbers), step):
                stream.add([output[start : start + step].flatten(0, -2) for output in outputs])
    matrix = torch.full((len(heads), len(heads)), torch.nan, dtype=torch.float64)
    for stream, rows in zip(streams, comparable):
        stream.join(bench.processes.total)
        index = torch.tensor(rows)
        matrix[index[:, None], index] = stream.cka()
    return matrix


def _comparable_heads(bench: Bench, heads: Sequence[Unit]) -> list[list[int]]:
    """Return the indices of heads in layers with the same tokens.

    In windows these are the heads of one layer.
    """
    by_tokens = dict[tuple[int, ...], list[int]]()
    for row, head in enumerate(heads):
        layer = layer_at(bench.model, head.layer)
        tokens: tuple[int, ...] = (layer.queries,)
        if layer.windows != 1:
            tokens = (layer.queries, layer.windows, layer.index)
        by_tokens.setdefault(tokens, []).append(row)
    return list(by_tokens.values())
