"""The claims of `vitlens attention`: layers on the object, information in maps, position
embeddings, and limits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from vitlens.commands.attention.record import AttentionRecord, LayerRow
from vitlens.commands.shared.explorer import sinks_claim, without_explorer
from vitlens.commands.shared.maps.record import (
    ATTENTION,
    FIXED,
    UNIFORM,
    fixed_maps,
    mass_of,
    mixed_heads_words,
)
from vitlens.report.claims import FEWEST, Claim, Kind, above, below, found
from vitlens.report.prose import say
from vitlens.uncertainty import Estimate

# correlation of similarity with distance, from which on embeddings depend on the distance
ORDERED: Final = -0.2
COLLAPSED: Final = 0.95  # cosine similarity, from which on two maps look the same


def claims(record: AttentionRecord) -> Iterator[Claim]:
    """Yield which layers attend to the object, which maps are uniform, fixed, alike or sinks, and
    position claims.
    """
    (alias,) = record.aliases
    if record.images >= FEWEST:
        yield from _on_object(record, alias)
        yield _information(record.layers, alias)
        for fault in _map_faults(record.layers):
            yield _fault_claim(fault, alias)
    if not record.on_object:  # photographs without masks
        yield from sinks_claim(record, alias)
    for row in record.layout:
        if row.distance is not None:
            yield found(
                "position embeddings",
                row.model,
                "In **{{ model }}**, position embeddings of near patches are {{ how }} similar "
                "than those of far patches (correlation with distance {{ effect|value }}).",
                row.distance,
                given={
                    "model": row.model,
                    "how": "more" if row.distance.value <= ORDERED else "no more",
                },
                kind="answer",
                place="position_maps",
            )


def _on_object(record: AttentionRecord, alias: str) -> Iterator[Claim]:
    """Yield how many layers attend to the object more than maps that ignore the image."""
    rows = mass_of(record.on_object, ATTENTION)
    if not rows:
        return
    significant = [row for row in rows if above(row.difference, 0.0, len(rows))]
    lead = max(significant or rows, key=lambda row: row.difference.value)
    yield found(
        "attention on the object",
        alias,
        "In {{ more|length or 'none' }} of {{ n }} layer{{ n|s }}, attention favours the object "
        "more than its usual place predicts{% if n > 1 %} (corrected for {{ n }} layers)"
        "{% endif %}. The gap is largest in layer {{ lead.layer }}: "
        "{{ lead.estimate|alone }} compared with {{ lead.of_baseline|value }} of "
        "{{ lead.baseline }}.",
        lead.difference,
        given={"more": significant, "n": len(rows), "lead": lead, "alias": alias},
        kind="answer",
        headline="{{ more|length or 'None' }} of {{ n }} layer{{ n|s }} of {{ alias }} "
        "attend{{ 's' if not more }} to the object significantly more than baselines",
        evidence="attributed",
        place="object",
    )


def _information(rows: Sequence[LayerRow], alias: str) -> Claim:
    """Return the layer with the sharpest mean map."""
    sharpest = max(rows, key=lambda row: row.information.value)
    return found(
        "information",
        alias,
        "The mean map of the heads is sharpest in layer {{ row.layer }}, with {{ effect|alone }}.",
        sharpest.information,
        given={"row": sharpest, "alias": alias},
        kind="answer",
        evidence="attributed",
        place="layers",
        headline="Attention of {{ alias }} is sharpest in layer {{ row.layer }}",
    )


@dataclass(frozen=True)
class _MapFault:
    """Layers whose mean maps have one fault.

    question: the name of the fault, as the question of its claim.
    extreme: the value of the layer that is nearest to the limit.
    limit: the value from which on a map has the fault.
    template: of the sentence, with `layers` and `effect`, which is `extreme`.
    """

    question: str
    rows: Sequence[LayerRow]
    extreme: Estimate
    limit: float
    template: str
    kind: Kind = "hidden fault"


def _map_faults(rows: Sequence[LayerRow]) -> Iterator[_MapFault]:
    """Yield the layers whose maps are uniform, the same for every image, or all alike from some
    layer to the last.
    """
    tests = len(rows)  # layers, for whose number intervals are widened
    uniform = [row for row in rows if below(row.information, UNIFORM, tests)]
    if uniform:
        # uniform maps are expected in the earlier half of the layers only
        is_late = any(row in uniform for row in rows[tests // 2 :])
        yield _MapFault(
            question="uniform maps",
            rows=uniform,
            extreme=_extreme(max, uniform, "information"),
            limit=UNIFORM,
            template="The mean maps of {{ layers|ranges }} are uniform and distinguish no patches: "
            "at most {{ effect|value }}.",
            kind="hidden fault" if is_late else "expected fact",
        )
    fixed = fixed_maps(rows)
    if fixed:
        yield _MapFault(
            question="fixed places",
            rows=fixed,
            extreme=_extreme(max, fixed, "by_place"),
            limit=FIXED,
            template="The mean maps of {{ layers|ranges }} are nearly the same for every image: "
            "other images explain up to {{ effect|value }} of the information.",
        )
    # from the last layer back, while each map is like that of the layer before it; uniform maps are
    # alike by themselves, so they are skipped
    from_last = [row for row in reversed(rows) if row not in uniform]
    collapsed = list(takewhile(lambda row: above(row.previous, COLLAPSED, tests), from_last))
    if len(collapsed) > 1:
        yield _MapFault(
            question="collapse",
            rows=collapsed,
            extreme=_extreme(min, collapsed, "previous"),
            limit=COLLAPSED,
            template="The maps collapse with depth: in {{ layers|ranges }}, each mean map has a "
            "cosine similarity of at least {{ effect|value }} to that of the previous layer.",
        )


def _extreme(choose: Callable[..., Estimate], rows: Sequence[LayerRow], column: str) -> Estimate:
    """Return the largest or smallest estimate of a column; choose: max or min."""
    estimates = [getattr(row, column) for row in rows]
    return choose(estimates, key=lambda estimate: estimate.value)


def _fault_claim(fault: _MapFault, alias: str) -> Claim:
    return found(
        fault.question,
        alias,
        fault.template,
        fault.extreme,
        given={"layers": [row.layer for row in fault.rows]},
        reference=fault.limit,
        evidence="attributed",
        place="layers",
        kind=fault.kind,
    )


def unknown(record: AttentionRecord) -> Iterator[str]:
    """Yield what maps of attention do not show."""
    if record.mixed_heads:
        yield mixed_heads_words(record.mixed_heads)
    yield (
        "High attention to a patch does not show that the prediction depends on it, or which "
        "information is taken from it. `vitlens ablate` removes heads, `vitlens explain` patches."
    )
    yield say(
        "{% if few %}{{ n }} image{{ n|s }} {{ n|are }} too few for a claim about "
        "heads{% else %}These are means over {{ n }} images{% endif %}. `vitlens stats` measures "
        "every head on a data set.",
        n=record.images,
        few=record.images < FEWEST,
    )
    if not record.on_object:
        yield "No masks of objects are known, so maps are not compared with the object."
    yield from without_explorer(record.explorer)
