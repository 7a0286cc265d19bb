"""The k most important heads, without measuring all heads on all images.

One pass with gradients gives the first-order estimate of every head on every image (and the means, where a head's mean
replaces its output); the exact effects are then measured on few images for successively fewer heads, and regressed on
the estimate, which is known for all images. The pass is skipped where it would take too large a share of the budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from vitlens.analysis.ablation.ablate import measure_effects, units_of
from vitlens.analysis.ablation.effects import Effects, PerUnit, Unit, UnitsByImage
from vitlens.analysis.ablation.elimination import LIMIT, Costs, eliminate
from vitlens.analysis.ablation.elimination import Adaptive as Adaptive
from vitlens.analysis.ablation.first_order import GRAPH, gradient_times_change, head_gradients
from vitlens.analysis.ablation.replacements import MeanOutputs, means_of, other_images
from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.errors import InputError
from vitlens.lens.interventions import HeadReplaced
from vitlens.lens.replay import replaying
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.shapes import Images, Labels

_REFERENCE = 32  # images whose mean output approximates that of all images in the estimate
_GRADIENT_PASS = 2.0  # forward equivalents: no weight needs a gradient, so the backward pass costs one more
_SHARE = 0.5  # of the budget: the most that the estimate may cost


@dataclass(frozen=True)
class _Task:
    model: Model
    images: Images
    labels: Labels
    units: tuple[Unit, ...]
    replace: Replacement
    size: int
    order: Int[Tensor, " batch"]


def most_important(
    model: Model,
    images: Images,
    labels: Labels,
    *,
    k: int,
    confidence: float = 0.95,
    limit: float = LIMIT,
    replace: Replacement = "mean",
    means: MeanOutputs | None = None,
    units: Sequence[Unit] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> Adaptive:
    """The k most important heads, measured on as few images as separate them from the others, within a cost limit.

    images (n, 3, height, width), labels (n,): as for `ablate`; limit: the greatest cost, as a share of that of
    measuring all heads on all images; means: of the data (None: computed in the pass with gradients, and counted);
    units: the heads to choose from (None: all); advance: called with the number of removals (heads x images) just
    measured. Raises InputError unless 1 <= k <= heads.
    """
    heads = units_of(model, kinds=("head",)) if units is None else tuple(units)
    if any(unit.kind != "head" for unit in heads) or len(images) != len(labels) or not len(images):
        raise InputError(f"expected heads to rank, and a label for each of {len(images)} images, found {len(labels)}")
    n, size = len(images), batch_size or fitting_batch_size(model)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    task = _Task(model, images, labels, heads, replace, size, order)
    each, passes = _unit_costs(task), float(replace == "mean" and means is None)
    every = 2.0 if replace == "resample" else 1.0  # another image's clean pass
    exact = passes + every + float(each.sum())
    estimate = None
    if _SHARE * limit * exact >= _GRADIENT_PASS:
        estimate, own = _estimate(task, means)
        means = own if passes else means
        passes = _GRADIENT_PASS
    elif passes:
        means = means_of(model, [part.to(model.device) for part in images.split(size)])
    others = other_images(n, seed=seed) if replace == "resample" else None

    return eliminate(
        partial(_effects, task, means, others, advance),
        heads,
        n,
        k=k,
        costs=Costs(each, every, passes, exact),
        estimate=estimate,
        order=order,
        confidence=confidence,
        limit=limit,
    )


def _effects(
    task: _Task,
    means: MeanOutputs | None,
    others: Tensor | None,
    advance: Callable[[int], object],
    chosen: tuple[Unit, ...],
    rows: Tensor,
) -> Effects:
    """The effects of removing the chosen heads on the images of these rows; others: the donor of each image."""
    parts = []
    for part in rows.split(task.size):
        donors = None if others is None else task.images[others[part]].to(task.model.device)
        batch = task.images[part].to(task.model.device)
        parts.append(
            measure_effects(
                task.model, batch, task.labels[part], chosen, replace=task.replace, means=means, donors=donors
            )
        )
        advance(len(chosen) * len(part))
    return Effects.join(parts)


def _unit_costs(task: _Task) -> PerUnit:
    """The cost of each head's removal in full forward passes, measured on one image."""
    by_layer: dict[int, float] = {}
    with replaying(task.model, task.images[:1].to(task.model.device)) as replay:
        for unit in task.units:
            if unit.layer not in by_layer:
                before = replay.forward_equivalents
                replay.run([HeadReplaced(unit.layer, unit.head or 0)])
                by_layer[unit.layer] = replay.forward_equivalents - before
    return torch.tensor([by_layer[unit.layer] for unit in task.units], dtype=torch.float64)


def _estimate(task: _Task, means: MeanOutputs | None) -> tuple[UnitsByImage, MeanOutputs]:
    """The first-order estimate (units, n) of every head on every image, and the means of the heads' outputs.

    Outputs are replaced by the given mean or by that of a few images, also with "resample": the effects are regressed
    on the estimate, which therefore need not be unbiased, only the same function for every image.
    """
    own, device = MeanOutputs(), task.model.device
    reference = {}
    if task.replace != "zero":
        batch = task.images[task.order[:_REFERENCE]].to(device)
        reference = (means or means_of(task.model, [batch])).replacements(task.units)
    values = torch.zeros(len(task.units), len(task.images), dtype=torch.float64)
    for rows in task.order.split(max(1, task.size // GRAPH)):
        images, labels = task.images[rows].to(device), task.labels[rows].to(device)
        outputs = head_gradients(task.model, images, labels, {unit.layer for unit in task.units})
        own.add_heads({layer: output for layer, (output, _) in outputs.items()}, len(rows))
        for row, unit in enumerate(task.units):
            values[row, rows] = gradient_times_change(outputs, unit, reference.get(unit.intervention("mean")))
    return values, own
