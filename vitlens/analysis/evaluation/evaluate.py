"""Predictions of a model on a split: accuracy, accuracy by class, confusion, calibration.

`images` turns pictures into the input of a model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.evaluation.rows import CalibrationRow, ClassRow, ConfusionRow
from vitlens.classes import reading
from vitlens.data.catalogue import read_pictures
from vitlens.data.split import Split, as_split
from vitlens.devices import autocast, evaluating
from vitlens.errors import DataError, NonFiniteError, argument
from vitlens.inputs import takes_splits
from vitlens.models.model import Model, require_model
from vitlens.pixels import AnyImages
from vitlens.resampling import drawn_interval, enough_to_draw
from vitlens.shapes import Images, Labels, Logits
from vitlens.summary import Line, Table
from vitlens.uncertainty import Estimate, share_of

BACKWARD = 3  # a backward pass needs about this many times the memory of a forward pass
_DRAWS = 1_000  # bootstrap samples for the interval of the calibration error
_PERFECT_DRAWS = 100  # samples of a perfectly calibrated model, of which only the mean is used
_MOST_ON_CPU = 64  # images of a batch; more activations would not fit into the processor's cache
BINS = 15  # bins of the expected calibration error, of equal width
# images of 224x224 px that fit into memory together
_IMAGES_ON_CPU = 32
_IMAGES_ON_GPU = 128
_LARGEST_BATCH = 512


@dataclass(frozen=True, repr=False)
class Evaluation(Table):
    """The logits of a model on a labelled split.

    alias: the alias of the model.
    classes: the names of the classes, those of the split first, then the others of the model.
    logits (n, classes): the logits in fp32 on the CPU. Columns are in the order of classes.
    labels (n,): the labels, as indices into the classes.
    groups (n,): the source of each image, None if images are independent.
    note: a note on how classes were matched, "" if they were matched by name.
    """

    alias: str
    classes: tuple[str, ...]
    logits: Logits
    labels: Labels
    groups: Tensor | None = None
    note: str = ""

    def summary(self) -> Iterator[Line]:
        """Yield the accuracy with its interval, and the fields."""
        yield Line("accuracy", accuracy(self.correct, groups=self.groups))
        for line in super().summary():
            if line.name != "note" or self.note:
                yield line

    def records(self) -> Iterator[dict[str, object]]:
        """Yield the label, prediction, confidence and correctness of each image."""
        labels = self.labels.tolist()
        predictions = self.predictions.tolist()
        confidence = self.confidence.tolist()
        for image, (label, prediction) in enumerate(zip(labels, predictions, strict=True)):
            yield {
                "image": image,
                "label": self.classes[label],
                "prediction": self.classes[prediction],
                "confidence": confidence[image],
                "correct": label == prediction,
            }

    @property
    def probabilities(self) -> Logits:
        """Return the softmax of the logits."""
        return self.logits.softmax(-1)

    @property
    def confidence(self) -> Float[Tensor, " batch"]:
        """Return the probability of each prediction."""
        return self.probabilities.amax(-1)

    @property
    def predictions(self) -> Labels:
        """Return the most probable class of each image."""
        return self.logits.argmax(-1)

    @property
    def correct(self) -> Bool[Tensor, " batch"]:
        """Return True for predictions that are the label."""
        return self.predictions == self.labels


@takes_splits
def evaluate(
    model: Model,
    images: AnyImages,
    labels: Labels | None = None,  # noqa: ARG001  the decorator gives them to the images
    *,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Evaluation:
    """Evaluate a model on labelled images: its logits and predictions for each of them.

    images: a Split, or any form that `vitlens.images` takes.
    labels: class indices of the model (n,) (None: those of the Split or the class folders).
    batch_size: the number of images at a time (None: chosen to fit into memory).
    precision: the precision of passes.
    advance: called with the number of images just finished.

    Raises DataError for images without labels. Raises InputError if the classes do not match, and
    UnsupportedError for a model without a classifier. Raises NonFiniteError, with the names of
    model and image.

    >>> import vitlens
    >>> result = vitlens.evaluate(vitlens.load("vit-digits"), vitlens.load_data("digits", limit=20))
    >>> result.logits.shape, result.correct.shape
    (torch.Size([20, 10]), torch.Size([20]))
    """
    split = as_split(images)
    model.require_classifier()
    truth = require_labels(split)
    mapping = reading(model.classes, split.classes)
    logits = predicted_logits(
        model, split, batch_size=batch_size, precision=precision, advance=advance
    )
    return Evaluation(
        alias=model.alias,
        classes=mapping.classes,
        logits=mapping.read(logits),
        labels=truth.cpu().long(),
        groups=split.groups,
        note=mapping.note,
    )


def require_labels(split: Split) -> Labels:
    """Return the labels of a split.

    Raises DataError if it has no labels, or no images.
    """
    if not len(split):
        raise without_labels("no images", split.name)
    if split.labels is None:
        raise without_labels("images without labels", split.name)
    return split.labels


def without_labels(images: str, name: str) -> DataError:
    """Return the error for images that cannot be evaluated on.

    images: the images in words.
    name: the name of the data.
    """
    return DataError(
        f"expected labelled images to evaluate on, found {images} in {name}; give a folder a "
        f"class, an .npz, {argument('labels', flag='labels FILE.csv')}, or try vitlens predict"
    )


def predicted_logits(
    model: Model,
    split: Split,
    *,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Logits:
    """Return the logits (n, classes) of a model on a split, labelled or not.

    They are fp32, on the CPU, in the class order of the model.
    """
    device = model.device
    parts = list[Tensor]()
    size = batch_size or fitting_batch_size(model)
    if batch_size is None and device.type == "cpu":
        size = min(size, _MOST_ON_CPU)
    with torch.inference_mode(), evaluating(model), autocast(device, precision):
        for batch in split.batches(size, device=device):
            logits = model(batch.images).float().cpu()
            broken = (~logits.isfinite()).any(-1).nonzero().flatten()
            if len(broken):
                index = int(batch.indices[broken[0]])
                image = split.files[index] if split.files else f"image {index}"
                raise NonFiniteError(
                    f"expected finite logits, found NaN or infinity from {model.alias} on {image} "
                    f"of {split.name}"
                )
            parts.append(logits)
            advance(len(logits))
    return torch.cat(parts)  # outside inference mode: a normal tensor, usable with autograd


def fitting_batch_size(model: Model) -> int:
    """Return a batch size that fits into memory, by the pixels of the model's input.

    It is at least 1 and at most 512.
    """
    height, width = model.input_size
    images_of_224 = _IMAGES_ON_CPU if model.device.type == "cpu" else _IMAGES_ON_GPU
    fitting = images_of_224 * 224 * 224 // (height * width)
    return max(1, min(_LARGEST_BATCH, fitting))


def accuracy(correct: Bool[Tensor, " batch"], *, groups: Tensor | None = None) -> Estimate:
    """Return the fraction of correct predictions, with Wilson's interval.

    groups (n,): the group of each image, if images of one group are not independent (scenes of one
        source digit). The interval is then that of as many independent images as are equally
        informative, see `uncertainty.share_of`.
    """
    return share_of(correct.cpu().numpy(), groups=None if groups is None else groups.cpu().numpy())


def per_class(evaluation: Evaluation, *, count: int) -> Iterator[ClassRow]:
    """Yield the accuracy on each of the first `count` classes, those of the data."""
    for index, name in enumerate(evaluation.classes[:count]):
        members = evaluation.labels == index
        n = int(members.sum())
        class_accuracy = None
        if n:
            groups = None if evaluation.groups is None else evaluation.groups[members]
            class_accuracy = accuracy(evaluation.correct[members], groups=groups)
        yield ClassRow(model=evaluation.alias, class_name=name, n=n, accuracy=class_accuracy)


def confusion(
    labels: Labels, predictions: Labels, *, count: int
) -> Int[Tensor, "truth prediction"]:
    """Return the number of images of each class (rows) predicted as each class (columns)."""
    cell_of_image = labels * count + predictions
    return torch.bincount(cell_of_image, minlength=count * count).view(count, count)


def confusion_rows(evaluation: Evaluation) -> Iterator[ConfusionRow]:
    """Yield the cells of the confusion matrix that are not 0, correct predictions included."""
    names = evaluation.classes
    counts = confusion(evaluation.labels, evaluation.predictions, count=len(names))
    for truth, prediction in counts.nonzero().tolist():
        yield ConfusionRow(
            model=evaluation.alias,
            truth=names[truth],
            prediction=names[prediction],
            count=int(counts[truth, prediction]),
        )


def calibration(
    probabilities: Logits, labels: Labels
) -> tuple[Float[Tensor, " bins"], Float[Tensor, " bins"], Int[Tensor, " bins"]]:
    """Return the mean confidence, the accuracy and the number of images by bin of confidence.

    Bins (low, high] have equal widths (Guo 2017). Means are fractions, and 0 for an empty bin.
    """
    confidence, is_correct, bins = _assign_bins(probabilities, labels)
    count = torch.bincount(bins, minlength=BINS)
    divisor = count.clamp(min=1)
    mean_confidence = torch.bincount(bins, weights=confidence, minlength=BINS) / divisor
    mean_accuracy = torch.bincount(bins, weights=is_correct, minlength=BINS) / divisor
    return mean_confidence, mean_accuracy, count


def sources_by_bin(
    probabilities: Logits, labels: Labels, groups: Int[Tensor, " batch"] | None
) -> Int[Tensor, " bins"]:
    """Return the number of different groups in each bin of `calibration`.

    Without groups it is the number of images.
    """
    _, _, bins = _assign_bins(probabilities, labels)
    if groups is not None:
        different_pairs = torch.stack((bins, groups.cpu()), dim=1).unique(dim=0)
        bins = different_pairs[:, 0]
    return torch.bincount(bins, minlength=BINS)


def calibration_rows(evaluation: Evaluation) -> Iterator[CalibrationRow]:
    """Yield the bins of `calibration` of an evaluation."""
    probabilities = evaluation.probabilities
    labels = evaluation.labels
    confidence, mean_accuracy, count = calibration(probabilities, labels)
    sources = sources_by_bin(probabilities, labels, evaluation.groups)
    for number in range(BINS):
        yield CalibrationRow(
            evaluation.alias,
            confidence=float(confidence[number]),
            accuracy=float(mean_accuracy[number]),
            count=int(count[number]),
            sources=int(sources[number]),
        )


def _assign_bins(
    probabilities: Logits, labels: Labels
) -> tuple[Tensor, Tensor, Int[Tensor, " batch"]]:
    """Return the confidence, correctness (both float64) and bin of each prediction."""
    confidence, predictions = probabilities.double().max(-1)
    # bin n is (n / BINS, (n + 1) / BINS]
    bins = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    return confidence, (predictions == labels).double(), bins


def calibration_error(
    probabilities: Logits, labels: Labels, *, groups: Tensor | None = None, seed: int = 0
) -> Estimate:
    """Return the expected calibration error with a conservative 95 % interval.

    The interval is from 1,000 bootstrap samples of images. Binning biases the error upwards, and
    resampling does so again. Both ends are therefore corrected:
    - The upper end is that of the percentile interval. It is biased upwards twice, so it is too
      high rather than too low.
    - The lower end is twice the error minus the upper end (the basic interval), minus the bias of
      binning. The bias is the error of a perfectly calibrated model with these confidences on so
      many images.

    There is no interval for fewer than 6 images or groups.

    groups (n,): the group of each image. Images of one group are drawn together.
    """
    confidence, is_correct, bins = _assign_bins(probabilities, labels)
    if groups is None:
        groups = torch.arange(len(labels))
    _, group_of_image = groups.unique(return_inverse=True)
    count = int(group_of_image.max()) + 1
    # (groups, bins): the sum of the gaps of each group's images in each bin
    gap_sums = torch.zeros(count, BINS, dtype=torch.float64)
    gap_sums.index_put_((group_of_image, bins), confidence - is_correct, accumulate=True)
    gaps = gap_sums.numpy()
    sizes = torch.bincount(group_of_image, minlength=count).numpy()
    # The error is the mean over images of |mean confidence - accuracy| of their bin. A bin's share
    # of the images times its absolute mean gap is its absolute sum of gaps over all images.
    error = float(np.abs(gaps.sum(0)).sum() / len(labels))
    if not enough_to_draw(sizes.astype(np.float64)):
        return Estimate(error, n=len(labels))
    generator = np.random.default_rng(seed)
    errors_of_draws = list[float]()
    for _ in range(_DRAWS):
        # how often each group is drawn
        times = np.bincount(generator.integers(0, count, count), minlength=count)
        errors_of_draws.append(np.abs(times @ gaps).sum() / (times @ sizes))
    _, upper = drawn_interval(np.array(errors_of_draws), sizes.astype(np.float64))
    basic_lower = min(error, 2 * error - float(upper))
    bias = _error_of_perfect_model(confidence.numpy(), bins.numpy(), generator)
    lower = max(0.0, basic_lower - bias)
    return Estimate(error, lower, max(error, float(upper)), len(labels))


def _error_of_perfect_model(
    confidence: NDArray[np.float64], bins: NDArray[np.int64], generator: np.random.Generator
) -> float:
    """Return the mean calibration error of a perfectly calibrated model on so many images.

    Each prediction is correct with the probability of its confidence.
    """
    errors = list[float]()
    for _ in range(_PERFECT_DRAWS):
        is_correct = generator.random(len(confidence)) < confidence
        gaps = np.bincount(bins, confidence - is_correct, minlength=BINS)
        errors.append(np.abs(gaps).sum() / len(confidence))
    return float(np.mean(errors))


def images(pictures: AnyImages, model: Model) -> Images:
    """Return pictures as input of a model: (n, 3, height, width) in [0, 1], on its device.

    Pictures are resized and cropped as by `vitlens predict`: EXIF rotation is applied, transparency
    blended with white, greyscale converted to RGB, and 16 bits scaled to 8. Every function that
    takes images takes these forms as well.

    pictures: one picture or a list of pictures, or a Split, which is unchanged. A picture is
        - a file, a folder (all images below it, sorted), or a pattern of paths;
        - a PIL image;
        - a uint8 array (height, width), (height, width, 3 or 4) or (n, height, width, 3 or 4);
        - a uint8 tensor (3, height, width) or (n, 3, height, width).

    Raises DataError for pictures that cannot be read, for floating-point pixels, and without any
    picture.

    >>> import numpy, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> vitlens.images(numpy.zeros((48, 64, 3), dtype="uint8"), vit).shape
    torch.Size([1, 3, 32, 32])
    """
    require_model(model, pictures)
    if isinstance(pictures, Split):
        return images_of(pictures).to(model.device)
    return read_pictures(pictures, model.preprocessing).to(model.device).float().div_(255)


def images_of(split: Split) -> Images:
    """Return all images of a split as one tensor, (n, 3, height, width) in [0, 1], on the CPU."""
    return torch.cat([batch.images for batch in split.batches(max(1, len(split)))])
