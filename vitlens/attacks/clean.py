"""The clean images: which of them the model classifies correctly, and the order of the other classes' logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.attacks.defaults import TARGETS
from vitlens.attacks.evaluation import frozen
from vitlens.errors import InputError, NonFiniteError
from vitlens.models.model import Model
from vitlens.pixels import Parts
from vitlens.shapes import Labels

PREDICTED = "predicted"


@dataclass(frozen=True)
class CleanImages:
    """The images before an attack, on the device of the images passed in, or read from a Split as they are needed.

    correct: whether the model predicts the label; runners_up: other classes, most likely first; indices: of the images
    in the data set.
    """

    images: Parts
    labels: Labels
    correct: Bool[Tensor, " batch"]
    runners_up: Int[Tensor, "batch others"]
    indices: Int[Tensor, " batch"]

    def notes(self, alias: str) -> tuple[str, ...]:
        """Caveats that a report states before its curves."""
        if self.correct.any():
            return ()
        return (f"{alias} misclassifies all {len(self.labels)} clean images: there is nothing to attack",)


def clean_images(
    model: Model,
    images: Parts,
    labels: Tensor | str | None,
    *,
    indices: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> CleanImages:
    """The clean images, once the labels are checked and the model has been run on them.

    labels: class indices, or "predicted". Raises InputError for invalid labels or indices, NonFiniteError naming model
    and image.
    """
    model.require_classifier()
    positions = torch.arange(len(images)) if indices is None else torch.tensor(indices, dtype=torch.int64)
    if len(positions) != len(images):
        raise InputError(f"expected one index per image ({len(images)}), found {len(positions)}")
    with frozen(model), torch.no_grad():
        parts = images.split(batch_size or fitting_batch_size(model))
        logits = torch.cat([model(part.to(model.device)).cpu() for part in parts])
    broken = (~logits.isfinite()).any(1).nonzero().flatten()
    if len(broken):
        raise NonFiniteError(
            f"expected finite logits, found NaN or infinity from {model.alias} on image {int(positions[broken[0]])}"
        )
    classes = logits.shape[1]
    if classes < 2:
        raise InputError(f"expected a model of at least 2 classes to attack, found {classes}")
    predicted = isinstance(labels, str) and labels == PREDICTED
    truth = logits.argmax(1) if predicted else require_labels(labels, len(images), classes)
    others = logits.scatter(1, truth[:, None], -torch.inf)
    runners_up = others.topk(min(TARGETS, classes - 1), dim=1).indices
    return CleanImages(images, truth, logits.argmax(1) == truth, runners_up, positions)


def require_labels(labels: Tensor | str | None, count: int, classes: int) -> Labels:
    """The labels on the CPU. Raises InputError unless there is one per image, and each is a class."""
    if labels is None or isinstance(labels, str):
        value = "none" if labels is None else repr(labels)
        raise InputError(
            f"expected a label for each image, found {value}; labels={PREDICTED!r} attacks the prediction, and a Split "
            "or a folder of class folders has labels"
        )
    if len(labels) != count:
        raise InputError(f"expected one label per image ({count}), found {len(labels)}")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise InputError(f"expected labels from 0 to {classes - 1}, found {int(wrong[0])}")
    return labels.detach().cpu().long()
