"""Three labels for every head: what determines its attention, its pattern, and what it writes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench, silent
from vitlens.analysis.ablation.units import Unit, require_heads, units_of
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.batch import layers_of
from vitlens.analysis.heads.evidence import half_width
from vitlens.analysis.heads.registry import THRESHOLD
from vitlens.analysis.heads.specialisation import HeadLabel, Specialisation, specialise
from vitlens.analysis.heads.statistics import Statistics, Stream, require_statistics
from vitlens.analysis.naming.attends import AttendsBy, agreement, attends_by, orders, shuffled
from vitlens.analysis.naming.logits import LayerParts, logit_parts
from vitlens.analysis.naming.rows import LooksRow, OfHead
from vitlens.analysis.naming.words import STATES, describe_labels, names_one
from vitlens.analysis.naming.writes import FEWEST as FEWEST_OF_CONCEPT
from vitlens.analysis.naming.writes import (
    LEVEL,
    Writes,
    at_random,
    of_halves,
    tested_concepts,
    writes,
)
from vitlens.analysis.patching.contribution import head_contributions
from vitlens.analysis.patching.stream import blocks_of
from vitlens.classes import required_labels
from vitlens.errors import InputError, UnsupportedError
from vitlens.inputs import takes_images
from vitlens.lens.capture import capture
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, Parts, as_parts, groups_of
from vitlens.summary import Line, Table
from vitlens.uncertainty import Estimate, holm

FEWEST: Final = 50  # with fewer labelled images, no label for what heads write is tested
SHUFFLED: Final = 64  # the first images are also shuffled, up to so many
HeadNumber: TypeAlias = tuple[int, int]  # layer and head
Progress: TypeAlias = Callable[..., AbstractContextManager[Callable[[int], object]]]


@dataclass(frozen=True)
class HeadName:
    """One head with its labels; a label that was not made is None.

    attends: the query and key components that determine its attention.
    looks: the pattern of its attention.
    writes: the classes or attributes that it writes.
    """

    layer: int
    head: int
    attends: AttendsBy | None
    looks: LooksRow | None
    writes: Writes | None

    @property
    def holds(self) -> bool | None:
        """Return True if the test confirms `attends`, None without a test."""
        return self.attends.holds if self.attends else None

    @property
    def words(self) -> str:
        """Return all three labels in one line, with the results of their tests."""
        return describe_labels(
            attends=self.attends.word if self.attends else None,
            holds=self.holds,
            looks=self.looks.word if self.looks else None,
            looks_hold=self.looks.holds if self.looks else None,
            writes=self.writes.word if self.writes else None,
            state=self.writes.state if self.writes else None,
        )


@dataclass(frozen=True, repr=False)
class HeadNames(Table):
    """Labels of every head of a model.

    heads: one entry for every head, by layer and head.
    images: the number of images.
    shuffled: the number of images that were also shuffled, for the tests.
    notes: one line for each kind of label that could not be made or not be tested.
    """

    heads: tuple[HeadName, ...]
    images: int
    shuffled: int
    notes: tuple[str, ...] = ()

    def summary(self) -> Iterator[Line]:
        """Yield how many heads have each label, and how many of those that were tested hold."""
        attends = [head.holds for head in self.heads if head.holds is not None]
        looks = [head.looks.holds for head in self.heads if head.looks is not None]
        tested_looks = [holds for holds in looks if holds is not None]
        states = [head.writes.state for head in self.heads if head.writes is not None]
        yield Line("heads", len(self.heads))
        yield Line("attends by: tested, holds", (len(attends), sum(attends)))
        yield Line("looks at: tested, holds", (len(tested_looks), sum(tested_looks)))
        for state in STATES:
            yield Line(f"writes: {state}", states.count(state))
        for note in self.notes:
            yield Line("note", note)

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each head: its labels and their tests, None without one."""
        for head in self.heads:
            yield {
                "layer": head.layer,
                "head": head.head,
                "attends": head.attends.word if head.attends else None,
                "attends_holds": head.holds,
                "looks": head.looks.word if head.looks else None,
                "looks_holds": head.looks.holds if head.looks else None,
                "writes": head.writes.word if head.writes else None,
                "writes_state": head.writes.state if head.writes else None,
            }


@takes_images
def name_heads(
    model: Model,
    images: AnyImages,
    labels: Tensor | str | None = None,
    *,
    attributes: Mapping[str, Tensor] | None = None,
    masks: Tensor | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> HeadNames:
    """Return three labels for every head: components, pattern, and concepts that it writes.

    The components are those of query and key that determine its attention.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes.
    labels: class indices (n,), or "predicted" (None: those of the Split or the class folders).
    attributes: attributes of the images by name, (n,) True or False. A head may write an attribute
        in the same way as a class.
    masks: (n, height, width) True on the object.

    Each label is tested by an intervention. The first two are tested on images with shuffled
    patches: what depends on position stays, what depends on content moves. The third is tested by
    ablating the head. It names up to three classes if no test separates them.

    Outputs of heads of all images are kept in memory: a few hundred images are enough. Raises
    UnsupportedError for a model without attention between tokens. Raises InputError if masks or
    attributes are not as many as images.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> names = vitlens.name_heads(vit, torch.rand(8, 3, 32, 32))
    >>> len(names.heads), names.heads[0].writes is None  # without labels
    (24, True)
    """
    require_statistics(model)
    size = batch_size or fitting_batch_size(model)
    pixels = as_parts(images)
    classes = None if labels is None else required_labels(model, pixels, labels, size)
    sample = Sample(pixels, classes, attributes or {}, masks)
    return label_heads(model, sample, size, seed)


@dataclass(frozen=True)
class Sample:
    """The images on which heads are labelled.

    labels (n,): class labels, as columns of the model's logits. None if unknown.
    attributes: attributes by name, (n,) True or False.
    masks: (n, height, width) True on the object.

    Raises InputError if masks or attributes are not as many as images.
    """

    images: Parts
    labels: Tensor | None = None
    attributes: Mapping[str, Tensor] = field(default_factory=dict)
    masks: Tensor | None = None

    def __post_init__(self) -> None:
        # an attribute may have the name "masks", too
        for name, values in [("masks", self.masks), *self.attributes.items()]:
            if values is not None and len(values) != len(self.images):
                raise InputError(
                    f"expected {name} of {len(self.images)} images, found {len(values)}"
                )

    @property
    def groups(self) -> Tensor | None:
        """Return the source of each image, None if images are independent."""
        return groups_of(self.images)


def label_heads(
    model: Model,
    sample: Sample,
    size: int,
    seed: int,
    progress: Progress = silent,
    *,
    remove: bool = True,
    statistics: Statistics | None = None,
) -> HeadNames:
    """Return the labels of `name_heads`, from images that are read `size` at a time.

    progress: called as progress(words, total) around each loop.
    remove: True to label also what heads write, by removing every head.
    statistics: the statistics of heads on more images than the sample (None: those of the sample).
    """
    count = len(sample.images)
    notes = list[str]()

    # the patterns of attention
    if statistics is None:
        with progress("Statistics of heads", count) as advance:
            statistics = _statistics(model, sample, size, advance)
    roles = specialise(statistics)

    # the components that determine attention
    parts: Mapping[int, LayerParts] = {}
    try:
        with progress("Queries and keys", 2 * count) as advance:
            parts = logit_parts(model, sample.images, size, advance)
    except InputError as error:
        notes.append(f"by what heads attend: {error}")

    # the test of both on shuffled patches
    test = _Shuffling()
    layout = model.anatomy.layout
    if layout is None or tuple(layout.image_size) != tuple(model.input_size):
        notes.append(
            "attention is not tested on shuffled patches: the tokens are not patches of the image"
        )
    else:
        test = _shuffling(model, sample, list(parts), size, seed, progress)
    attends = _attends(model, sample, parts, test)

    # what heads write, tested by removing them
    written: Mapping[HeadNumber, Writes] = {}
    if remove:
        try:
            written, rare = _writes(model, sample, size, seed, progress)
            if rare:
                notes.append(_note_on(rare, sample.groups))
        except (InputError, UnsupportedError) as error:
            notes.append(f"what heads write: {error}")

    heads = []
    for site in layers_of(model):
        labels = roles.head_labels[site.layer]  # none for a layer without places in the image
        for head in range(site.heads):
            looks = None
            if head < len(labels):
                head_row = OfHead(model=model.alias, layer=site.layer, head=head)
                looks = _looks(head_row, labels[head], statistics.images, test)
            name = HeadName(
                layer=site.layer,
                head=head,
                attends=attends.get((site.layer, head)),
                looks=looks,
                writes=written.get((site.layer, head)),
            )
            heads.append(name)
    return HeadNames(tuple(heads), images=count, shuffled=test.images, notes=tuple(notes))


def _statistics(
    model: Model,
    sample: Sample,
    size: int,
    advance: Callable[[int], object],
    order: Tensor | None = None,
) -> Statistics:
    """Return the statistics of heads on all images, or on the first ones with shuffled patches.

    order (some, patches): the order of patches in the first images and their masks. Only these
        images are measured. None for all images as they are.
    """
    groups = sample.groups
    if groups is not None and order is not None:
        groups = groups[: len(order)]
    stream = Stream(model, groups=groups)
    count = len(sample.images) if order is None else len(order)
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        images = sample.images[rows].to(model.device)
        masks = None if sample.masks is None else sample.masks[rows]
        if order is not None:
            images = shuffled(images, model.layout, order[rows])
        if order is not None and masks is not None:
            moved_masks = shuffled(masks[:, None].float(), model.layout, order[rows])
            masks = moved_masks[:, 0] > 0.5  # True or False again after a change of size
        stream.add(images, masks=masks)
        advance(len(images))
    return stream.result()


@dataclass(frozen=True)
class _Shuffling:
    """Measurements on the first images with shuffled patches. By default there are none.

    images: the number of shuffled images.
    sides: the correlations of logits before and after shuffling, by layer; see `agreement`.
    roles: the patterns of heads on the shuffled images.
    """

    images: int = 0
    sides: Mapping[int, Tensor] = field(default_factory=dict)
    roles: Specialisation | None = None


def _shuffling(
    model: Model,
    sample: Sample,
    layers: Sequence[int],
    size: int,
    seed: int,
    progress: Progress,
) -> _Shuffling:
    """Measure the first images with shuffled patches.

    layers: the layers with logits that were cut into parts.
    """
    count = min(SHUFFLED, len(sample.images))
    order = orders(model.layout, count, seed=seed)
    with progress("Shuffled patches", 2 * count) as advance:
        sides = agreement(model, sample.images, layers, order, size)
        advance(count)
        roles = specialise(_statistics(model, sample, size, advance, order))
    return _Shuffling(images=count, sides=sides, roles=roles)


def _attends(
    model: Model, sample: Sample, parts: Mapping[int, LayerParts], test: _Shuffling
) -> dict[HeadNumber, AttendsBy]:
    """Return the components that determine each head's attention.

    The tests are corrected over heads by Holm's method.
    """
    groups = None if sample.groups is None else sample.groups[: test.images]
    labels = {}
    for layer, layer_parts in parts.items():
        sides = test.sides.get(layer)
        for head in range(layer_parts.shares.shape[1]):
            head_row = OfHead(model=model.alias, layer=layer, head=head)
            label = attends_by(head_row, layer_parts, len(sample.images), sides, groups)
            labels[layer, head] = label
    p_values = {number: label.p for number, label in labels.items() if label.p is not None}
    p_holm = holm(list(p_values.values())) if p_values else []
    for number, p in zip(p_values, p_holm):
        labels[number] = replace(labels[number], holds=p <= LEVEL)
    return labels


def _looks(head: OfHead, label: HeadLabel, images: int, test: _Shuffling) -> LooksRow:
    """Return the pattern of a head's attention, tested on shuffled patches.

    images: the number of images behind the label.
    """
    score = Estimate(label.score, n=images, unit="")
    if not math.isnan(label.low):  # NaN for one image, which has no interval
        score = Estimate(label.score, label.low, label.high, images, "")
    row = LooksRow(
        model=head.model,
        layer=head.layer,
        head=head.head,
        word=label.label,
        score=score,
        best=label.best,
    )
    if test.roles is None or not names_one(label.label):
        return row
    # the score on all shuffled images, then without each group of images (jackknife)
    samples = test.roles.samples[head.layer][label.label][:, head.head]
    moved_score = float(samples[0])
    half = half_width(samples)
    if math.isnan(half):  # one image has no interval
        return replace(row, moved=Estimate(moved_score, n=test.images, unit=""))
    low = max(moved_score - half, 0.0)
    high = min(moved_score + half, 1.0)
    moved = Estimate(moved_score, low, high, test.images, "")
    return replace(row, moved=moved, holds=moved_score >= THRESHOLD)


def _note_on(rare: Sequence[str], groups: Tensor | None) -> str:
    """Return the note on attributes that are not tested."""
    images = "images" if groups is None else "sources of images"
    return (
        f"what heads write was not tested for {', '.join(rare)}: fewer than "
        f"{FEWEST_OF_CONCEPT} {images} have it, or fewer lack it"
    )


class _Scores(NamedTuple):
    """Scores of heads for concepts, and the images that have the concepts.

    scores (images, heads, concepts): what each head adds to the concept in each image.
    truth (images, concepts): True for images with the concept.
    """

    scores: Tensor
    truth: Tensor


def _writes(
    model: Model, sample: Sample, size: int, seed: int, progress: Progress
) -> tuple[dict[HeadNumber, Writes], list[str]]:
    """Return what each head writes, and the names of attributes that are too rare to be tested."""
    model.require_classifier()
    require_heads(model)
    images = sample.images
    labels = sample.labels
    groups = sample.groups
    if labels is None:
        raise InputError(
            "expected labels, found none; give labels=, or data with a folder for each class"
        )
    if len(images) < FEWEST:
        raise InputError(f"expected at least {FEWEST} images with labels, found {len(images)}")
    concepts = tested_concepts(labels, model.classes, sample.attributes, groups)
    if not concepts.classes and not concepts.attributes:
        kind = "images" if groups is None else "sources of images"
        raise InputError(
            f"expected a class or an attribute that {FEWEST_OF_CONCEPT} {kind} have and "
            f"{FEWEST_OF_CONCEPT} lack, found none"
        )
    blocks_of(model)  # raises an error if what the classifier reads of a head is unknown
    units = units_of(model, kinds=["head"])
    parts = []
    if concepts.classes:
        parts.append(
            _scores_of_classes(model, images, labels, concepts.classes, units, size, progress)
        )
    if concepts.attributes:
        truth = torch.stack([sample.attributes[name].bool() for name in concepts.attributes], 1)
        outputs = _outputs(model, images, units, size)
        # projections on directions that are estimated on the other half of the images
        attribute_scores = of_halves(outputs, truth, groups)
        parts.append(_Scores(attribute_scores, truth))
    scores = torch.cat([part.scores for part in parts], -1)
    truth = torch.cat([part.truth for part in parts], -1)
    bench = Bench(
        model,
        images,
        labels,
        by="mean",
        groups=groups,
        seed=seed,
        batch_size=size,
        progress=progress,
    )
    outcomes = bench.without([(unit,) for unit in units])
    heads = [OfHead(model=model.alias, layer=unit.layer, head=_head_of(unit)) for unit in units]
    class_names = [model.classes[number] for number in concepts.classes]
    results = writes(
        heads,
        scores,
        truth,
        [*class_names, *concepts.attributes],
        outcomes,
        control=at_random(scores, truth, groups, seed=seed),
        groups=groups,
    )
    return {(result.layer, result.head): result for result in results}, concepts.rare


def _head_of(unit: Unit) -> int:
    assert unit.head is not None  # the units are heads
    return unit.head


def _scores_of_classes(
    model: Model,
    images: Parts,
    labels: Tensor,
    classes: Sequence[int],
    units: Sequence[Unit],
    size: int,
    progress: Progress,
) -> _Scores:
    """Return what every head adds to each of these classes beyond the mean of all classes."""
    numbers = torch.tensor(classes)
    scores = []
    with progress("Contributions of heads", len(images)) as advance:
        for start in range(0, len(images), size):
            batch = images[start : start + size].to(model.device)
            added = head_contributions(model, batch, numbers)
            scores.append(torch.stack([added[:, unit.layer, _head_of(unit)] for unit in units], 1))
            advance(len(batch))
    return _Scores(torch.cat(scores), labels[:, None] == numbers)


def _outputs(model: Model, images: Parts, units: Sequence[Unit], size: int) -> Tensor:
    """Return the output of every head, (images, heads, width).

    It is the mean over the tokens that the classifier reads: CLS, or all tokens.
    """
    layout = model.anatomy.layout
    cls = () if layout is None else layout.positions("cls")
    reads_cls = len(cls) > 0 and model.anatomy.readout != "mean"
    tokens = f"[{cls[0]}]" if reads_cls else ""  # "" stands for all tokens
    layers = sorted({unit.layer for unit in units})
    places = [f"blocks.{layer}.heads{tokens}" for layer in layers]
    parts = []
    for start in range(0, len(images), size):
        captured = capture(model, images[start : start + size].to(model.device), places)
        by_layer = {}
        for layer, place in zip(layers, places):
            by_layer[layer] = captured[place].float().mean(-2).cpu()
        parts.append(torch.stack([by_layer[unit.layer][:, _head_of(unit)] for unit in units], 1))
    return torch.cat(parts)
