"""Split: one part of a data set, in memory or on disk."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from vitlens.data.factors import Factors
from vitlens.devices import as_device
from vitlens.errors import DataError, InputError, argument, by_caller
from vitlens.names import Part
from vitlens.pixels import AnyImages
from vitlens.shapes import Images, Labels, Masks, Pixels
from vitlens.summary import Line, Summary

TEST_SHARE: Final = 0.2  # share of each class that is held out for data without a test part
_MOST_NOTES: Final = 4  # most notes in the summary


@runtime_checkable
class Source(Protocol):
    """A source of pixels: in memory, or read from disk."""

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Tensor:
        """Return pixels (batch, 3, height, width) of these images: uint8, or floats in [0, 1]."""
        ...


@dataclass(frozen=True)
class InMemory:
    """Pixels held in memory.

    pixels: (n, 3, height, width), as uint8 or as floats in [0, 1].
    paths: the files from which they were decoded, or ().
    """

    pixels: Tensor
    paths: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: Tensor) -> Tensor:
        """Return the pixels of these images."""
        return self.pixels[indices]


@dataclass(frozen=True)
class Subset:
    """Some of the images of another source."""

    source: Source
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: Tensor) -> Tensor:
        """Return the pixels of these images."""
        return self.source.read(self.indices[indices])


class Drawn(NamedTuple):
    """Drawn images.

    pixels: (batch, 3, height, width), as uint8.
    masks: (batch, height, width), True on the object.
    """

    pixels: Pixels
    masks: Masks


@dataclass(frozen=True)
class Drawings:
    """Images that are drawn when they are read, determined by their subjects and numbers.

    render: a function of subjects and numbers that returns the images as Drawn. For `redrawn`, it
        also takes the keywords `strokes` and `ground` of `scenes.render`.
    subjects: the subject of each image, such as its source digit.
    numbers: the number of each image among those of its subject.
    place: a function of subjects and numbers that returns (batch, 3). The columns are the size of
        the object, from 0 (the smallest that is drawn) to 1, and its centre across and down, as
        fractions of the canvas.
    describe: a function of subjects and numbers that returns their generating factors, or None.
    """

    render: Callable[..., Drawn]
    subjects: Tensor
    numbers: Tensor
    place: Callable[[Tensor, Tensor], Tensor]
    describe: Callable[[Tensor, Tensor], Factors] | None = None

    def __len__(self) -> int:
        return len(self.subjects)

    def draw(self, indices: Tensor) -> Drawn:
        """Return the pixels and masks of these images."""
        return self.render(self.subjects[indices], self.numbers[indices])

    def read(self, indices: Tensor) -> Tensor:
        """Return the pixels of these images."""
        return self.draw(indices).pixels

    @property
    def factors(self) -> Factors | None:
        """Return the generating factors of the images."""
        return None if self.describe is None else self.describe(self.subjects, self.numbers)

    def pick(self, indices: Tensor) -> "Drawings":
        """Return only these images, in this order."""
        return replace(self, subjects=self.subjects[indices], numbers=self.numbers[indices])

    def epoch(self, number: int) -> "Drawings":
        """Return the drawings of the same subjects in an epoch, from 0; epochs share no image."""
        numbers_per_epoch = int(self.numbers.max()) + 1
        return replace(self, numbers=self.numbers + number * numbers_per_epoch)

    def redrawn(self, change: Literal["without distractors", "other ground"]) -> Tensor:
        """Return the pixels of the same digits without distractors, or on another ground."""
        if change == "without distractors":
            render = partial(self.render, strokes=0)
        else:
            render = partial(self.render, ground=1)
        changed = replace(self, render=render)
        return changed.read(torch.arange(len(self)))


@dataclass(frozen=True)
class Skipped:
    """A file that was left out because it is unreadable or has no mask.

    file: the name of the file.
    reason: why it was left out.
    """

    file: str
    reason: str


class Batch(NamedTuple):
    """A batch of a split.

    images: the images in [0, 1].
    labels: the labels (batch,), or None.
    indices: the indices of the images in the split.
    """

    images: Images
    labels: Tensor | None
    indices: Tensor


@dataclass(frozen=True, repr=False)
class Split(Summary):
    """One part of a data set.

    Raises DataError if masks or factors do not fit the images.

    name: the name as the user typed it ("digits").
    part: "train" or "test".
    source: the source of the pixels.
    size: the (height, width) of the images in pixels.
    classes: the names of the classes.
    labels: class indices (n,), or None.
    masks: masks (n, height, width), True on the object, or None.
    groups: the group of each image (n,), such as its source digit, for clustered intervals, or
        None.
    files: the name of each image, or None.
    skipped: the files that were left out.
    title: the name in reports ("CIFAR-10 (JPEG)").
    notes: sentences about the loading for the report.
    scenes: draws the same images again without their distractors or on another ground (see
        `Drawings.redrawn`); None for images of which it cannot.
    places: the size and place of each drawn object (n, 3), if pixels are held in memory, or None
        (see Drawings).
    factors: the generating factors of each image, or None. No analysis reads them.
    """

    name: str
    part: Part
    source: Source
    size: tuple[int, int]
    classes: tuple[str, ...]
    labels: Tensor | None = None
    masks: Tensor | None = None
    groups: Tensor | None = None
    files: tuple[str, ...] | None = None
    skipped: tuple[Skipped, ...] = ()
    title: str = ""
    notes: tuple[str, ...] = ()
    scenes: Drawings | None = None
    places: Tensor | None = None
    factors: Factors | None = None

    def __post_init__(self) -> None:
        count = len(self)
        expected = (count, *self.size)
        if self.masks is not None and tuple(self.masks.shape) != expected:
            raise DataError(
                f"expected masks of shape {expected}, one per image, found "
                f"{tuple(self.masks.shape)}"
            )
        if self.factors is not None and self.factors.rows != count:
            raise DataError(
                f"expected factors with a row for each of {count} images, found "
                f"{self.factors.rows} rows"
            )

    def __len__(self) -> int:
        return len(self.source)

    @property
    def drawn_places(self) -> Tensor | None:
        """Return the size and place of each drawn object (n, 3), or None for images not drawn.

        The columns are those of `Drawings.place`.
        """
        subset = self.subset
        if not isinstance(subset.source, Drawings):
            return self.places
        drawings = subset.source.pick(subset.indices)
        return drawings.place(drawings.subjects, drawings.numbers)

    @property
    def subset(self) -> Subset:
        """Return the images as a subset of the source that holds or draws them."""
        if isinstance(self.source, Subset):
            return self.source
        return Subset(self.source, torch.arange(len(self)))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the images' files, or their numbers in the data."""
        return self.files or tuple(f"{self.name} {index}" for index in range(len(self)))

    def summary(self) -> Iterator[Line]:
        """Yield a description of the split, without the pixels."""
        yield Line("data", self.title or self.name)
        yield Line("part", self.part)
        yield Line("images", len(self))
        yield Line("size", f"{self.size[0]} x {self.size[1]}", "px")
        yield Line("classes", self.classes)
        yield Line("labels", self.labels)
        yield Line("masks", None if self.masks is None else f"{len(self.masks)}")
        yield Line("factors", None if self.factors is None else tuple(self.factors))
        yield Line("skipped", len(self.skipped))
        for note in self.notes[:_MOST_NOTES]:
            yield Line("note", note)

    def batches(self, batch_size: int, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Yield the images in order, as floats in [0, 1] on a device."""
        device = as_device(device)
        for start in range(0, len(self), batch_size):
            indices = torch.arange(start, min(start + batch_size, len(self)))
            pixels = self.source.read(indices).to(device)
            images = pixels if pixels.is_floating_point() else pixels.float().div_(255)
            labels = None if self.labels is None else self.labels[indices].to(device)
            yield Batch(images, labels, indices)

    def pick(self, indices: Tensor) -> "Split":
        """Return the split of only these images, in this order."""
        fields: dict[str, Any] = {}
        for name in ("labels", "masks", "groups", "places"):
            tensor = getattr(self, name)
            if tensor is not None:
                fields[name] = tensor[indices]
        if self.factors is not None:
            fields["factors"] = self.factors.pick(indices)
        if self.files is not None:
            fields["files"] = tuple(self.files[index] for index in indices.tolist())
        if self.scenes is not None:
            fields["scenes"] = self.scenes.pick(indices)
        subset = self.subset
        return replace(self, source=Subset(subset.source, subset.indices[indices]), **fields)

    def starting_with(
        self, files: Sequence[str], count: int | None = None, *, seed: int = 0
    ) -> "Split":
        """Return as many images as `limit` does, but these first.

        Raises DataError for an unknown name, and for images without files.

        files: names of images, with or without suffix.
        count, seed: as in `limit`.
        """
        if not files:
            return self.limit(count, seed=seed)
        if self.files is None:
            option = by_caller(python="their names", command="--show")
            raise DataError(
                f"expected images with file names, found {self.name}, whose images have none; "
                f"leave out {option}"
            )
        index_of_name: dict[str, int] = {}
        index_of_stem: dict[str, int] = {}
        for index, file in enumerate(self.files):
            index_of_name.setdefault(PurePath(file).name, index)
        for name, index in index_of_name.items():
            index_of_stem.setdefault(PurePath(name).stem, index)
        named: list[int] = []
        for name in files:
            index_of_file = index_of_name.get(name, index_of_stem.get(name))
            if index_of_file is None:
                raise DataError(
                    f"expected names of images in {self.name}, such as {self.files[0]}, found "
                    f"{name!r}"
                )
            named.append(index_of_file)
        named = list(dict.fromkeys(named))  # without repetition
        if count is None:
            count = len(self)
        _require_count(count)
        # the named images, filled up with drawn ones to the length that `limit` would give
        drawn = balanced(len(self), self.labels, count, seed).tolist()
        length = max(len(named), len(drawn))
        indices = list(dict.fromkeys([*named, *drawn]))[:length]
        return self.pick(torch.tensor(indices))

    def epoch(self, number: int) -> "Split":
        """Return the split of an epoch (from 0), with new images if its source draws them.

        Labels and order stay the same. Masks belong to the images of epoch 0, so later splits have
        none.
        """
        subset = self.subset
        if not number or not isinstance(subset.source, Drawings):
            return self
        drawings = subset.source.epoch(number)
        return replace(
            self,
            source=Subset(drawings, subset.indices),
            masks=None,
            scenes=None,
            factors=drawings.pick(subset.indices).factors,
        )

    def limit(self, count: int | None, *, seed: int = 0) -> "Split":
        """Return at most count images: a seeded subset, as balanced by class as possible.

        Among drawn scenes, a second scene of a source is taken only after a first one of each.
        """
        if count is None or count >= len(self):
            return self
        _require_count(count)
        if self.scenes is None or self.groups is None:
            return self.pick(balanced(len(self), self.labels, count, seed))
        chosen = torch.empty(0, dtype=torch.long)
        occurrence = occurrences(self.groups)  # 0 for the first scene of each source
        for number in range(int(occurrence.max()) + 1):
            members = (occurrence == number).nonzero()[:, 0]  # indices of images
            labels = None if self.labels is None else self.labels[members]
            places_left = count - len(chosen)  # 0 once it is full: nothing is drawn any more
            drawn = balanced(len(members), labels, places_left, seed)
            chosen = torch.cat((chosen, members[drawn]))
        return self.pick(chosen)


def _require_count(count: int) -> None:
    """Raise DataError for a limit below 1."""
    if count < 1:
        raise DataError(f"expected {argument('limit')} of at least 1, found {count}")


def as_split(images: AnyImages) -> Split:
    """Return the images with the type of a Split, which `takes_splits` has made of them."""
    assert isinstance(images, Split)
    return images


def balanced(total: int, labels: Tensor | None, count: int, seed: int) -> Tensor:
    """Return at most `count` seeded indices, sorted, drawn from the classes in turn."""
    if labels is None:
        labels = torch.zeros(total, dtype=torch.long)
    order, _ = in_turn(labels.cpu(), seed)
    return order[:count].sort().values


def occurrences(groups: Tensor) -> Tensor:
    """Return the number of earlier images with the group of each image, (n,)."""
    order = groups.argsort(stable=True)  # by group, and within a group by position
    _, counts = groups.unique(return_counts=True)
    earlier = torch.empty_like(order)
    # in this order, the images of each group count from 0
    earlier[order] = torch.cat([torch.arange(count) for count in counts.tolist()])
    return earlier


def hold_out(
    labels: Labels, part: Part, *, seed: int, whole: bool = False
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the sorted indices of a part of data without a test part, and a note on the division.

    A fifth of every class, at least one image, is for test; a class with a single image is in the
    training part. If no class has two images, all are for test, and a request for the training part
    raises DataError.

    whole: return all images, without dividing them.
    """
    if whole:
        return torch.arange(len(labels)), ()
    order, turns = in_turn(labels, seed)
    class_sizes = labels.bincount()
    test_sizes = (TEST_SHARE * class_sizes.double()).round().clamp(min=1)
    test_sizes = test_sizes * (class_sizes > 1)  # a single image is for training
    # the first test_sizes[c] images of class c in the seeded order are for test
    is_test = torch.empty(len(labels), dtype=torch.bool)
    is_test[order] = turns < test_sizes[labels[order]]
    if not is_test.any():
        if part == "train":
            raise DataError(
                "expected at least two images of a class, one to train on and one to "
                "test on, found one of each class"
            )
        return torch.arange(len(labels)), ()
    is_member = is_test if part == "test" else ~is_test
    return is_member.nonzero().squeeze(1), (describe_hold_out(seed),)


def hold_out_groups(split: Split, share: float, *, seed: int = 0) -> tuple[Split, Split | None]:
    """Return the rest of a training split, and a share (fraction) of each class that is held out.

    Images of one group, such as scenes of one digit, stay together. The held-out part is kept in
    memory, so that it is the same in every epoch. It is None, and the split unchanged, if some
    class has fewer than 1 / share groups or there are no labels.
    """
    if split.labels is None:
        return split, None
    groups = torch.arange(len(split)) if split.groups is None else split.groups
    _, group_of_image = groups.unique(return_inverse=True)
    # The label of a group is that of its first image: the least index among its members. Every
    # index is below len(split), with which the search begins.
    group_count = int(group_of_image.max()) + 1
    no_image = torch.full((group_count,), len(split))
    first_image = no_image.scatter_reduce(0, group_of_image, torch.arange(len(split)), "amin")
    group_labels = split.labels[first_image]
    class_sizes = group_labels.bincount(minlength=len(split.classes))
    if int(class_sizes.min()) * share < 1:
        return split, None
    order, turns = in_turn(group_labels, seed)
    held_out_sizes = (share * class_sizes.double()).floor()
    is_group_out = torch.empty(group_count, dtype=torch.bool)
    is_group_out[order] = turns < held_out_sizes[group_labels[order]]
    is_image_out = is_group_out[group_of_image]
    held_out = split.pick(is_image_out.nonzero()[:, 0])
    pixels = held_out.source.read(torch.arange(len(held_out)))
    held_out = replace(held_out, source=InMemory(pixels), part="test", scenes=None)
    return split.pick((~is_image_out).nonzero()[:, 0]), held_out


def describe_hold_out(seed: int) -> str:
    """Return the report's note on the division."""
    return (
        f"no test part was given, so a fifth of each class, drawn with seed {seed}, is "
        "held out for testing: a model is better on images that it was trained on"
    )


def in_turn(labels: Labels, seed: int) -> tuple[Tensor, Tensor]:
    """Return a seeded order of the images that takes the classes in turn, and the turns, from 0.

    The first image of every class has turn 0, the second one has turn 1, and so on.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    shuffled = labels[order]
    turns = torch.empty_like(order)  # in 64 bits, whatever the type of the labels
    for label in shuffled.unique():
        members = (shuffled == label).nonzero().squeeze(1)
        turns[members] = torch.arange(len(members), dtype=turns.dtype)
    by_turn = turns.argsort(stable=True)
    return order[by_turn], turns[by_turn]


def share_of(split: Split, share: float, *, seed: int, repeated: bool = True) -> Split:
    """Return a seeded, class-balanced share (fraction) of a training split.

    Shares with the same seed are nested: 5 % is a subset of 10 %. A source that draws new images
    every epoch is fixed to those of its first one. Raises InputError for a share outside (0, 1],
    DataError if a class is left without an image.

    repeated: repeat the images to the length of the split. An epoch then has as many steps as with
        all images, so that shares differ in their images and not in the length of training.
    """
    subset = split.limit(images_in(split, share), seed=seed)
    draws_new_images = subset.epoch(1) is not subset
    if draws_new_images:
        pixels = subset.source.read(torch.arange(len(subset)))
        subset = replace(
            subset, source=InMemory(pixels), masks=None, scenes=None, places=subset.drawn_places
        )
    if len(subset) == len(split) or not repeated:
        return subset
    return subset.pick(torch.arange(len(split)) % len(subset))


def images_in(split: Split, share: float) -> int:
    """Return the number of images in a share (fraction) of a split. Raises as share_of does."""
    if not 0 < share <= 1:
        raise InputError(f"expected a share of the images above 0 and at most 1, found {share}")
    count = round(share * len(split))
    classes = 1 if split.labels is None else len(split.labels.unique())
    if count < classes:
        alternative = by_caller(python="", command=" or a greater --limit")
        raise DataError(
            f"expected an image of each of {classes} classes in {share:.0%} of {len(split)} "
            f"training images, found {count}; give more data{alternative}"
        )
    return count
