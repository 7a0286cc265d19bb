"""Beside the league: how alike the methods' maps are, and which patches turn the prediction."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.answers.paired import estimates
from vitlens.analysis.faithfulness.agreement import map_iou, spearman, top_overlap
from vitlens.analysis.faithfulness.counterfactual import Counterfactuals
from vitlens.analysis.faithfulness.league import BASELINES, MethodChecks
from vitlens.analysis.faithfulness.resampled import on_grid, removal_grid
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate

SEARCHED = 32  # images on which the greedy search is run too
SHOWN = 5  # images whose counterfactuals are drawn
SEARCH = "search"  # the greedy search's name among the counterfactuals


def named(metric: str, method: str, alias: str | None) -> str:
    """The name of a method's metric: of one model "faithfulness/gap/rollout", of several with the alias second."""
    first, _, rest = metric.partition("/")
    return "/".join(part for part in (first, alias, rest, method) if part)


def keep_agreement(
    folder: RunFolder, marks: Sequence[MethodChecks], model: Model, split: Split, alias: str | None
) -> list[dict[str, object]]:
    """How alike the maps of each two methods are, in the cells in which images are taken apart; rows of a table.

    A constant map has no ranks: its correlation with any other counts as 0.
    """
    grid = removal_grid(model)
    maps = {mark.name: on_grid(mark.maps, grid) for mark in marks if mark.name not in BASELINES}
    pairs = list(combinations(maps, 2))
    if not pairs:
        return []
    measures = {"spearman": spearman, "top_overlap": top_overlap, "iou": map_iou}
    columns: dict[str, list[Estimate]] = {}
    for name, measure in measures.items():
        values = torch.stack([measure(maps[one], maps[other]).nan_to_num(0.0) for one, other in pairs])
        columns[name] = estimates(values, groups=split.groups, unit="" if name == "spearman" else "fraction")
    rows = []
    for place, (one, other) in enumerate(pairs):
        folder.metric(named("agreement", f"{one}/{other}", alias), columns["spearman"][place])
        found = {name: round(column[place].value, 4) for name, column in columns.items()}
        rows.append({"model": model.alias, "first": one, "second": other, **found, "n": len(split)})
    return rows


def keep_counterfactuals(
    folder: RunFolder,
    marks: Sequence[MethodChecks],
    searched: Counterfactuals | None,
    split: Split,
    model: Model,
    alias: str | None,
) -> None:
    """Whether and with how many patches the prediction turned; the first images' sets, to be drawn."""
    if searched is None:
        return
    count = len(searched.prediction)
    found = {mark.name: mark.counterfactuals for mark in marks if mark.counterfactuals is not None}
    for name, own in found.items():
        folder.metric(named("counterfactual/turned", name, alias), accuracy(own.found, groups=split.groups))
    first = {name: shares_gone(own)[:count] for name, own in found.items()} | {SEARCH: shares_gone(searched)}
    groups = None if split.groups is None else split.groups[:count]
    values = torch.stack(list(first.values()))
    for name, found_size in zip(first, estimates(values, groups=groups)):
        folder.metric(named("counterfactual/size_searched", name, alias), found_size)
    shown = torch.arange(min(SHOWN, count))
    sets = {**found, SEARCH: searched}
    folder.arrays(
        f"counterfactuals-{model.alias}",
        images=split.source.read(shown).numpy(),
        methods=np.array(list(sets)),
        removed=np.stack([own.removed[: len(shown)].numpy() for own in sets.values()], 1),
        turned=np.stack([own.turned[: len(shown)].numpy() for own in sets.values()], 1),
        prediction=searched.prediction[: len(shown)].numpy(),
        classes=np.array(model.classes),
    )


def shares_gone(own: Counterfactuals) -> Tensor:
    """The share of the patches in each image's set; all of them where nothing turned the prediction."""
    return own.sizes.float() / own.removed[0].numel()
