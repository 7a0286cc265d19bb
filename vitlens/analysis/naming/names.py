"""Three words for every head: by what it attends, what it looks at, what it writes, each with its
test.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench, Unit, require_heads, silent, units_of
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.batch import layers_of
from vitlens.analysis.heads.registry import THRESHOLD
from vitlens.analysis.heads.specialisation import HeadLabel, Specialisation, half_width, specialise
from vitlens.analysis.heads.statistics import Statistics, Stream, require_statistics
from vitlens.analysis.naming.attends import AttendsBy, agreement, attends_by, orders, shuffled
from vitlens.analysis.naming.logits import LayerParts, logit_parts
from vitlens.analysis.naming.words import STATES, names_one, three_words
from vitlens.analysis.naming.writes import FEWEST as FEWEST_OF_ONE
from vitlens.analysis.naming.writes import (
    LEVEL,
    Things,
    Writes,
    at_random,
    of_halves,
    things_of,
    writes,
)
from vitlens.analysis.patching.contribution import blocks_of, head_contributions
from vitlens.classes import required_labels
from vitlens.errors import InputError, UnsupportedError
from vitlens.inputs import takes_images
from vitlens.lens.capture import capture
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, Parts, as_parts, groups_of
from vitlens.summary import Line, Table
from vitlens.uncertainty import Estimate, holm

FEWEST: Final = 50  # images with labels: of fewer, no word is tested for what a head writes
Progress: TypeAlias = Callable[..., AbstractContextManager[Callable[[int], object]]]
SHUFFLED: Final = 64  # images, the first ones


@dataclass(frozen=True)
class LooksAt:
    """What one head looks at: its label, by the information in its attention that the pattern
    explains.

    score: of the label; moved: its score on images whose patches are shuffled, masks with them;
    holds: whether the pattern still explains most there, None without a test or for a head without
    one pattern.
    """

    word: str
    score: Estimate
    moved: Estimate | None
    holds: bool | None


@dataclass(frozen=True)
class HeadName:
    """One head, its words; None where it has no such word. holds: whether the sides that `attends`
    names hold on shuffled images, after Holm's correction over heads; None without a test.
    """

    layer: int
    head: int
    attends: AttendsBy | None
    holds: bool | None
    looks: LooksAt | None
    writes: Writes | None

    @property
    def words(self) -> str:
        """Return all three in one line, with what their tests said."""
        return three_words(
            self.attends.word if self.attends else None,
            self.holds,
            *((self.looks.word, self.looks.holds) if self.looks else (None, None)),
            *((self.writes.word, self.writes.state) if self.writes else (None, None)),
        )


@dataclass(frozen=True, repr=False)
class HeadNames(Table):
    """Words for every head of a model. images: their number; shuffled: those that were also
    shuffled; notes: one line for each word that could not be given, or not be tested, to the
    model's heads.
    """

    heads: tuple[HeadName, ...]
    images: int
    shuffled: int
    notes: tuple[str, ...] = ()

    def summary(self) -> Iterator[Line]:
        """Yield how many heads have each word, and how many of those that were tested hold."""
        yield Line("heads", len(self.heads))
        tested = [head for head in self.heads if head.holds is not None]
        yield Line(
            "attends by: tested, holds", (len(tested), sum(bool(head.holds) for head in tested))
        )
        seen = [
            head.looks.holds
            for head in self.heads
            if head.looks is not None and head.looks.holds is not None
        ]
        yield Line("looks at: tested, holds", (len(seen), sum(seen)))
        states = [head.writes.state for head in self.heads if head.writes is not None]
        for state in STATES:
            yield Line(f"writes: {state}", states.count(state))
        for note in self.notes:
            yield Line("note", note)

    def records(self) -> Iterator[dict[str, object]]:
        """Return a row for each head: its three words and what their tests said, None where there
        is none.
        """
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
    """Return three words for every head, each tested by an intervention: by what it attends, what
    it looks at, what it writes.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes; labels: class
    indices (n,), or "predicted" (None: those of the Split or the class folders); attributes: of the
    images, by name (n,), True or False each, that a head may write as it may write a class; masks:
    (n, height, width) True on the object. The first two words are tested on images whose patches
    are shuffled: what is by position stays, what is by content moves. The third is tested by
    ablating the head; it names up to three classes where no test separates them. Outputs of heads
    of all images are kept in memory: a few hundred images are enough. Raises UnsupportedError for a
    model without attention between tokens, InputError for masks or attributes of another number
    than images.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> names = vitlens.name_heads(vit, torch.rand(8, 3, 32, 32))
    >>> len(names.heads), names.heads[0].writes is None  # without labels
    (24, True)
    """
    require_statistics(model)
    size = batch_size or fitting_batch_size(model)
    pixels = as_parts(images)
    known = None if labels is None else required_labels(model, pixels, labels, size)
    return named(model, pixels, known, attributes or {}, masks, size, seed)


def named(
    model: Model,
    images: Parts,
    labels: Tensor | None,
    attributes: Mapping[str, Tensor],
    masks: Tensor | None,
    size: int,
    seed: int,
    progress: Progress = silent,
    *,
    remove: bool = True,
    known: Statistics | None = None,
) -> HeadNames:
    """`name_heads` of images that are read `size` at a time; progress: of its loops (words, total);
    remove: also say what heads write, for which every head is removed; known: the statistics from
    which heads are labelled, of more images than these (None: of these).
    """
    for name, value in {"masks": masks, **attributes}.items():
        if value is not None and len(value) != len(images):
            raise InputError(f"expected {name} of {len(images)} images, found {len(value)}")
    groups = groups_of(images)
    notes = list[str]()
    count = len(images)
    if known is None:
        with progress("Statistics of heads", count) as advance:
            known = _statistics(model, images, masks, groups, size, advance)
    roles = specialise(known)
    parts: Mapping[int, LayerParts] = {}
    try:
        with progress("Queries and keys", 2 * count) as advance:
            parts = logit_parts(model, images, size, advance)
    except InputError as error:
        notes.append(f"by what heads attend: {error}")
    some = min(SHUFFLED, count)
    layout = model.anatomy.layout
    few = None if groups is None else groups[:some]
    sides = dict[int, Tensor]()
    moved = None
    if layout is None or tuple(layout.image_size) != tuple(model.input_size):
        notes.append(
            "attention is not tested on shuffled patches: the tokens are not patches of the image"
        )
    else:
        order = orders(layout, some, seed=seed)
        with progress("Shuffled patches", 2 * some) as advance:
            sides = agreement(model, images, list(parts), order, size)
            advance(some)
            moved = specialise(_statistics(model, images, masks, few, size, advance, order))
    written: Mapping[tuple[int, int], Writes] = {}
    try:
        if remove:
            written, rare = _writes(model, images, labels, attributes, size, seed, progress)
            if rare:
                notes.append(_note_on(rare, groups))
    except (InputError, UnsupportedError) as error:
        notes.append(f"what heads write: {error}")
    attends = {
        (layer, head): attends_by(part, head, count, sides.get(layer), few)
        for layer, part in parts.items()
        for head in range(part.shares.shape[1])
    }
    tested = {at: each.p for at, each in attends.items() if each.p is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())) if tested else ()))
    heads = []
    for site in layers_of(model):
        labelled = roles.head_labels[site.layer]
        for head in range(site.heads):
            at = (site.layer, head)
            holds = adjusted[at] <= LEVEL if at in adjusted else None
            looks = (
                _looks(labelled[head], *at, moved, known.images, some)
                if head < len(labelled)
                else None
            )
            heads.append(HeadName(*at, attends.get(at), holds, looks, written.get(at)))
    return HeadNames(tuple(heads), count, 0 if moved is None else some, tuple(notes))


def _statistics(
    model: Model,
    images: Parts,
    masks: Tensor | None,
    groups: Tensor | None,
    size: int,
    advance: Callable[[int], object],
    order: Tensor | None = None,
) -> Statistics:
    """Return the statistics of heads on the images, or on the first ones with their patches, and
    masks, in this order.
    """
    stream = Stream(model, groups=groups)
    count = len(images if order is None else order)
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        batch = images[rows].to(model.device)
        own = None if masks is None else masks[rows]
        if order is not None:
            batch = shuffled(batch, model.layout, order[rows])
            own = (
                None
                if own is None
                else shuffled(own[:, None].float(), model.layout, order[rows])[:, 0] > 0.5
            )
        stream.add(batch, masks=own)
        advance(len(batch))
    return stream.result()


def _looks(
    given: HeadLabel,
    layer: int,
    head: int,
    moved: Specialisation | None,
    images: int,
    shuffled: int,
) -> LooksAt:
    known = given.low == given.low  # else NaN: one image
    score = Estimate(
        given.score, given.low if known else None, given.high if known else None, images, ""
    )
    if moved is None or not names_one(given.label):
        return LooksAt(given.label, score, None, None)
    samples = moved.samples[layer][given.label][:, head]
    value = float(samples[0])
    half = half_width(samples)
    if half != half:
        return LooksAt(given.label, score, Estimate(value, n=shuffled, unit=""), None)
    low = max(value - half, 0.0)
    high = min(value + half, 1.0)
    return LooksAt(given.label, score, Estimate(value, low, high, shuffled, ""), value >= THRESHOLD)


def _note_on(rare: Sequence[str], groups: Tensor | None) -> str:
    """Return the note on attributes that are not tested."""
    images = "images" if groups is None else "sources of images"
    return (
        f"what heads write: fewer than {FEWEST_OF_ONE} {images} have, or lack, "
        f"{', '.join(rare)}: not tested"
    )


class _Scores(NamedTuple):
    """scores (images, heads, things): of each head for each class or attribute; truth (images,
    things).
    """

    scores: Tensor
    truth: Tensor


def _writes(
    model: Model,
    images: Parts,
    labels: Tensor | None,
    attributes: Mapping[str, Tensor],
    size: int,
    seed: int,
    progress: Progress,
) -> tuple[dict[tuple[int, int], Writes], list[str]]:
    """Return what each head writes, by layer and head, and the attributes that are too rare to be
    tested.
    """
    model.require_classifier()
    require_heads(model)
    if labels is None:
        raise InputError(
            "expected labels, found none; give labels=, or data with a folder for each class"
        )
    if len(images) < FEWEST:
        raise InputError(f"expected at least {FEWEST} images with labels, found {len(images)}")
    groups = groups_of(images)
    tested = things_of(labels, model.classes, attributes, groups)
    if not tested.classes and not tested.attributes:
        kind = "images" if groups is None else "sources of images"
        raise InputError(
            f"expected a class or an attribute that {FEWEST_OF_ONE} {kind} have and "
            f"{FEWEST_OF_ONE} lack, found none"
        )
    blocks_of(model)  # or what the classifier reads of a head is not known
    units = units_of(model, kinds=["head"])
    parts = []
    if tested.classes:
        parts.append(
            _scores_of_classes(model, images, labels, tested.classes, units, size, progress)
        )
    if tested.attributes:
        held = torch.stack([attributes[name].bool() for name in tested.attributes], 1)
        parts.append(_Scores(of_halves(_outputs(model, images, units, size), held, groups), held))
    scores = torch.cat([part.scores for part in parts], -1)
    truth = torch.cat([part.truth for part in parts], -1)
    bench = Bench(model, images, labels, "mean", groups, seed, size, progress=progress)
    outcomes = bench.without([(unit,) for unit in units])
    control = at_random(scores, truth, groups, seed=seed)
    words = writes(
        scores, truth, _names_of(tested, model), outcomes, control=control, groups=groups
    )
    return {(unit.layer, unit.head or 0): word for unit, word in zip(units, words)}, tested.rare


def _names_of(tested: Things, model: Model) -> list[str]:
    return [*(model.classes[number] for number in tested.classes), *tested.attributes]


def _scores_of_classes(
    model: Model,
    images: Parts,
    labels: Tensor,
    classes: Sequence[int],
    units: tuple[Unit, ...],
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
            scores.append(torch.stack([added[:, unit.layer, unit.head or 0] for unit in units], 1))
            advance(len(batch))
    return _Scores(torch.cat(scores), labels[:, None] == numbers)


def _outputs(model: Model, images: Parts, units: tuple[Unit, ...], size: int) -> Tensor:
    """Return the output of every head (images, heads, width), the mean over the tokens that the
    classifier reads.
    """
    cls = model.anatomy.layout.positions("cls") if model.anatomy.layout is not None else ()
    where = f"[{cls[0]}]" if cls and model.anatomy.readout != "mean" else ""
    by_layer = sorted({unit.layer for unit in units})
    found = []
    for start in range(0, len(images), size):
        places = [f"blocks.{layer}.heads{where}" for layer in by_layer]
        captured = capture(model, images[start : start + size].to(model.device), places)
        rows = {
            layer: captured[place].float().mean(-2).cpu() for layer, place in zip(by_layer, places)
        }
        found.append(torch.stack([rows[unit.layer][:, unit.head or 0] for unit in units], 1))
    return torch.cat(found)
