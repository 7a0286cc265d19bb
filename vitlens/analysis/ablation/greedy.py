"""A greedy order of removal: heads are ranked again after each removal."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlens.analysis.ablation.effects import Unit
from vitlens.analysis.ablation.joint import loss_and_correct
from vitlens.analysis.ablation.replacements import MeanOutputs, Replacements, means_of, other_images, prepared
from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.attention.gradients import check_targets
from vitlens.errors import InputError
from vitlens.lens.intervene import intervened
from vitlens.lens.replay import DEFAULT_BUDGET, Replay, replaying
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.shapes import Images, Labels


@dataclass(frozen=True)
class Greedy:
    """order: the first removed first; forward_equivalents: full forward passes spent an image."""

    order: tuple[Unit, ...]
    forward_equivalents: float


def greedy_order(
    model: Model,
    images: Images,
    labels: Labels,
    units: Sequence[Unit],
    *,
    every: int = 1,
    count: int | None = None,
    replace: Replacement = "mean",
    means: MeanOutputs | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    budget: int = DEFAULT_BUDGET,
    advance: Callable[[int], object] = lambda _: None,
) -> Greedy:
    """Remove the unit whose removal raises the loss least, rank the others again without it, and so on.

    every: units removed before ranking again; count: stop ranking after this many are removed (None: all), the others
    follow in their last ranking; means: of the data (None: of these images); advance: called with the number of units
    removed. Other arguments as measure_effects; batch_size: images at a time.

    Each round's clean pass is that of the model without the units removed so far, so every candidate takes a replay
    from its own layer: for h heads about h²/2 replays of half a forward pass, so h²/4 passes an image instead of h²/2;
    `every` divides the cost.
    """
    if every < 1 or not units:
        raise InputError(f"expected units, and at least 1 removed in a round, found {len(units)} and {every}")
    size = batch_size or fitting_batch_size(model)
    others = images[other_images(len(images), seed=seed).to(images.device)] if replace == "resample" else images
    batches = [
        tuple(each.to(model.device) for each in parts)
        for parts in zip(images.split(size), labels.split(size), others.split(size))
    ]
    spent = 0.0
    if replace == "mean" and means is None:
        means, spent = means_of(model, [part for part, _, _ in batches]), 1.0
    removed: list[Unit] = []
    candidates = list(units)
    while candidates and len(removed) < (len(units) if count is None else count):
        total = torch.zeros(len(candidates), dtype=torch.float64)
        for part, truth, donors in batches:
            tensors, cost = _tensors(model, part, donors, units, replace, means, budget)
            losses, more = _round(model, part, truth, removed, candidates, replace, tensors, budget)
            total += losses.sum(1)
            spent += (cost + more) * len(part) / len(images)
        candidates = [candidates[index] for index in total.argsort(stable=True).tolist()]
        advance(len(candidates[:every]))
        removed, candidates = removed + candidates[:every], candidates[every:]
    return Greedy(tuple(removed + candidates), spent)


def _tensors(
    model: Model,
    images: Images,
    donors: Images,
    units: Sequence[Unit],
    replace: Replacement,
    means: MeanOutputs | None,
    budget: int,
) -> tuple[Replacements, float]:
    """The replacements of the units, from the unchanged model, and their cost in full forward passes."""
    if replace == "zero" or means is not None:
        return {} if means is None or replace == "zero" else means.replacements(units), 0.0
    with prepared(model, images, units, replace=replace, donors=donors, budget=budget) as ready:
        return ready.replacements(tuple(units)), ready.forward_equivalents


def _round(
    model: Model,
    images: Images,
    labels: Labels,
    removed: Sequence[Unit],
    candidates: Sequence[Unit],
    replace: Replacement,
    tensors: Replacements,
    budget: int,
) -> tuple[Tensor, float]:
    """Each image's loss without the removed units and each candidate (candidates, batch), and the cost in passes."""
    already = [unit.intervention(replace) for unit in removed]
    with ExitStack() as stack:
        with intervened(model, already, replacements=tensors):
            replay = stack.enter_context(replaying(model, images, budget=budget))
        sets = [
            [
                unit.intervention(replace),
                *(each.intervention(replace) for each in _removed_again(replay, removed, unit)),
            ]
            for unit in candidates
        ]
        loss, _ = loss_and_correct(replay.run(sets, replacements=tensors), check_targets(labels, replay.logits))
        return loss, replay.forward_equivalents


def _removed_again(replay: Replay, removed: Sequence[Unit], unit: Unit) -> list[Unit]:
    """The removed units that must be removed again: those in layers that a replay from the unit's layer runs again."""
    if not replay.exact or replay.cache == "nothing":
        return list(removed)
    return [each for each in removed if each.layer >= unit.layer]
