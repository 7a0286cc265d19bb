"""Shape bias (Geirhos 2019): where shape and texture say different classes, which of the two a model answers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlens.analysis.answers.classes import reading
from vitlens.analysis.answers.evaluate import accuracy, answers
from vitlens.data.cue_conflict import Cues, cues_of
from vitlens.data.split import Split, takes_splits
from vitlens.errors import DataError
from vitlens.models.model import Model
from vitlens.shapes import Labels
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class ClassBias:
    """One shape's class: how many of its n images were answered by shape, by texture, or by neither."""

    name: str
    n: int
    shape: int
    texture: int


@dataclass(frozen=True)
class ShapeBias:
    """What a model went by on n images whose shape and texture differ.

    bias: answers by shape among those by shape or texture, with its interval, None where there is neither; shape,
    texture: the share of all n images that is answered so; by_class: the same counts for each shape's class.
    """

    alias: str
    bias: Estimate | None
    shape: Estimate
    texture: Estimate
    by_class: tuple[ClassBias, ...]
    note: str = ""


@takes_splits
def shape_bias(
    model: Model,
    split: Split,
    *,
    batch_size: int | None = None,
    precision: str = "fp32",
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> ShapeBias:
    """The model's shape bias on images named shapeN-textureM; ImageNet's classes are grouped into Geirhos's 16.

    Intervals draw sources of shape, as images that share one are alike. Raises DataError for images of another kind,
    InputError when the classes do not match.
    """
    model.require_classifier()
    cues = require_cues(split)
    read = reading(model.classes, split.classes)
    logits = answers(model, split, batch_size=batch_size, precision=precision, advance=advance)
    return bias_of(read.read(logits).argmax(-1), cues, split.classes, alias=model.alias, note=read.note, seed=seed)


def require_cues(split: Split) -> Cues:
    """The cues of a split. Raises DataError where its files do not tell of any, or where no two differ."""
    cues = cues_of(split)
    if cues is None or not cues.conflict.any():
        raise DataError(
            f"expected images named shapeN-textureM in folders of their shape's class, found others in {split.name}; "
            "try --data shapes-conflict"
        )
    return cues


def bias_of(
    predictions: Labels, cues: Cues, classes: tuple[str, ...], *, alias: str = "", note: str = "", seed: int = 0
) -> ShapeBias:
    """The shape bias of predictions (n,), indices of which the first len(classes) stand for the data's classes.

    Images whose shape and texture agree are left out: they say nothing.
    """
    kept = cues.conflict
    guess, shape, texture = predictions[kept], cues.shape[kept], cues.texture[kept]
    groups = cues.source[kept]
    by_shape, by_texture = guess == shape, guess == texture
    decided = by_shape | by_texture
    bias = accuracy(by_shape[decided], groups=groups[decided], seed=seed) if decided.any() else None
    return ShapeBias(
        alias,
        bias,
        accuracy(by_shape, groups=groups, seed=seed),
        accuracy(by_texture, groups=groups, seed=seed),
        tuple(
            ClassBias(classes[index], int(mine.sum()), int(by_shape[mine].sum()), int(by_texture[mine].sum()))
            for index, mine in _members(shape)
        ),
        note,
    )


def _members(shape: Labels) -> list[tuple[int, Tensor]]:
    """Each class that is the shape of some image, and which images those are."""
    return [(index, shape == index) for index in torch.unique(shape).tolist()]
