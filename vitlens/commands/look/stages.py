"""How a ViT works on a few images: a row for each stage of its layers, with its heads' patterns and
importance.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from vitlens.commands.look.record import StageRow
from vitlens.report.sections import Section
from vitlens.uncertainty import Estimate

STAGES: Final = 3  # early, middle, late


@dataclass(frozen=True)
class LabelledHead:
    """One head with the pattern that it follows."""

    layer: int
    label: str
    is_clear: bool  # True if it follows one pattern
    distance: float  # px
    uniform_distance: float | None  # px, of uniform attention in its layer

    @property
    def reach(self) -> float | None:
        """Return the attention distance divided by that of uniform attention."""
        return self.distance / self.uniform_distance if self.uniform_distance else None


def stages(
    model: str, heads: Sequence[LabelledHead], loss_without: Mapping[tuple[int, int], float]
) -> Iterator[StageRow]:
    """Yield the stages of a model.

    loss_without: the mean rise of the loss without a head in nats, by (layer, head).
    """
    layers = sorted({head.layer for head in heads})
    for part in np.array_split(layers, min(STAGES, len(layers))):
        of_stage = [head for head in heads if head.layer in part]
        patterns = Counter(head.label for head in of_stage if head.is_clear)
        names = str(part[0])
        if len(part) > 1:
            names = f"{part[0]}–{part[-1]}"
        row = StageRow(
            model,
            layers=names,
            heads=len(of_stage),
            attends=dict(patterns.most_common()),
            unclear=len(of_stage) - patterns.total(),
            range=_mean_reach(of_stage),
        )
        yield _with_most_important_head(row, part.tolist(), loss_without)


def _with_most_important_head(
    row: StageRow, layers: Sequence[int], loss_without: Mapping[tuple[int, int], float]
) -> StageRow:
    """Return the row with the head of these layers without which the loss rises most.

    Returns it unchanged if none is known.
    """
    candidates = [place for place in loss_without if place[0] in layers]
    if not candidates:
        return row
    layer, head = max(candidates, key=lambda place: loss_without[place])
    loss = Estimate(loss_without[layer, head], unit="nats")
    return replace(row, head=f"L{layer}.H{head}", loss=loss)


def _mean_reach(heads: Sequence[LabelledHead]) -> float | None:
    shares = [head.reach for head in heads if head.reach is not None]
    return float(np.mean(shares)) if shares else None


HOW: Final = Section(
    "How does {{ rows[0].model }} work?",
    "stages",
    says="**Layer{% if row.several %}s{% endif %} {{ layers }}**: {% if attends %}of {{ heads }} "
    "heads {{ attends|counts }}{% if unclear %}, {{ unclear }} without a single "
    "pattern{% endif %}{% else %}none of {{ heads }} heads follows a single "
    "pattern{% endif %}.{% if row.range is not none %} The attention distance is "
    "{{ row.range|percent }} of that of uniform attention.{% endif %}{% if row.matters %} Without "
    "{{ row.head }}, the loss rises by {{ row.loss|alone }}.{% elif row.loss %} Removing one head "
    "does not raise the loss.{% endif %}",
    columns=("layers", "attends", "loss"),
)
