"""The exact change of loss and accuracy of each image when a head, an MLP or a block is removed.

A head's output before the output projection is replaced by its mean over the data at each token, by zero, or by
another image's. Each unit takes one replay from its own layer on.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace as changed

from torch import Tensor

from vitlens.analysis.ablation.effects import Effects, Unit
from vitlens.analysis.ablation.importance import Importance, summarise
from vitlens.analysis.ablation.joint import Memory as Memory
from vitlens.analysis.ablation.joint import measure_jointly as measure_jointly
from vitlens.analysis.ablation.replacements import (
    MeanOutputs,
    means_of,
    other_images,
    replacement_for,
    replacement_note,
)
from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.answers.targets import required_labels
from vitlens.errors import UnknownNameError, UnsupportedError
from vitlens.lens.layers import layers
from vitlens.lens.replay import DEFAULT_BUDGET
from vitlens.models.model import Model
from vitlens.models.support import needs_of, require
from vitlens.names import UNIT_KINDS, Replacement, UnitKind
from vitlens.pixels import AnyImages, Parts, as_parts, groups_of, takes_images
from vitlens.shapes import Images, Labels


def units_of(model: Model, *, kinds: Sequence[UnitKind] = UNIT_KINDS) -> tuple[Unit, ...]:
    """All heads, MLPs and blocks that can be removed, by kind, then by layer.

    Heads of a layer without an output projection that reads their concatenation are left out. Raises UnsupportedError
    for a model without attention (a CNN) or without such units.
    """
    for kind in kinds:
        if kind not in UNIT_KINDS:
            raise UnknownNameError("kind of unit", kind, UNIT_KINDS)
    known = layers(model)
    whole = {layer.unit: layer for layer in reversed(known)}  # a block with two attentions is one block
    own = {layer.index for layer in whole.values()}
    by_kind: dict[UnitKind, list[Unit]] = {
        "head": [Unit("head", layer.index, head) for layer in known if layer.head_dim for head in range(layer.heads)],
        "mlp": [Unit("mlp", layer.index) for layer in known if layer.mlp is not None and layer.index in own],
        "block": [
            Unit("block", layer.index)
            for layer in known
            if layer.removable and layer.unit != layer.attention and layer.index in own
        ],
    }
    units = tuple(unit for kind in kinds for unit in by_kind[kind])
    if not units:
        raise UnsupportedError(
            f"expected {' or '.join(kinds)} to remove from {model.alias}, found none that can be replaced separately"
        )
    return units


def require_heads(model: Model) -> None:
    """Raise UnsupportedError for a model without a head whose output can be replaced separately."""
    if not any(layer.head_dim for layer in layers(model)):
        reasons = (part.unread for part in model.anatomy.attention or () if part.unread)
        raise UnsupportedError(
            f"expected heads whose outputs are concatenated before an output projection in {model.alias}, found "
            f"none: {next(reasons, 'no head can be replaced separately')}"
        )


def measure_effects(
    model: Model,
    images: Images,
    labels: Labels,
    units: Sequence[Unit],
    *,
    replace: Replacement = "mean",
    means: MeanOutputs | None = None,
    donors: Images | None = None,
    seed: int = 0,
    offset: int = 0,
    budget: int = DEFAULT_BUDGET,
    advance: Callable[[int], object] = lambda _: None,
    memory: Memory | None = None,
) -> Effects:
    """Loss and prediction of every image of one batch without each of the units, by replay.

    labels (batch,): the true class as a column of the model's logits. means: of the data, for "mean" (None: of this
    batch's clean pass). "resample" replaces the output by that of another image: of `donors`, one for each image and
    different from it; without donors, of another image of the batch, in a seeded cyclic order. The order's seed is
    seed + offset; offset: the index of the batch's first image, also for messages. budget: bytes the replay may store;
    advance: called with the number of units just done. Raises InputError for a batch of one without donors,
    NonFiniteError naming unit and image.
    """
    joint = measure_jointly(
        model,
        images,
        labels,
        [(unit,) for unit in units],
        replace=replace,
        means=means,
        donors=donors,
        seed=seed,
        offset=offset,
        budget=budget,
        advance=advance,
        memory=memory,
    )
    return Effects(
        tuple(units),
        replace,
        joint.labels,
        joint.clean_loss,
        joint.clean_correct,
        joint.loss,
        joint.correct,
        joint.forward_equivalents,
        joint.note,
    )


@takes_images
def ablate(
    model: Model,
    images: AnyImages,
    labels: Tensor | str | None = None,
    *,
    replace: Replacement | None = None,
    kinds: UnitKind | Sequence[UnitKind] = ("head",),
    batch_size: int | None = None,
    seed: int = 0,
) -> Importance:
    """How much every head (and MLP, block) matters: the exact change of loss and accuracy without it, with intervals.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes, read a batch at a time; intervals
    and tests are over its groups where it is a Split that has them; labels: class indices (n,), or "predicted" (None:
    those of the Split or the class folders); replace: what replaces a
    head's output, its "mean" over the images (at least 8), "zero", or another image's output, "resample" (None: "mean",
    with 2 to 7 images "resample", with one "zero"; the result's `replace` and `note` say which); batch_size: images at
    a time (None: chosen to fit). Raises UnsupportedError for a model without attention or without a classifier,
    InputError for too few images.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> effect = vitlens.ablate(vit, torch.rand(8, 3, 32, 32), torch.arange(8))
    >>> effect.delta_loss.shape == effect.low.shape  # (layers, heads), nats
    True
    """
    model.require_classifier()
    images = as_parts(images)
    labels = required_labels(model, images, labels, batch_size=batch_size)
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    require(model, *(needs_of("ablate") if "head" in kinds else ("classifier", "attention")))
    units = units_of(model, kinds=kinds)
    effects = exact_effects(model, images, labels, units, replace=replace, batch_size=batch_size, seed=seed)
    return summarise(effects, groups=groups_of(images), seed=seed)


def exact_effects(
    model: Model,
    images: Parts,
    labels: Labels,
    units: Sequence[Unit],
    *,
    replace: Replacement | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Effects:
    """The effects of every unit on each of any number of images; replace: None as for `ablate`."""
    by, size = replacement_for(len(images), replace), batch_size or fitting_batch_size(model)
    several = by == "mean" and len(images) > size
    means = means_of(model, (batch.to(model.device) for batch in images.split(size))) if several else None
    others = other_images(len(images), seed=seed) if by == "resample" else None
    parts = []
    for start in range(0, len(images), size):
        part = slice(start, start + size)
        batch = images[part].to(model.device)
        donors = None if others is None else images[others[part]].to(model.device)
        parts.append(
            measure_effects(model, batch, labels[part], units, replace=by, means=means, donors=donors, offset=start)
        )
    effects = Effects.join(parts)
    if replace is None and by != "mean":
        note = "; ".join(filter(None, (effects.note, replacement_note(len(images), by))))
        effects = changed(effects, note=note)
    if several:
        effects = changed(effects, forward_equivalents=effects.forward_equivalents + 1)  # the pass for the means
    return effects
