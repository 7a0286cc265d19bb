"""How a ViT works on a few images: a row for each stage of its layers.

A row has the patterns of the stage's heads, and the most important head.
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
    """One head with the pattern that it follows.

    is_clear: True if it follows one pattern.
    distance: the mean distance from a query to the attended patches, in px.
    uniform_distance: that of uniform attention in its layer, in px; None if it has none.
    """

    layer: int
    label: str
    is_clear: bool
    distance: float
    uniform_distance: float | None

    @property
    def reach(self) -> float | None:
        """Return the attention distance divided by that of uniform attention."""
        if not self.uniform_distance:
            return None
        return self.distance / self.uniform_distance


def stages(
    model: str, heads: Sequence[LabelledHead], loss_without: Mapping[tuple[int, int], float]
) -> Iterator[StageRow]:
    """Yield the stages of a model.

    loss_without: the mean rise of the loss without a head in nats, by (layer, head).
    """
    layers = sorted({head.layer for head in heads})
    for stage_layers in np.array_split(layers, min(STAGES, len(layers))):
        stage_heads = [head for head in heads if head.layer in stage_layers]
        patterns = Counter(head.label for head in stage_heads if head.is_clear)
        layer_range = str(stage_layers[0])
        if len(stage_layers) > 1:
            layer_range = f"{stage_layers[0]}–{stage_layers[-1]}"
        row = StageRow(
            model,
            layers=layer_range,
            heads=len(stage_heads),
            attends=dict(patterns.most_common()),
            unclear=len(stage_heads) - patterns.total(),
            range=_mean_reach(stage_heads),
        )
        yield _with_most_important_head(row, stage_layers.tolist(), loss_without)


def _with_most_important_head(
    row: StageRow, layers: Sequence[int], loss_without: Mapping[tuple[int, int], float]
) -> StageRow:
    """Return the row with the head of these layers without which the loss rises most.

    Returns it unchanged if no head of these layers was removed.
    """
    rises = {}
    for (layer, head), rise in loss_without.items():
        if layer in layers:
            rises[f"L{layer}.H{head}"] = rise
    if not rises:
        return row
    name = max(rises, key=lambda head: rises[head])
    return replace(row, head=name, loss=Estimate(rises[name], unit="nats"))


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
