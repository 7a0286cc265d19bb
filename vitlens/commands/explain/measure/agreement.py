"""How alike the maps of each two methods are."""

from collections.abc import Sequence
from itertools import combinations

import torch

from vitlens.analysis.answers.paired import estimates
from vitlens.analysis.faithfulness.agreement import map_iou, spearman, top_overlap
from vitlens.analysis.faithfulness.league import BASELINES, MethodChecks
from vitlens.analysis.faithfulness.resampled import on_grid, removal_grid
from vitlens.commands.explain.record import AGREEMENT, MethodAgreementRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate


def agreement_rows(
    folder: RunFolder, checked: Sequence[MethodChecks], model: Model, split: Split
) -> tuple[MethodAgreementRow, ...]:
    """Every pair of methods, compared in the cells that the checks remove; writes Spearman's correlation as metrics.

    A constant map has no ranks: its correlation with any other counts as 0.
    """
    grid = removal_grid(model)
    maps = {one.name: on_grid(one.maps, grid) for one in checked if one.name not in BASELINES}
    pairs = list(combinations(maps, 2))
    if not pairs:
        return ()
    measures = {"spearman": spearman, "top_overlap": top_overlap, "iou": map_iou}
    columns: dict[str, list[Estimate]] = {}
    for name, measure in measures.items():
        values = torch.stack([measure(maps[first], maps[second]).nan_to_num(0.0) for first, second in pairs])
        columns[name] = estimates(values, groups=split.groups, unit="" if name == "spearman" else "fraction")
    rows = []
    for place, (first, second) in enumerate(pairs):
        folder.metric(AGREEMENT(model=model.alias, first=first, second=second), columns["spearman"][place])
        means = {name: round(column[place].value, 4) for name, column in columns.items()}
        rows.append(MethodAgreementRow(model.alias, first, second, **means, n=len(split)))
    return tuple(rows)
