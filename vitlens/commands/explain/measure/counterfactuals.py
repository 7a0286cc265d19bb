"""The patches whose removal changes the prediction: in the order of each map, and by greedy search."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.answers.paired import estimates
from vitlens.analysis.faithfulness.counterfactual import Counterfactuals, by_search
from vitlens.analysis.faithfulness.league import MethodChecks, Settings
from vitlens.commands.explain.record import (
    COUNTERFACTUALS,
    SEARCH,
    SIZE_SEARCHED,
    TURNED,
    CounterfactualArrays,
)
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Images

SEARCHED: Final = 32  # images of the greedy search, at most
_DRAWN: Final = 5  # images whose counterfactuals are drawn


def searched_sets(model: Model, images: Images, settings: Settings) -> Counterfactuals | None:
    """The sets that the greedy search finds on the first images; None where there is no image."""
    searched = images[:SEARCHED]
    return by_search(model, searched, substrate=settings.substrate) if len(searched) else None


def write_counterfactuals(
    folder: RunFolder, checked: Sequence[MethodChecks], searched: Counterfactuals, split: Split, model: Model
) -> None:
    """Write whether and with how many patches the prediction changes, and the sets of the images that are drawn."""
    count = len(searched.prediction)
    by_map = {one.name: one.counterfactuals for one in checked if one.counterfactuals is not None}
    for name, own in by_map.items():
        folder.metric(TURNED(model=model.alias, method=name), accuracy(own.found, groups=split.groups))
    shares = {name: set_shares(own)[:count] for name, own in by_map.items()} | {SEARCH: set_shares(searched)}
    groups = None if split.groups is None else split.groups[:count]
    for name, size in zip(shares, estimates(torch.stack(list(shares.values())), groups=groups)):
        folder.metric(SIZE_SEARCHED(model=model.alias, method=name), size)
    shown = torch.arange(min(_DRAWN, count))
    orders = {**by_map, SEARCH: searched}
    arrays = CounterfactualArrays(
        images=split.source.read(shown).numpy(),
        methods=np.array(list(orders)),
        removed=np.stack([own.removed[: len(shown)].numpy() for own in orders.values()], 1),
        turned=np.stack([own.turned[: len(shown)].numpy() for own in orders.values()], 1),
        prediction=searched.prediction[: len(shown)].numpy(),
        classes=np.array(model.classes),
    )
    folder.save(COUNTERFACTUALS, arrays, model=model.alias)


def set_shares(own: Counterfactuals) -> Tensor:
    """The share of the patches in each image's set; all of them where no removal changes the prediction."""
    return own.sizes.float() / own.removed[0].numel()
