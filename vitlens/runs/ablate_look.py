"""All that a run of `vitlens ablate` measures, in one process or several; nothing is written here but its progress."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vitlens.analysis.ablation.ablate import measure_effects
from vitlens.analysis.ablation.adaptive import Adaptive, most_important
from vitlens.analysis.ablation.effects import Effects, Unit
from vitlens.analysis.ablation.first_order import first_order
from vitlens.analysis.ablation.greedy import greedy_order
from vitlens.analysis.ablation.importance import summarise
from vitlens.analysis.ablation.pairs import Pairs, Redundancy, RedundancyStream, Synergy, pairwise, synergy
from vitlens.analysis.ablation.removal import (
    AblationCurve,
    random_order,
    removal_curves,
    removal_matters,
    share_removable,
    steps,
)
from vitlens.analysis.ablation.replacements import MeanOutputs, means_of
from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.devices import autocast
from vitlens.names import Replacement
from vitlens.processes import share_of
from vitlens.runs.ablate_work import Found, Work
from vitlens.runs.progress import progress

POINTS = 9  # of a removal curve
CURVED = 256  # images of a removal curve and of pairs, at most: every point costs most of a forward pass
RANDOM_ORDERS = 2
FEWEST = 10  # images to rank on and to test on; below twice as many, both are the same


def look(work: Work) -> Found:
    """Everything that was asked for, in an order in which each step builds on the ones before."""
    found = Found()
    choices = work.choices
    with autocast(work.model.device, work.options.precision):
        if choices.top is not None:
            found.adaptive = _adaptive(work)
            return found
        means = _means(work)
        for replacement in choices.replace:
            found.effects[replacement], found.firsts[replacement] = _effects(work, replacement, means)
            found.importance[replacement] = summarise(
                found.effects[replacement],
                groups=work.split.groups,
                first=found.firsts[replacement],
                classes=len(work.model.classes) if work.split.classes else 0,  # labels are columns of the logits
                seed=work.options.seed,
            )
        ranked = found.importance[choices.replace[0]].is_ranked("head")  # else there is no order to remove heads in
        if choices.curves and len(work.heads) > 1 and ranked:
            _curves(work, found, means)
        if choices.pairs and len(work.heads) > 1:
            found.redundancy = _redundancy(work)
            found.synergy = _synergy(work, found, means) if ranked else None
    return found


def _means(work: Work) -> MeanOutputs | None:
    """The means of the data; None where nothing needs them, or where one batch holds all images: its own clean pass
    then gives them."""
    wanted = "mean" in work.choices.replace
    alone = work.processes.count == 1 and len(work.split) <= (work.options.batch_size or fitting_batch_size(work.model))
    if not wanted or (alone and not work.choices.curves and not work.choices.pairs):
        return None
    with progress("Means", len(work.split), quiet=work.options.quiet) as advance:
        means = means_of(work.model, _told(work, advance))
    means.join(work.processes.total)
    return means


def _told(work: Work, advance: Callable[[int], None]) -> Iterator[Tensor]:
    for part in work.batches():
        yield part.images
        advance(len(part.images) * work.processes.count)


def _effects(work: Work, replacement: Replacement, means: MeanOutputs | None) -> tuple[Effects, Tensor]:
    """The effects of all units on all images, and the first-order estimates (units, n), gathered from all processes."""
    parts: list[Effects] = []
    firsts: list[Tensor] = []
    total = len(share_of(work.split, work.processes)) * len(work.units)
    seed = work.options.seed
    with progress(f"Removing each unit ({replacement})", total, unit="removals", quiet=work.options.quiet) as advance:
        for part in work.batches():
            whole = (work.model, part.images, part.labels, work.units)
            parts.append(
                measure_effects(
                    *whole, replace=replacement, means=means, donors=part.donors, seed=seed, offset=part.offset,
                    advance=lambda units: advance(units * len(part.images)),  # noqa: B023
                    memory=work.store.batch(replacement, part.offset, part.images, part.labels),
                )
            )  # fmt: skip
            firsts.append(first_order(*whole, replace=replacement, means=means, donors=part.donors))
    gathered = work.processes.gathered(torch.cat(firsts, 1).T.contiguous()).T
    return Effects.join(parts).gathered(work.processes), gathered


def _curves(work: Work, found: Found, means: MeanOutputs | None) -> None:
    """Heads removed in the orders of the importance, ranked on one half of the images and measured on the other."""
    count, heads = len(work.split), work.heads
    half = count >= 2 * FEWEST
    ranked, tested = (torch.arange(count)[0::2], torch.arange(count)[1::2]) if half else (torch.arange(count),) * 2
    found.ranked_on = len(ranked)
    main = work.choices.replace[0]
    orders = dict(_orders(work, found, main, ranked))
    if work.choices.greedy:
        chosen = ranked[:CURVED]
        images = work.split.pick(chosen)
        (batch,) = images.batches(len(chosen), device=work.model.device)
        labels = work.labels[chosen].to(work.model.device)
        greedy = greedy_order(
            work.model, batch.images, labels, heads, every=max(1, len(heads) // 12), replace=main, means=means
        )
        orders["greedy"], found.greedy_cost = greedy.order, greedy.forward_equivalents
    tested = tested[:CURVED]
    removed = steps(len(heads), points=POINTS)
    joined: dict[str, list[AblationCurve]] = {}
    total = len(tested[work.processes.index :: work.processes.count]) * len(orders) * len(removed)
    with progress("Removing heads in order", total, unit="removals", quiet=work.options.quiet) as advance:
        for part in work.batches(tested):
            curves = removal_curves(
                work.model, part.images, part.labels, orders, removed=removed, replace=main, means=means,
                donors=part.donors, seed=work.options.seed, offset=part.offset,
                advance=lambda points: advance(points * len(part.images)),  # noqa: B023
            )  # fmt: skip
            for name, curve in curves.items():
                joined.setdefault(name, []).append(curve)
    for name, parts in joined.items():
        curve = AblationCurve.join(parts)
        found.curves[name] = AblationCurve(curve.order, curve.removed, curve.outcomes.gathered(work.processes))
    groups, least = None if work.split.groups is None else work.split.groups[tested], found.curves["least first"]
    if removal_matters(least, groups=groups):
        found.removable = share_removable(least, groups=groups, seed=work.options.seed)


def _orders(work: Work, found: Found, main: Replacement, ranked: Tensor) -> Iterator[tuple[str, tuple[Unit, ...]]]:
    units, effects = found.effects[main].units, found.effects[main].delta_loss[:, ranked].mean(1)
    estimates = found.firsts[main][:, ranked].mean(1)
    heads = [index for index, unit in enumerate(units) if unit.kind == "head"]
    by_effect = sorted(heads, key=lambda index: float(effects[index]))
    yield "least first", tuple(units[index] for index in by_effect)
    yield "most first", tuple(units[index] for index in reversed(by_effect))
    if not estimates[heads].isnan().any():
        by_estimate = sorted(heads, key=lambda index: float(estimates[index]))
        yield "first-order", tuple(units[index] for index in by_estimate)
    for number in range(RANDOM_ORDERS):
        yield f"random {number}", random_order(work.heads, seed=work.options.seed + number)


def _redundancy(work: Work) -> Redundancy:
    stream = RedundancyStream(work.model)
    for part in work.batches(torch.arange(len(work.split))[:CURVED]):
        stream.add(part.images)
    stream.join(work.processes.total)
    return stream.result()


def _synergy(work: Work, found: Found, means: MeanOutputs | None) -> Synergy:
    """The most important heads removed two by two."""
    main = work.choices.replace[0]
    top = found.importance[main].ranking("head")[: max(2, work.choices.pairs)]
    chosen = torch.arange(len(work.split))[:CURVED]
    mine = len(chosen[work.processes.index :: work.processes.count])
    sets = len(top) * (len(top) + 1) // 2
    parts = []
    with progress("Removing pairs of heads", mine * sets, unit="removals", quiet=work.options.quiet) as advance:
        for part in work.batches(chosen):
            parts.append(
                pairwise(
                    work.model, part.images, part.labels, top, replace=main, means=means, donors=part.donors,
                    seed=work.options.seed, offset=part.offset, advance=lambda pairs: advance(pairs * len(part.images)),  # noqa: B023
                )
            )  # fmt: skip
    pairs = Pairs.join(parts)
    gathered = Pairs(pairs.units, pairs.pairs, pairs.outcomes.gathered(work.processes))
    groups = None if work.split.groups is None else work.split.groups[chosen]
    return synergy(gathered, groups=groups, seed=work.options.seed)


def _adaptive(work: Work) -> Adaptive:
    """The most important heads alone; all processes do the same work, which is too little to share."""
    (batch,) = work.split.batches(len(work.split), device="cpu")
    k = work.choices.top or 1
    with progress(
        "Telling heads apart", len(work.split) * len(work.heads), unit="removals", quiet=work.options.quiet
    ) as a:
        return most_important(
            work.model, batch.images, work.labels, k=k, replace=work.choices.replace[0],
            units=work.heads, batch_size=work.options.batch_size, seed=work.options.seed, advance=a,
        )  # fmt: skip
