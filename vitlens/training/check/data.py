"""Checks of the training images and their labels."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vitlens.data.split import Split
from vitlens.shapes import Images
from vitlens.training.check.rows import CheckRow, State

READ: Final = 1000  # images of each part at most
IMBALANCE: Final = 10.0  # images of the largest class over those of the smallest, above which the balance is a warning
FEWEST: Final = 10  # images of the largest class below which the balance says nothing
REPEATED: Final = 0.01  # share of constant or repeated images from which on they are a warning
OUTSIDE: Final = 1e-4  # how far a pixel may lie outside [0, 1], as everywhere in vitlens


@dataclass(frozen=True)
class Sample:
    """The images that were read: in [0, 1] as given, their labels, and how many the part has."""

    images: Images
    labels: Tensor
    whole: int

    @property
    def words(self) -> str:
        """How many images were read."""
        count = len(self.images)
        return f"{count:,} images" if count == self.whole else f"{count:,} of {self.whole:,} images"

    @property
    def contents(self) -> tuple[bytes, ...]:
        """A hash of each image's pixels."""
        return tuple(hashlib.sha1(image.numpy().tobytes(), usedforsecurity=False).digest() for image in self.images)


def sample(split: Split, *, seed: int) -> Sample:
    """At most READ images of a labelled split, balanced by class."""
    some = split.limit(READ, seed=seed)
    batches = list(some.batches(256))
    labels = [batch.labels for batch in batches if batch.labels is not None]
    return Sample(torch.cat([batch.images.cpu() for batch in batches]), torch.cat(labels).cpu().long(), len(split))


def data_checks(train: Split, test: Split | None, read: Sample, *, seed: int) -> Iterator[CheckRow]:
    """Labels, class balance, constant and duplicate images, pixel range."""
    assert train.labels is not None
    labels = train.labels.cpu()
    yield labels_check(labels, len(train.classes))
    yield balance_check(labels, train.classes)
    yield constant_check(read)
    yield duplicate_check(read, None if test is None or not len(test) else sample(test, seed=seed))
    yield range_check(read)


def labels_check(labels: Tensor, classes: int) -> CheckRow:
    """Every label is a whole number from 0 to classes - 1."""
    expected = f"labels from 0 to {classes - 1}"
    wrong = (labels < 0) | (labels >= classes)
    if labels.is_floating_point():
        wrong |= labels != labels.round()
    count = int(wrong.sum())
    if not count:
        found = f"{_whole(labels.min())} to {_whole(labels.max())} ({len(labels):,} labels)"
        return CheckRow("labels", "pass", expected, found, value=0.0, unit="labels")
    values = labels[wrong]
    low, high = _whole(values.min()), _whole(values.max())
    found = f"{count:,} of {len(labels):,} outside: {low if low == high else f'{low} to {high}'}"
    advice = (
        "Number the classes from 0, or give the model as many classes as there are labels. Labels that start at 1, "
        "or that were mapped by a list of another data set, are the usual cause."
    )
    return CheckRow("labels", "fail", expected, found, advice, float(count), "labels")


def balance_check(labels: Tensor, classes: tuple[str, ...]) -> CheckRow:
    """Every class has images, and none many times as many as another."""
    counts = Counter(int(label) for label in labels)
    sizes = [counts.get(index, 0) for index in range(len(classes))]
    expected = f"images of all {len(classes)} classes, none with more than {IMBALANCE:g} times as many as another"
    missing = [name for name, size in zip(classes, sizes) if not size]
    if missing or len(classes) < 2:
        named = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
        found = f"no images of {len(missing)} of {len(classes)} classes ({named})" if missing else "1 class"
        advice = "Add images of these classes, remove the classes, or raise --limit."
        return CheckRow("class balance", "fail", expected, found, advice, float(len(missing)), "classes")
    least, most = min(sizes), max(sizes)
    found = f"{least:,} to {most:,} images a class"
    ratio = most / least
    if most < FEWEST:
        advice = "With so few images a class, neither the balance nor an accuracy says much."
        return CheckRow("class balance", "inconclusive", expected, found, advice, ratio, "times")
    if ratio > IMBALANCE:
        advice = (
            "The model can gain accuracy by favouring the large classes: report the accuracy of each class, and sample "
            "the small ones more often or limit the large ones."
        )
        return CheckRow("class balance", "warn", expected, found, advice, ratio, "times")
    return CheckRow("class balance", "pass", expected, found, value=ratio, unit="times")


def constant_check(read: Sample) -> CheckRow:
    """No image has one colour everywhere."""
    flat = read.images.flatten(2)
    count = int((flat.amax(2) == flat.amin(2)).all(1).sum())
    expected, found = "no image of one colour", f"{count:,} among {read.words}"
    share = count / len(flat)
    if not count:
        return CheckRow("constant images", "pass", expected, found, value=share, unit="fraction")
    advice = "Look at these files: an image that was not decoded, or scaled twice, often comes out in one colour."
    state: State = "fail" if count >= len(flat) / 2 else "warn"
    return CheckRow("constant images", state, expected, found, advice, share, "fraction")


def duplicate_check(read: Sample, test: Sample | None) -> CheckRow:
    """No image is there twice: with two labels, among the test images, or often."""
    expected = "no image twice, and none among the test images"
    contents = read.contents
    if len(contents) < 2:
        return CheckRow("duplicate images", "inconclusive", expected, "1 image", "Raise --limit.")
    labels: dict[bytes, set[int]] = {}
    for content, label in zip(contents, read.labels.tolist()):
        labels.setdefault(content, set()).add(label)
    repeated = len(contents) - len(labels)
    contradicting = sum(len(each) > 1 for each in labels.values())
    shared = 0 if test is None else len(labels.keys() & set(test.contents))
    found = f"{repeated:,} repeated among {read.words}, {contradicting:,} of them with two labels"
    found += "" if test is None else f", {shared:,} among {test.words} of the test"
    share = (repeated + shared) / len(contents)
    if contradicting:
        advice = "One image with two labels cannot be learned: check how labels and images are matched."
        return CheckRow("duplicate images", "fail", expected, found, advice, share, "fraction")
    if shared:
        advice = "Remove them from one of the two parts: an accuracy on images that were trained on is too high."
        return CheckRow("duplicate images", "fail", expected, found, advice, share, "fraction")
    if repeated > REPEATED * len(contents):
        advice = "Remove the copies, or say that images were repeated on purpose."
        return CheckRow("duplicate images", "warn", expected, found, advice, share, "fraction")
    return CheckRow("duplicate images", "pass", expected, found, value=share, unit="fraction")


def range_check(read: Sample) -> CheckRow:
    """Pixels lie in [0, 1], before the model normalises them."""
    low, high = read.images.amin().item(), read.images.amax().item()
    expected, found = "pixels in [0, 1]", f"{low:.3g} to {high:.3g}"
    inside = low >= -OUTSIDE and high <= 1 + OUTSIDE
    if inside and high - low >= 0.05:
        return CheckRow("pixel range", "pass", expected, found, value=high)
    if inside:
        advice = "The images are almost of one value: were they divided by 255 twice?"
    elif low < 0:
        advice = (
            "The images are normalised already, and the model normalises them again: give it pixels in [0, 1], or "
            "uint8."
        )
    else:
        advice = "Divide the pixels by 255, or give them as uint8."
    return CheckRow("pixel range", "fail", expected, found, advice, high)


def _whole(value: Tensor) -> str:
    return f"{value.item():g}"
