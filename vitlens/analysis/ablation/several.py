"""Several units removed at once: in an order, one after another, and in pairs; and how similar
heads' outputs are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

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
    """Return the outcomes without the first units of each order, the first removed first, per image
    so that they are paired.

    For at most `points` numbers of units, evenly from none to all; images: some of the bench's
    (None: all). A set that several orders share, as their first and last, is measured once. The
    replacement of a removed unit is that of the unchanged model.
    """
    prefixes = {}
    for name, order in orders.items():
        counts = sorted({round(len(order) * point / (points - 1)) for point in range(points)})
        prefixes[name] = [tuple(order[:count]) for count in counts]
    distinct = {frozenset(each): each for sets in prefixes.values() for each in sets}
    row = {each: number for number, each in enumerate(distinct)}
    outcomes = bench.without(list(distinct.values()), images, what=what)
    return {
        name: outcomes.rows([row[frozenset(each)] for each in sets])
        for name, sets in prefixes.items()
    }


def share_removable(
    curve: Outcomes, *, groups: Tensor | None = None, seed: int = 0
) -> Estimate | None:
    """Return the share of a curve's units that can be removed before accuracy falls by more than
    one point.

    The greatest measured number of removals up to which no accuracy is lower than that, with its 95
    % bootstrap interval over images (or groups), which fewer than 6 do not have. None where
    removing all units is not shown to cost more than a point (by the upper end of the accuracy's 95
    % interval): the share then says nothing about the units.
    """
    whole, none = (accuracy(curve.correct[row], groups=groups) for row in (0, -1))
    if none.high is None or none.high >= whole.value - TOLERATED / 100:
        return None
    right = curve.correct.double()
    shares = torch.tensor(
        [len(each) / len(curve.sets[-1]) for each in curve.sets], dtype=torch.float64
    )

    def removable(accuracies: Float[Tensor, "draws removed"]) -> Float[Tensor, " draws"]:
        tolerated = 100 * (accuracies[:, :1] - accuracies) <= TOLERATED + _ROUNDING
        return shares[tolerated.long().cumprod(1).sum(1) - 1]

    share = float(removable(right.mean(1)[None])[0])
    counts = sizes_of_groups(len(curve), groups)
    if not enough_to_draw(counts):
        return Estimate(share, n=len(curve))
    drawn = removable(resampled_means(right, groups=groups, seed=seed))
    low, high = drawn_interval(drawn.numpy(), counts)
    return Estimate(share, float(low), float(high), len(curve))


def greedy_order(
    bench: Bench,
    units: Sequence[Unit],
    *,
    every: int = 1,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Removal, float]:
    """Remove the unit whose removal raises the loss least, rank the others again without it, and so
    on.

    Returns the order, the first removed first, and the full forward passes spent an image. every:
    units removed before ranking again; advance: called with the number of units removed. Each
    round's clean pass is that of the model without the units removed so far, so every candidate
    takes a replay from its own layer: for h heads about h²/2 replays of half a forward pass, so
    h²/4 passes an image instead of h²/2; `every` divides the cost.
    """
    measured = replace(bench.with_means(units), progress=silent, memory=None)
    spent = float(measured.means is not bench.means)
    removed: Removal = ()
    candidates = list(units)
    while candidates:
        outcomes = measured.without([(unit,) for unit in candidates], given=removed)
        spent += outcomes.forward_equivalents
        order = outcomes.loss.sum(1).argsort(stable=True).tolist()
        candidates = [candidates[index] for index in order]
        advance(len(candidates[:every]))
        removed = (*removed, *candidates[:every])
        candidates = candidates[every:]
    return removed, spent


def pairwise(
    bench: Bench,
    units: Sequence[Unit],
    pairs: Sequence[tuple[int, int]],
    images: Some | None = None,
    *,
    what: str,
) -> tuple[MeanChange, Float[Tensor, " pairs"], Float[Tensor, " units"], str]:
    """Return the synergy of pairs of units: the effect of removing both minus the sum of the
    effects, change of loss in nats.

    Positive: one compensates for the removal of the other (removing both costs more than the sum);
    negative: they depend on each other (once one is removed, removing the other costs less). pairs:
    as indices of units; images: some of the bench's (None: all). Returns the synergy with intervals
    and tests, paired over images (or groups), Holm over the pairs; the mean effect of removing both
    of each pair; of removing each unit; and what a report must say, or "".
    """
    sets = [
        *((unit,) for unit in units),
        *((units[first], units[second]) for first, second in pairs),
    ]
    outcomes = bench.without(sets, images, what=what)
    count = len(units)
    effect, (first, second) = outcomes.delta_loss, map(list, zip(*pairs))
    beyond = effect[count:] - effect[first] - effect[second]
    groups = bench.groups if bench.groups is None or images is None else bench.groups[images]
    (change,) = mean_changes((beyond,), families=[0] * len(beyond), groups=groups, seed=bench.seed)
    few = (
        ""
        if change.low.isfinite().all()
        else "no intervals and no tests: they need at least 2 images (or groups)"
    )
    clusters = len(sizes_of_groups(effect.shape[1], groups))
    fewest = fewest_images(len(pairs))
    if 1 < clusters < fewest:
        few = (
            f"with {clusters} images (or groups) no pair of heads can be significant after Holm's "
            "correction for "
            f"{len(pairs)} tests: that takes at least {fewest}"
        )
    note = "; ".join(filter(None, (outcomes.note, few)))
    return change, effect[count:].mean(1), effect[:count].mean(1), note


def head_similarity(
    bench: Bench, heads: Sequence[Unit], images: Some | None = None
) -> Float[Tensor, "heads others"]:
    """Linear CKA of heads' outputs over tokens and images: 1 on the diagonal, NaN where their
    layers' tokens differ.

    Unbiased, so that it is near 0, also below, for unlike heads, and exact over any number of
    images (see vitlens/analysis/features/cka.py). The windows of Swin are compared within a layer.
    """
    alike = dict[tuple[int, ...], list[int]]()
    for row, head in enumerate(heads):
        layer = layer_at(bench.model, head.layer)
        key = (
            (layer.queries,) if layer.windows == 1 else (layer.queries, layer.windows, layer.index)
        )
        alike.setdefault(key, []).append(row)
    places = [f"blocks.{head.layer}.heads" for head in heads]
    streams = [CKAStream(centred=False) for _ in alike]
    for rows in bench.share(images).split(bench.size):
        captured = capture(
            bench.model, bench.images[rows].to(bench.model.device), sorted(set(places))
        )
        for stream, own in zip(streams, alike.values()):
            outputs = [captured[places[row]].select(-3, heads[row].head or 0) for row in own]
            if bench.model.device.type == "mps":  # which has no float64
                outputs = [output.cpu() for output in outputs]
            step = max(1, _ROWS // outputs[0][0, ..., 0].numel())
            for start in range(0, len(rows), step):
                stream.add([output[start : start + step].flatten(0, -2) for output in outputs])
    matrix = torch.full((len(heads), len(heads)), torch.nan, dtype=torch.float64)
    for stream, own in zip(streams, alike.values()):
        stream.join(bench.processes.total)
        matrix[torch.tensor(own)[:, None], torch.tensor(own)] = stream.cka()
    return matrix
