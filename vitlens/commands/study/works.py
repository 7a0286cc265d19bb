"""The section "How does ... work?": one picture with a row for each layer, and a sentence for each
stage.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.analysis.naming.words import MATTERS, SAME, names_one
from vitlens.charts.layer_views import Exemplar, HeadView, LayerView, RoleView
from vitlens.charts.layers import layers
from vitlens.commands.run.chapters import Chapter
from vitlens.commands.shared.label_rows import NameRow
from vitlens.commands.study.record import StudyRecord
from vitlens.report.document import FigureSpec, Section, Sentence
from vitlens.report.numbers import percent
from vitlens.report.prose import Marked, listed, say

# the names of the stages, by their number
_STAGES: Final = {1: ("all",), 2: ("early", "late"), 3: ("early", "middle", "late")}
# shares of the distance of uniform attention: from the first on, heads attend everywhere, and up to
# the second nearby
_EVERYWHERE: Final = 0.8
_NEARBY: Final = 0.5
_ATTENDS: Final = {
    SAME: "to the same keys",
    "position to position": "by position",
    "content to content": "by content",
}
NO_ROLE: Final = "no tested role"
# reasons for which the picture lacks a part
_NO_ARRAYS: Final = "the arrays of its chapter are not in this folder"
_NOT_MEASURED: Final = "not measured in this folder"
_ROLES_IN_FULL: Final = {"attends to the same keys": "attends to the same patches for every query"}
_CAPTION: Final = (
    "Rows are layers; columns: attention patterns, attention distance, labels that the logit "
    "lens reads, accuracy lost without each head (orange: the loss changes significantly), and "
    "what one head does."
)
_STAGE: Final = (
    "**{{ name }} ({{ layers }})**: "
    "{% if reach %}heads attend {{ reach }}, {% endif %}"
    "{% if needed %}"
    "{{ needed|names(1) }} {% if needed|length > 1 %}matter{% else %}matters{% endif %} "
    "most to certain classes"
    "{% elif role %}"
    "{{ count }} of {{ heads }} {{ role }}"
    "{% else %}"
    "no head has a tested role"
    "{% endif %}"
    "{% if lens %}, and the class can be read in {{ lens }} of images{% endif %}."
)


def sections(record: StudyRecord) -> Iterator[Section]:
    """Yield the section of each ViT of which heads were measured."""
    for alias in record.vits:
        yield _section(record, alias)


@dataclass(frozen=True)
class ImportantHead:
    """The head that costs most when it is removed.

    role: its tested label in a few words, or NO_ROLE.
    attended_keys: the effective number of keys of a row of its attention, None if it was not
        measured.
    keys: the number of keys of its layer.
    """

    unit: str
    role: str
    attended_keys: float | None
    keys: int


def most_important_head(record: StudyRecord, alias: str) -> ImportantHead | None:
    """Return the head that costs most when removed; None if no head was removed."""
    stats = record.about("stats", alias)
    if stats is None:
        return None
    results = _Measured(stats, ablate=record.about("ablate", alias), attention=None)
    removed = []
    for layer in results.layers:
        for head in results.heads_of(layer):
            if (layer, head) in results.units:
                removed.append((layer, head))
    if not removed:
        return None
    # `rank` is the effect by which units are ranked
    most_important = max(removed, key=lambda place: results.units[place].rank.value)
    layer, _head = most_important
    role = _role_words(results.names.get(most_important))
    return ImportantHead(
        unit=results.units[most_important].unit,
        role=_ROLES_IN_FULL.get(role, role),
        attended_keys=results.attended_keys.get(most_important),
        keys=results.keys[layer],
    )


def _section(record: StudyRecord, alias: str) -> Section:
    stats = record.about("stats", alias)
    assert stats is not None  # as the alias is that of a chapter
    results = _Measured(
        stats, ablate=record.about("ablate", alias), attention=record.about("attention", alias)
    )
    title = say("How {{ alias }} works, layer by layer", alias=alias)
    figure = FigureSpec(f"layers_{alias}", _CAPTION, partial(_draw, results, title), alt=title)
    texts = [*_stage_sentences(results), *_missing_columns(results)]
    detail = results.ablate or stats
    question = say("How does {{ alias }} work?", alias=alias)
    return Section(question, tuple(map(Sentence, texts)), figures=(figure,), more=detail.report)


@dataclass(frozen=True)
class _Measured:
    """The results on the layers and heads of one model; None for chapters that were not run."""

    stats: Chapter
    ablate: Chapter | None
    attention: Chapter | None

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Return the layers with heads."""
        return tuple(sorted({row.layer for row in self.stats.record.heads}))

    @cached_property
    def stages(self) -> Mapping[str, tuple[int, ...]]:
        """Return the layers of each stage."""
        names = _STAGES[min(len(self.layers), max(_STAGES))]
        parts = np.array_split(np.asarray(self.layers), len(names))
        return {name: tuple(part.tolist()) for name, part in zip(names, parts, strict=True)}

    @cached_property
    def names(self) -> Mapping[tuple[int, int], NameRow]:
        """Return the tested labels by layer and head."""
        return {(row.layer, row.head): row for row in self.stats.record.names}

    @cached_property
    def units(self) -> Mapping[tuple[int, int], Any]:
        """Return the effects of removing each head, by layer and head."""
        heads = () if self.ablate is None else self.ablate.record.heads
        return {(row.layer, row.head): row for row in heads}

    @cached_property
    def lens(self) -> Mapping[int, Any]:
        """Return the accuracy of the logit lens after each layer."""
        rows = () if self.ablate is None else self.ablate.record.lens
        # depth 0 is before the first layer
        return {row.depth - 1: row.accuracy for row in rows if row.depth}

    @cached_property
    def distances(self) -> Mapping[tuple[int, int], float]:
        """Return the attention distance of each head, as a share of that of uniform attention."""
        uniform = {row.layer: row.uniform_distance for row in self.stats.record.layers}
        shares = {}
        for row in self.stats.record.heads:
            distance = row.statistics.get("distance")
            of_uniform = uniform.get(row.layer)
            if distance is not None and of_uniform:
                shares[row.layer, row.head] = distance.value / of_uniform
        return shares

    @cached_property
    def attended_keys(self) -> Mapping[tuple[int, int], float]:
        """Return the effective number of keys of each head, by layer and head."""
        attended = {}
        for row in self.stats.record.heads:
            effective = row.statistics.get("effective_keys")
            if effective is not None:
                attended[row.layer, row.head] = effective.value
        return attended

    @cached_property
    def keys(self) -> Mapping[int, int]:
        """Return the number of keys of each layer."""
        return {row.layer: row.keys for row in self.stats.record.layers}

    @cached_property
    def maps(self) -> Mapping[tuple[int, int], Any]:
        """Return the attention of each head on the first image (rows, columns)."""
        if self.attention is None or self.attention.record.maps is None:
            return {}
        record = self.attention.record
        maps = {}
        for index, row in enumerate(record.layers):
            if index not in record.maps.layer:
                continue
            first_image = record.maps.layer[index][0]
            for head, values in enumerate(first_image):
                maps[row.layer, head] = values
        return maps

    @cached_property
    def exemplars(self) -> Mapping[tuple[int, int], list[Any]]:
        """Return the images that each head helps most, by layer and head."""
        exemplars: dict[tuple[int, int], list[Any]] = {}
        if self.ablate is not None and self.ablate.record.pictures is not None:
            for row in self.ablate.record.exemplars:
                exemplars.setdefault((row.layer, row.head), []).append(row)
        return exemplars

    @property
    def image(self) -> Any:
        """Return the image of the maps (3, height, width), in [0, 1]; None without maps."""
        if self.attention is None or not self.maps:
            return None
        return self.attention.record.maps.pixels[0]

    def picture(self, row: Any) -> Any:
        """Return the image of an exemplar (3, height, width), in [0, 1]."""
        assert self.ablate is not None  # as the row is from there
        return self.ablate.record.pictures.images[row.picture] / np.float32(255)

    @property
    def chance(self) -> float | None:
        """Return the accuracy of guessing."""
        if self.ablate is None:
            return None
        models = self.ablate.record.config.models
        if not models or not models[0].classes:
            return None
        number_of_classes: int = models[0].classes
        return 1 / number_of_classes

    def heads_of(self, layer: int) -> list[int]:
        """Return the heads of a layer, the most important first where that was measured."""
        heads = [row.head for row in self.stats.record.heads if row.layer == layer]
        effects = {
            head: self.units[layer, head].rank.value
            for head in heads
            if (layer, head) in self.units
        }
        return sorted(heads, key=lambda head: -effects.get(head, 0.0))

    def described(self, layer: int) -> int:
        """Return the head of a layer that is described.

        It is the one that certain classes need most, else the most important one with a tested
        label, else the most important one.
        """
        heads = self.heads_of(layer)  # the most important first
        needed = [head for head in heads if _is_needed(self.names.get((layer, head)))]
        if needed:
            return max(needed, key=lambda head: _margin(self.names[layer, head]))
        for head in heads:
            name = self.names.get((layer, head))
            if name is not None and name.tested:
                return head
        return heads[0]


def _is_needed(name: NameRow | None) -> bool:
    """Return True if a head is tested to matter most to certain classes."""
    return name is not None and name.state == MATTERS


def _margin(name: NameRow) -> float:
    """Return by how much more the images lose that need a head than the others, nats."""
    return 0.0 if name.margin is None else name.margin.value


def _role_words(name: NameRow | None) -> str:
    """Return the tested label of a head in a few words."""
    if name is None or not name.tested:
        return NO_ROLE
    if _is_needed(name):
        return f"needed most for {name.writes}"
    if names_one(name.looks) and name.looks_hold:
        return f"follows the pattern {name.looks}"
    attends = str(name.attends)
    return f"attends {_ATTENDS.get(attends, f'by {attends}')}"


def _draw(results: _Measured, title: str) -> Figure:
    return layers(_views(results), results.image, results.chance, title)


def _views(results: _Measured) -> list[LayerView]:
    """Return what the picture shows of each layer."""
    stage_of: dict[int, str] = {}
    for stage, stage_layers in results.stages.items():
        stage_of |= dict.fromkeys(stage_layers, stage)
    has_roles = bool(results.names or results.exemplars)
    views = []
    for layer in results.layers:
        heads = tuple(_head_view(results, layer, head) for head in results.heads_of(layer))
        role = _role_view(results, layer) if has_roles else None
        views.append(LayerView(layer, stage_of[layer], heads, results.lens.get(layer), role))
    return views


def _head_view(results: _Measured, layer: int, head: int) -> HeadView:
    unit = results.units.get((layer, head))
    return HeadView(
        head,
        map=results.maps.get((layer, head)),
        distance=results.distances.get((layer, head)),
        lost=None if unit is None else unit.accuracy,
        matters=unit is not None and unit.matters,
    )


def _role_view(results: _Measured, layer: int) -> RoleView:
    head = results.described(layer)
    name = results.names.get((layer, head))
    rows = results.exemplars.get((layer, head), [])
    exemplars = []
    for row in rows:
        # without a grid the patch is unknown, too
        exemplars.append(Exemplar(results.picture(row), row.patch, row.grid or (1, 1)))
    labels = dict.fromkeys(row.class_name for row in rows)  # each once, in order
    return RoleView(
        head,
        helps=tuple(labels),
        words=_role_words(name),
        tested=name is not None and name.tested,
        exemplars=tuple(exemplars),
    )


def _stage_sentences(results: _Measured) -> Iterator[str]:
    """Yield one sentence for each stage: how far its heads attend, what they are needed for, and
    what can be read.
    """
    for stage, stage_layers in results.stages.items():
        places = [(layer, head) for layer in stage_layers for head in results.heads_of(layer)]
        shares = [results.distances[place] for place in places if place in results.distances]
        names = [results.names[place] for place in places if place in results.names]
        needed = [name for name in names if _is_needed(name)]
        role, count = _most_common_role([name for name in names if name.tested])
        lens = results.lens.get(stage_layers[-1])
        numbers = f"layer {stage_layers[0]}"
        if len(stage_layers) > 1:
            numbers = f"layers {stage_layers[0]}–{stage_layers[-1]}"
        yield say(
            _STAGE,
            name=stage.capitalize(),
            layers=numbers,
            heads=len(places),
            reach=_reach(float(np.mean(shares))) if shares else "",
            needed=sorted(needed, key=_margin, reverse=True),
            role=role,
            count=count,
            lens=None if lens is None else Marked(percent(lens.value)),
        )


def _most_common_role(tested: Sequence[NameRow]) -> tuple[str, int]:
    """Return the most common label of these heads, as a verb phrase, and how many have it."""
    counts = Counter(_role_words(name) for name in tested)
    if not counts:
        return "", 0
    words, count = counts.most_common(1)[0]
    if count == 1:
        return words, count
    verb, _, rest = words.partition(" ")
    return f"{verb.removesuffix('s')} {rest}", count  # "attends by" becomes "attend by"


def _reach(share: float) -> str:
    """Return how far heads attend, in words; share: of the distance of uniform attention."""
    if share >= _EVERYWHERE:
        return "globally"
    return "mostly nearby" if share <= _NEARBY else "both near and far"


def _missing_columns(results: _Measured) -> Iterator[str]:
    """Yield which columns of the picture are missing, and why."""
    reasons = [f"{part} ({reason})" for part, reason in _missing(results)]
    if reasons:
        yield say("Not shown: {{ parts }}.", parts=listed(reasons))


def _missing(results: _Measured) -> Iterator[tuple[str, str]]:
    """Yield each part that the picture lacks with its reason."""
    ablate = results.ablate
    attention = results.attention
    if not results.maps:
        reason = _NO_ARRAYS
        if attention is None:
            reason = "the chapter attention did not finish"
        elif attention.record.without_map and not attention.record.layers:
            reason = attention.record.without_map[0].reason
        yield "attention patterns", reason
    if not results.distances:
        reasons = [row.unplaced for row in results.stats.record.layers if row.unplaced]
        yield "attention distance", _first(reasons, "patches have no distance in this model")
    if ablate is None:
        yield (
            "the logit lens, the accuracy lost and images of heads",
            "the chapter ablate did not finish",
        )
    else:
        not_measured = _first(ablate.record.model.undone, _NOT_MEASURED)
        if not results.lens:
            yield "the logit lens", not_measured
        if not results.units:
            yield "accuracy lost", "no head was removed"
        if not results.exemplars:
            # rows without their pictures: the arrays were left out of the folder
            has_rows = bool(ablate.record.exemplars)
            yield "images of heads", _NO_ARRAYS if has_rows else not_measured
    if not results.names:
        notes = [row.note for row in results.stats.record.notes]
        yield "labels of heads", _first(notes, _NOT_MEASURED)


def _first(reasons: Sequence[str], default: str) -> str:
    """Return the first reason, or the default if there is none."""
    return reasons[0] if reasons else default
