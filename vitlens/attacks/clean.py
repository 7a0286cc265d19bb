"""The images before any attack: which of them the model gets right, and which classes follow in its logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.attacks.defaults import TARGETS
from vitlens.attacks.evaluation import attacked
from vitlens.errors import InputError, NonFiniteError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels

PREDICTED = "predicted"


@dataclass(frozen=True)
class CleanImages:
    """The images that are attacked, on the CPU or wherever they were handed in.

    correct: whether the model predicts the label; runners_up: other classes, the likeliest first; indices: of the
    images within the whole data, whatever part of it this is.
    """

    images: Images
    labels: Labels
    correct: Bool[Tensor, " batch"]
    runners_up: Int[Tensor, "batch others"]
    indices: Int[Tensor, " batch"]

    def notes(self, alias: str) -> tuple[str, ...]:
        """What a report must say before it shows a curve."""
        if self.correct.any():
            return ()
        return (f"{alias} is wrong on every one of the {len(self.labels)} images before any attack: nothing to attack",)


def clean_images(
    model: Model,
    images: Images,
    labels: Tensor | str | None,
    *,
    indices: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> CleanImages:
    """The images with what the model answers, after the labels have been checked.

    labels: class indices, or "predicted". Raises InputError for what cannot be attacked, NonFiniteError naming model
    and image.
    """
    model.require_classifier()
    images = images.detach()
    numbers = torch.arange(len(images)) if indices is None else torch.tensor(indices, dtype=torch.int64)
    if len(numbers) != len(images):
        raise InputError(f"expected one index an image ({len(images)}), found {len(numbers)}")
    with attacked(model), torch.no_grad():
        parts = images.split(batch_size or fitting_batch_size(model))
        logits = torch.cat([model(part.to(model.device)).cpu() for part in parts])
    broken = (~logits.isfinite()).any(1).nonzero().flatten()
    if len(broken):
        raise NonFiniteError(
            f"expected finite logits, found NaN or infinity from {model.alias} on image {int(numbers[broken[0]])}"
        )
    classes = logits.shape[1]
    if classes < 2:
        raise InputError(f"expected a model of at least 2 classes to attack, found {classes}")
    asked = isinstance(labels, str) and labels == PREDICTED
    truth = logits.argmax(1) if asked else require_labels(labels, len(images), classes)
    others = logits.scatter(1, truth[:, None], -torch.inf)
    runners_up = others.topk(min(TARGETS, classes - 1), dim=1).indices
    return CleanImages(images, truth, logits.argmax(1) == truth, runners_up, numbers)


def require_labels(labels: Tensor | str | None, count: int, classes: int) -> Labels:
    """The labels on the CPU. Raises InputError unless there is one an image, and each is a class."""
    if labels is None or isinstance(labels, str):
        found = "none" if labels is None else repr(labels)
        raise InputError(f"expected a label for each image, found {found}; labels={PREDICTED!r} attacks the prediction")
    if len(labels) != count:
        raise InputError(f"expected one label an image ({count}), found {len(labels)}")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise InputError(f"expected labels from 0 to {classes - 1}, found {int(wrong[0])}")
    return labels.detach().cpu().long()
