"""How a ViT works on a few images, a row for each stage of its layers: what heads attend to, what breaks without."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from vitlens.commands.look.record import StageRow
from vitlens.report.sections import Section

STAGES: Final = 3  # early, middle, late


def stages(model: str, heads: Sequence[Any], layers: Sequence[Any], removed: Sequence[Any]) -> Iterator[StageRow]:
    """Yield the stages of a model. heads, layers: as `vitlens stats` has them; removed: as the units of ablate."""
    known = sorted({row.layer for row in heads})
    uniform = {row.layer: row.uniform_distance for row in layers}
    for part in np.array_split(known, min(STAGES, len(known))):
        of_stage = [row for row in heads if row.layer in part]
        clear = Counter(row.label for row in of_stage if row.is_clear)
        worst = max((row for row in removed if row.layer in part), key=lambda row: row.loss.value, default=None)
        yield StageRow(
            model,
            f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]),
            len(of_stage),
            dict(clear.most_common()),
            len(of_stage) - sum(clear.values()),
            _reach(of_stage, uniform),
            "" if worst is None else worst.unit,
            None if worst is None else worst.loss,
        )


def _reach(heads: Sequence[Any], uniform: Mapping[int, float | None]) -> float | None:
    shares = [
        row.statistics["distance"].value / far
        for row in heads
        if "distance" in row.statistics and (far := uniform.get(row.layer))
    ]
    return _mean(shares)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


HOW: Final = Section(
    "How does {{ rows[0].model }} work?",
    lambda record: record.stages,
    says="**Layer{% if row.several %}s{% endif %} {{ layers }}**: {% if attends %}of {{ heads }} heads "
    "{{ attends|counts }}{% if unclear %}, {{ unclear }} without a single pattern{% endif %}{% else %}none of "
    "{{ heads }} heads follows a single pattern{% endif %}.{% if row.range is not none %} Attention reaches "
    "{{ row.range|percent }} of the distance of uniform attention.{% endif %}{% if row.matters %} Without "
    "{{ row.head }} the loss rises by {{ row.loss|alone }}.{% elif row.loss %} Removing one head does not raise the "
    "loss.{% endif %}",
    columns=("layers", "attends", "loss"),
)
