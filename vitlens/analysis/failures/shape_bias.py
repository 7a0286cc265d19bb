"""Shape bias (Geirhos 2019): how often a model predicts the shape's class on cue-conflict images."""

from collections.abc import Callable
from dataclasses import dataclass

from vitlens.analysis.evaluation.classes import reading
from vitlens.analysis.evaluation.evaluate import accuracy, predicted_logits
from vitlens.data.cue_conflict import Cues, cues_of
from vitlens.data.split import Split, as_split, takes_splits
from vitlens.errors import DataError
from vitlens.models.model import Model
from vitlens.pixels import AnyImages
from vitlens.shapes import Labels
from vitlens.summary import Summary
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class ClassBias:
    """One shape class: how many of its n images are classified by shape and by texture."""

    class_name: str
    n: int
    shape: int
    texture: int

    @property
    def share(self) -> float | None:
        """The share of predictions by shape among those by shape or texture."""
        either = self.shape + self.texture
        return self.shape / either if either else None


@dataclass(frozen=True, repr=False)
class ShapeBias(Summary):
    """A model's shape bias on n images whose shape and texture differ.

    bias: predictions of the shape's class among those of either the shape's or the texture's, with its interval, None
    without any; shape, texture: the share of all n images classified so; by_class: counts for each shape class.
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
    images: AnyImages,
    *,
    batch_size: int | None = None,
    precision: str = "fp32",
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> ShapeBias:
    """The model's shape bias on images named shapeN-textureM; ImageNet's classes are grouped into Geirhos's 16.

    images: a Split, or the folder of such images in folders of their shape's class. Intervals are over the sources of
    shape, as images that share one are alike. Raises DataError for other images, InputError when the classes do not
    match.

    >>> import vitlens
    >>> from vitlens.models.loading import untrained
    >>> data = vitlens.load_data("shapes-conflict", limit=16)
    >>> vitlens.shape_bias(untrained("resnet20", classes=data.classes), data).shape.n
    16
    """
    split = as_split(images)
    model.require_classifier()
    cues = require_cues(split)
    read = reading(model.classes, split.classes)
    logits = predicted_logits(model, split, batch_size=batch_size, precision=precision, advance=advance)
    return bias_of(read.read(logits).argmax(-1), cues, split.classes, alias=model.alias, note=read.note, seed=seed)


def require_cues(split: Split) -> Cues:
    """The cues of a split. Raises DataError where its file names contain none, or no image has conflicting cues."""
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
    """The shape bias of predictions (n,), indices of which the first len(classes) are the data's classes.

    Images whose shape and texture agree are left out.
    """
    conflict = cues.conflict
    guess, shape, texture = predictions[conflict], cues.shape[conflict], cues.texture[conflict]
    groups = cues.source[conflict]
    by_shape, by_texture = guess == shape, guess == texture
    decided = by_shape | by_texture
    bias = accuracy(by_shape[decided], groups=groups[decided], seed=seed) if decided.any() else None
    counted = []
    for index in shape.unique().tolist():
        own = shape == index
        counted.append(ClassBias(classes[index], *(int(each.sum()) for each in (own, by_shape[own], by_texture[own]))))
    shaped, textured = (accuracy(each, groups=groups, seed=seed) for each in (by_shape, by_texture))
    return ShapeBias(alias, bias, shaped, textured, tuple(counted), note)
