"""The head board: what every head looks at, its label, and what its ablation costs; the five heads that matter most."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.ablate.record import UnitRow
from vitlens.commands.shared.maps.on_object import HEAD, OnObjectRow
from vitlens.commands.shared.sheets import sheets
from vitlens.commands.stats.record import HeadRow
from vitlens.commands.study.report.whole.chapters import Study
from vitlens.names import Replacement
from vitlens.report.document import FigureSpec, Sentence, Table
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST: Final = 5  # heads that are named
_SHORT: Final[Mapping[str, str]] = MappingProxyType({"resample": "res."})  # twelve heads stand in a row
Head = tuple[int, int]
Maps = Mapping[Head, NDArray[np.floating]]


@dataclass(frozen=True)
class KnownHead:
    """One head of a ViT as the chapters describe it: its statistics, its ablation, its share of the object."""

    name: str
    described: HeadRow | None
    main: UnitRow
    objects: OnObjectRow | None

    @property
    def label(self) -> str:
        """What it attends to."""
        return "not labelled" if self.described is None or self.described.label is None else self.described.label

    @property
    def ablated(self) -> Mapping[Replacement, tuple[Estimate, bool]]:
        """The rise of the loss with each replacement, and whether it is significant."""
        return self.main.losses

    @property
    def rows(self) -> tuple[object, ...]:
        """Everything that is known of it."""
        return (self.described, self.objects, self.main)


def head_board(study: Study, alias: str) -> Iterator[FigureSpec]:
    """The board of one ViT, of many layers on several sheets."""
    heads = known_heads(study, alias)
    if not any(head.described for head in heads.values()):
        return
    from vitlens.figures.study.described_heads import layers_on_a_page

    image, maps = _maps(study, alias)
    layers = sorted({layer for layer, _ in heads})
    lines = max(len(head.ablated) + (head.objects is not None) for head in heads.values())
    each = layers_on_a_page(1 + max(head for _, head in heads), lines)
    for name, part in sheets(f"head_board_{alias}", len(layers), each):
        shown = {place: head for place, head in heads.items() if place[0] in layers[part]}
        yield FigureSpec(
            name,
            "Every head: its attention map on one image (own colours, from 0), its label, the rise of the loss in nats "
            "when it is replaced by its mean and by its output on another image (res.; coloured: significant after "
            "Holm's correction), and the share of its map on the object. docs/stats.md explains the labels.",
            partial(_draw, shown, image, maps),
        )


def head_table(study: Study, alias: str) -> Table | None:
    """The same numbers, the most important heads first."""
    heads = sorted(known_heads(study, alias).values(), key=lambda head: -head.main.loss.value)
    if not heads:
        return None
    columns = {"head": lambda head: head.name, "label": lambda head: head.label}
    for kind in heads[0].ablated:
        columns[f"rise of the loss ({kind}), nats"] = partial(_rise, kind)
    if any(head.objects for head in heads):
        columns["attention on the object"] = lambda head: head.objects and head.objects.estimate
        columns["beyond the best map that ignores the image"] = lambda head: head.objects and head.objects.difference
    return Table.of(f"The heads of {alias}, those that matter most first", heads, columns)


def head_sentences(study: Study, alias: str) -> Iterator[Sentence]:
    """The heads that matter most and what they do; that none does, where that is so."""
    heads = known_heads(study, alias)
    if not heads:
        return
    ranked = sorted(heads.values(), key=lambda head: -head.main.loss.value)
    significant = [head for head in ranked if head.main.matters][:_MOST]
    if not significant:
        text = f"No head of {alias} changes the loss significantly when it alone is ablated."
        yield Sentence(text, tuple(head.main for head in heads.values()))
        return
    named = [f"{head.name} ({head.label}; {in_words(head.main.loss)})" for head in significant]
    yield Sentence(f"The loss rises most without {'; '.join(named)}.", tuple(head.rows for head in significant))


def known_heads(study: Study, alias: str) -> Mapping[Head, KnownHead]:
    """The heads of a ViT that were ablated, with what the other chapters know of them."""
    stats, ablate, attention = (study.about(word, alias) for word in ("stats", "ablate", "attention"))
    described = () if stats is None else stats.record.heads
    ablated = () if ablate is None else ablate.record.heads
    objects = () if attention is None else attention.record.on_object
    by_place = {(row.layer, row.head): row for row in described if row.model == alias}
    on_object = {(row.layer, row.head): row for row in objects if row.maps == HEAD}
    return {
        place: KnownHead(row.unit, by_place.get(place), row, on_object.get(place))
        for row in ablated for place in [(row.layer, row.head)]
    }  # fmt: skip


def _rise(kind: Replacement, head: KnownHead) -> object:
    return head.ablated[kind][0]


def _maps(study: Study, alias: str) -> tuple[NDArray[np.floating] | None, Maps]:
    """The first image of the chapter on attention, and each head's map of it."""
    attention = study.about("attention", alias)
    if attention is None or attention.record.maps is None:
        return None, {}
    maps, layers = attention.record.maps.layer, attention.record.layers
    return attention.record.maps.pixels[0], {
        (row.layer, head): one for index, row in enumerate(layers) for head, one in enumerate(maps[index][0])
    }


def _draw(heads: Mapping[Head, KnownHead], image: NDArray[np.floating] | None, maps: Maps) -> "Figure":
    from vitlens.figures.study.described_heads import DescribedHead, described_heads

    drawn = {place: DescribedHead(maps.get(place), head.label, tuple(_numbers(head))) for place, head in heads.items()}
    return described_heads(heads=drawn, image=image, title="What each head looks at, and what its ablation costs")


def _numbers(head: KnownHead) -> Iterator[tuple[str, bool]]:
    for kind, (loss, significant) in head.ablated.items():
        yield f"{_SHORT.get(kind, kind)} {loss.value:+.2f}", significant
    if head.objects is not None:
        yield f"object {percent(head.objects.estimate.value)}", False
