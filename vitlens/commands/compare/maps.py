"""The maps of two models on the same images, and their statistics."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import BACKWARD, accuracy, fitting_batch_size
from vitlens.analysis.faithfulness.maps import (
    MapOverlap,
    MapShares,
    map_overlap,
    map_shares,
    removal_grid,
)
from vitlens.attribution.explain import explain
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.record import AgreementRow, MapRow
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.maps.measure import on_object_rows
from vitlens.commands.shared.maps.record import OnObjectRow
from vitlens.data.identity import sources
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate, bootstrap_difference, bootstrap_mean

_SHARES: Final = ("half", "spread", "central", "row", "column")  # fields of MapShares and of MapRow
_ON_OBJECT: Final = {"mass": "inside", "pointing": "pointing"}  # fields of MapRow by score


@dataclass(frozen=True)
class MapsOfBoth:
    """The raw maps of two models on the same images.

    indices: (m,) into the split, ascending.
    sampled: (m,) True for the random subset over which statistics are averaged; the other images
        are examples.
    values: the maps of each model, (m, rows, columns).
    shares: the position and concentration of each model's maps, (m,) each.
    overlap: the overlap of both models' maps, (m,) each.
    """

    indices: Tensor
    sampled: Tensor
    values: tuple[Tensor, ...]
    shares: tuple[MapShares, ...]
    overlap: MapOverlap


def explain_images(
    run: Run[CompareOptions], methods: Sequence[str], indices: Tensor, sampled: Tensor
) -> MapsOfBoth:
    """Return both models' maps of the images at these indices, for the logit of the target class.

    Their properties are computed on the patches of the first model that has patches, or on about 14
    cells a side.
    """
    values = []
    for model, split, method in zip(run.models, run.splits, methods):
        values.append(_maps(run, model, split, method, indices))
    reference = _reference_model(run.models)
    grid = removal_grid(reference)
    size = reference.input_size
    masks = None
    if run.split.masks is not None:
        masks = run.split.masks[indices]
    return MapsOfBoth(
        indices=indices,
        sampled=torch.isin(indices, sampled),
        values=tuple(values),
        shares=tuple(map_shares(maps, size=size, grid=grid, masks=masks) for maps in values),
        overlap=map_overlap(*values, size=size, grid=grid),
    )


def _reference_model(models: Sequence[Model]) -> Model:
    """Return the first model with patches, or else the first model."""
    for model in models:
        if model.anatomy.layout is not None:
            return model
    return models[0]


def _maps(
    run: Run[CompareOptions], model: Model, split: Split, method: str, indices: Tensor
) -> Tensor:
    """Return the maps of one model, (m, rows, columns) on the CPU."""
    options = run.run_options
    all_targets = chosen_targets(run.options.target, model, split)
    # a backward pass takes BACKWARD times the memory of a forward pass
    batch_size = options.batch_size or max(1, fitting_batch_size(model) // BACKWARD)
    parts = []
    with run.progress(f"{method} of {model.alias}", len(indices)) as advance:
        for batch in split.pick(indices).batches(batch_size, device=model.device):
            targets = None
            if all_targets is not None:
                targets = all_targets[indices[batch.indices]].to(model.device)
            maps = explain(model, batch.images, targets=targets, method=method, seed=options.seed)
            parts.append(maps.detach().float().cpu())
            advance(len(maps))
    return torch.cat(parts)


@dataclass(frozen=True)
class _Statistics:
    """Means over some of the mapped images.

    `members` is a mask (m,) over the m mapped images. `maps.indices` (m,) leads from these to the
    images of the split.
    """

    maps: MapsOfBoth
    split: Split
    seed: int

    def groups(self, members: Tensor) -> Tensor | None:
        """Return the groups of the members, None for images without groups."""
        if self.split.groups is None:
            return None
        return self.split.groups[self.maps.indices[members]]

    def group_array(self, members: Tensor) -> NDArray[Any] | None:
        """Return the groups of the members as an array."""
        groups = self.groups(members)
        if groups is None:
            return None
        return groups.numpy()

    def mean(
        self, values: Tensor, members: Tensor, *, unit: str = "fraction", least: float = 0.0
    ) -> Estimate:
        """Return the mean of values (m,) over the members.

        least: the smallest possible value.
        """
        return bootstrap_mean(
            values[members].numpy(),
            groups=self.group_array(members),
            seed=self.seed,
            unit=unit,
            least=least,
            most=1.0,
        )

    @cached_property
    def masks(self) -> Tensor | None:
        """Return the masks of the mapped images, if they are known."""
        if self.split.masks is None:
            return None
        return self.split.masks[self.maps.indices]

    @cached_property
    def photographs(self) -> Tensor | None:
        """Return the photograph of each mapped image, if masks are known.

        Baselines are maps of other images, which must not be of the same photograph.
        """
        if self.split.masks is None:
            return None
        return sources(self.split.pick(self.maps.indices))


def map_fields(
    run: Run[CompareOptions], methods: Sequence[str], maps: MapsOfBoth
) -> dict[str, Any]:
    """Return the fields of the record that describe the maps: means over usable maps of the sampled
    images.
    """
    statistics = _Statistics(maps, run.split, run.run_options.seed)
    rows = []
    object_rows: list[OnObjectRow] = []
    for index, (alias, method) in enumerate(zip(run.aliases, methods)):
        shares = maps.shares[index]
        usable = shares.usable & maps.sampled  # (m,)
        means: dict[str, Estimate] = {}
        if usable.any():
            for name in _SHARES:
                means[name] = statistics.mean(getattr(shares, name), usable)
            for score, name in _ON_OBJECT.items():
                rows_of_score = _object_rows(statistics, alias, maps.values[index], usable, score)
                object_rows += rows_of_score
                if rows_of_score:  # one row, as these are the maps of one model
                    means[name] = rows_of_score[0].estimate
        share_usable = accuracy(shares.usable[maps.sampled], groups=statistics.groups(maps.sampled))
        rows.append(MapRow(alias, method, share_usable, **means))
    return {
        "methods": tuple(rows),
        "on_object": tuple(object_rows),
        "agreement": tuple(_agreement_rows(run.aliases, statistics)),
    }


def _object_rows(
    statistics: _Statistics, alias: str, values: Tensor, usable: Tensor, score: str
) -> list[OnObjectRow]:
    """Return how far usable maps of one model lie on objects by one score.

    Returns nothing without masks.
    """
    masks = statistics.masks
    photographs = statistics.photographs
    if masks is None or photographs is None:
        return []
    return on_object_rows(
        alias,
        [(alias, values[usable])],
        score,
        masks[usable],
        groups=statistics.groups(usable),
        sources=photographs[usable],
        seed=statistics.seed,
    )


def _agreement_rows(aliases: Sequence[str], statistics: _Statistics) -> Iterator[AgreementRow]:
    """Yield the agreement of the two models' maps, if an image has usable maps of both."""
    maps = statistics.maps
    overlap = maps.overlap
    usable = overlap.usable & maps.sampled
    if not usable.any():
        return
    first, second = maps.shares
    half_difference = bootstrap_difference(
        first.half[usable].numpy(),
        second.half[usable].numpy(),
        groups=statistics.group_array(usable),
        seed=statistics.seed,
        most=1.0,
    )
    yield AgreementRow(
        first=aliases[0],
        second=aliases[1],
        spearman=statistics.mean(overlap.spearman, usable, unit="", least=-1.0),
        top=statistics.mean(overlap.top, usable),
        shared=statistics.mean(overlap.shared, usable),
        half_difference=half_difference,
    )
