"""How a ViT works, a row for each stage of its layers: what heads attend to, and what breaks without them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from vitlens.analysis.naming.words import MATTERS
from vitlens.commands.shared.maps.record import ATTENTION, OnObjectRow
from vitlens.commands.shared.names import NameRow
from vitlens.record import OfModel, col
from vitlens.report.sections import Section
from vitlens.uncertainty import Estimate

STAGES: Final = 3  # early, middle, late


@dataclass(frozen=True)
class StageRow(OfModel):
    """Some layers in a row. attends: heads by the one pattern that they follow; unclear: heads that follow none or
    several; by: heads by what they attend by, writes: the classes that heads write, where that stands its test; range:
    their attention distance, of that of uniform attention; object: attention on the object, the mean of the layers;
    block, loss: the one whose removal costs most; head: the same where no blocks were ablated; lens: accuracy of the
    classifier on the residual stream after them."""

    layers: str = col("layers")
    heads: int = col("heads")
    attends: Mapping[str, int] = col("attend to")
    unclear: int = col("no single pattern")
    range: float | None = col(
        "distance, of uniform attention", unit="fraction",
        term="the mean distance in px from query to attended patch, divided by that of uniform attention", default=None,
    )  # fmt: skip
    object: float | None = col("attention on the object", unit="fraction", default=None)
    baseline: float | None = col("of the best map that ignores the image", unit="fraction", default=None)
    block: str = col("block", default="")
    head: str = col("head", default="")
    loss: Estimate | None = col("rise of the loss without its most important part", default=None)
    lens: Estimate | None = col("label read after them", default=None)
    by: Mapping[str, int] | None = col("attend by (tested)", default=None)
    writes: tuple[str, ...] = col("class hurt most without a head", default=())

    @property
    def several(self) -> bool:
        """Whether it is more than one layer."""
        return not self.layers.isdecimal()

    @property
    def matters(self) -> bool:
        """Whether the loss rises without it, as far as the images decide; for one image, whether it rose."""
        return self.loss is not None and (self.loss.value if self.loss.low is None else self.loss.low) > 0


def stages(
    model: str,
    heads: Sequence[Any],
    layers: Sequence[Any],
    units: Sequence[Any] = (),
    lens: Sequence[Any] = (),
    on_object: Sequence[OnObjectRow] = (),
    names: Sequence[NameRow] = (),
) -> Iterator[StageRow]:
    """The stages of one model, from what other commands measured of it: heads, layers, names of stats, units, lens of
    ablate, where the maps of attention lie; of units only blocks count, where there are some."""
    known = sorted({row.layer for row in heads})
    kind = "block" if any(row.kind == "block" for row in units) else "head"
    for part in np.array_split(known, min(STAGES, len(known))):
        own = [row for row in heads if row.layer in part]
        clear = Counter(row.label for row in own if row.is_clear)
        removed = [row for row in units if row.layer in part and row.kind == kind]
        worst = max(removed, key=lambda row: row.loss.value, default=None)
        placed = [row for row in on_object if (row.maps, row.score) == (ATTENTION, "mass") and row.layer in part]
        yield StageRow(
            model,
            f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]),
            len(own),
            dict(clear.most_common()),
            len(own) - sum(clear.values()),
            _range(own, {row.layer: row.uniform_distance for row in layers}),
            _mean([row.estimate.value for row in placed]),
            _mean([row.of_baseline.value for row in placed]),
            worst.unit if worst and kind == "block" else "",
            worst.unit if worst and kind == "head" else "",
            None if worst is None else worst.loss,
            next((row.accuracy for row in lens if row.depth == part[-1] + 1), None),
            by=_counted(row.attends for row in names if row.layer in part and row.holds),
            writes=tuple(f"{row.name} {row.writes}" for row in names if row.layer in part and row.state == MATTERS),
        )


def _range(heads: Sequence[Any], uniform: Mapping[int, float | None]) -> float | None:
    shares = [
        row.statistics["distance"].value / far
        for row in heads
        if "distance" in row.statistics and (far := uniform.get(row.layer))
    ]
    return _mean(shares)


def _counted(words: Iterable[str | None]) -> Mapping[str, int] | None:
    return dict(Counter(word for word in words if word is not None).most_common()) or None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


HOW: Final = Section(
    "How does {{ rows[0].model }} work?",
    lambda record: record.stages,
    says="**Layer{% if row.several %}s{% endif %} {{ layers }}**: {% if attends %}of {{ heads }} heads "
    "{{ attends|counts }}{% if unclear %}, {{ unclear }} without a single pattern{% endif %}{% else %}none of {{ "
    "heads }} heads follows a single pattern"
    "{% endif %}.{% if row.by %} On shuffled patches they attend by {{ row.by|counts }}.{% endif %}"
    "{% if row.writes %} Removing a head hurts one class most: {{ row.writes|join(', ') }}.{% endif %}{% if row.range "
    "is not none %} Attention reaches {{ row.range|percent }} of the distance of uniform attention."
    "{% endif %}{% if row.matters %} Without {{ row.block or row.head }} the loss rises by {{ row.loss|alone }}."
    "{% elif row.loss %} Removing one {{ row.block and 'block' or 'head' }} does not raise the loss "
    "significantly.{% endif %}{% if row.lens %} The final classifier, applied here, is right on {{ "
    "row.lens|value }}.{% endif %}",
    columns=("layers", "attends", "by", "writes", "loss", "lens"),
)
