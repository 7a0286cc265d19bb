"""Removed patches: how few change the prediction in the order of each map, and the effect of their
replacement.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.faithfulness.counterfactual import Counterfactuals, by_search
from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.analysis.faithfulness.league import rank_agreement
from vitlens.commands.explain.record import (
    SEARCH,
    OrderRow,
    RankingRow,
    SetArrays,
    SubstrateRow,
    SwappedRow,
)
from vitlens.commands.shared.maps.measure import CheckedMaps, Gaps
from vitlens.data.split import Split

SEARCHED: Final = 32  # images of the greedy search, at most
_DRAWN: Final = 5  # images whose removed patches are drawn, at most


@dataclass(frozen=True)
class RemovalOrders:
    """The sets of patches whose removal changes the prediction, by the order in which patches are
    removed.

    by_map: in the order of the map of each method and baseline.
    search: by greedy search, on the first images.
    """

    by_map: Mapping[str, Counterfactuals]
    search: Counterfactuals

    @property
    def by_order(self) -> dict[str, Counterfactuals]:
        """Return the sets by order: those of the maps, then the greedy search."""
        return {**self.by_map, SEARCH: self.search}

    @property
    def searched_images(self) -> int:
        """Return the number of images of the greedy search."""
        return len(self.search.prediction)


def removal_orders(checked: CheckedMaps) -> RemovalOrders | None:
    """Return the sets of patches by every order; None without --counterfactuals."""
    settings = checked.settings
    if not settings.counterfactuals or not len(checked.images):
        return None
    search = by_search(checked.model, checked.images[:SEARCHED], substrate=settings.substrate)
    by_map = {}
    for checks in checked.results:
        if checks.counterfactuals is not None:
            by_map[checks.name] = checks.counterfactuals
    return RemovalOrders(by_map, search)


def order_rows(checked: CheckedMaps, orders: RemovalOrders) -> tuple[OrderRow, ...]:
    """Return how few patches change the prediction, in the order of each map and in that of the
    greedy search.
    """
    shares_on_all_images = [_shares(sets) for sets in orders.by_map.values()]
    shares_on_searched_images = []
    for sets in orders.by_order.values():
        shares_on_searched_images.append(_shares(sets)[: orders.searched_images])
    # one call for all orders, so that they share bootstrap draws
    sizes = checked.means(torch.stack(shares_on_all_images), unit="fraction", least=0.0)
    *searched_sizes, size_of_search = checked.means(
        torch.stack(shares_on_searched_images), unit="fraction", least=0.0
    )
    rows = []
    for (name, sets), size, searched_size in zip(orders.by_map.items(), sizes, searched_sizes):
        row = OrderRow(
            model=checked.model.alias,
            method=name,
            size=size,
            # a mean of flags with an interval: the share of images whose prediction changes
            turned=accuracy(sets.found, groups=checked.groups),
            searched=searched_size,
        )
        rows.append(row)
    rows.append(OrderRow(checked.model.alias, SEARCH, searched=size_of_search))
    return tuple(rows)


def _shares(sets: Counterfactuals) -> Tensor:
    """Return the share of patches in each set (images,); 1 if no removal changes the prediction."""
    patches = sets.removed[0].numel()
    return sets.sizes.float() / patches


def set_arrays(checked: CheckedMaps, orders: RemovalOrders, split: Split) -> SetArrays:
    """Return the sets of the images that are drawn."""
    drawn = min(_DRAWN, orders.searched_images)
    removed = []
    new_classes = []
    for sets in orders.by_order.values():
        removed.append(sets.removed[:drawn].numpy())
        new_classes.append(sets.turned[:drawn].numpy())
    return SetArrays(
        images=split.source.read(torch.arange(drawn)).numpy(),
        methods=np.array(list(orders.by_order)),
        removed=np.stack(removed, 1),  # (images, orders, rows, columns)
        turned=np.stack(new_classes, 1),  # (images, orders)
        prediction=orders.search.prediction[:drawn].numpy(),
        classes=np.array(checked.model.classes),
    )


def replacement_tables(checked: CheckedMaps) -> dict[str, object]:
    """Return the tables of the replacements of removed patches: scores with each, and the agreement
    of each pair.
    """
    # other replacements than the main one were tried on the first `checked.count` images only
    gaps: dict[str, Gaps] = {}
    for replacement, by_method in checked.removals.gaps.items():
        gaps[replacement] = {name: values[: checked.count] for name, values in by_method.items()}
    rankings = []
    swapped: list[SwappedRow] = []
    if len(checked.methods) > 1:
        for first, second in combinations(gaps, 2):
            ranking, swaps = _ranking(checked, gaps, first, second)
            rankings.append(ranking)
            swapped += swaps
    return {
        "substrates": tuple(_substrate_rows(checked, gaps)),
        "rankings": tuple(rankings),
        "swapped": tuple(swapped),
    }


def _substrate_rows(checked: CheckedMaps, gaps: Mapping[str, Gaps]) -> list[SubstrateRow]:
    """Return the mean of insertion minus deletion by replacement, if there are several.

    gaps: insertion minus deletion by replacement and method, of the images that all share.
    """
    rows: list[SubstrateRow] = []
    if len(gaps) < 2:
        return rows
    for replacement, by_method in gaps.items():
        means = checked.means(torch.stack(list(by_method.values())), seed=checked.settings.seed)
        for name, gap in zip(by_method, means):
            row = SubstrateRow(
                model=checked.model.alias,
                method=name,
                baseline=name in BASELINES,
                substrate=replacement,
                gap=gap,
            )
            rows.append(row)
    return rows


def _ranking(
    checked: CheckedMaps, gaps: Mapping[str, Gaps], first: str, second: str
) -> tuple[RankingRow, list[SwappedRow]]:
    """Return the agreement of the rankings with two replacements, and the methods that change
    places.

    gaps: insertion minus deletion by replacement and method, of the images that all share.
    first, second: the replacements.
    """
    alias = checked.model.alias
    groups = checked.groups
    if groups is not None:
        groups = groups[: checked.count]
    tau, pairs = rank_agreement(
        {name: gaps[first][name] for name in checked.methods},
        {name: gaps[second][name] for name in checked.methods},
        groups=groups,
        seed=checked.settings.seed,
    )
    ranking = RankingRow(
        model=alias,
        first=first,
        second=second,
        tau=tau,
        methods=len(checked.methods),
        swapped=len(pairs),
    )
    swapped = []
    for pair in pairs:
        row = SwappedRow(
            model=alias,
            first=first,
            second=second,
            better=pair.better,
            worse=pair.worse,
            in_first=pair.in_first,
            in_second=pair.in_second,
        )
        swapped.append(row)
    return ranking, swapped
