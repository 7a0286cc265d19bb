"""The maps of both models: images, and the position, concentration and overlap of the maps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import BACKWARD, fitting_batch_size
from vitlens.analysis.failures.errors import CELLS, Comparison
from vitlens.analysis.faithfulness.map_shares import MapOverlap, MapShares, map_overlap, map_shares
from vitlens.analysis.faithfulness.resampled import removal_grid
from vitlens.analysis.heads.measure import measure
from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.analysis.heads.statistics import over_heads
from vitlens.attribution.explain import explain
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.run.targets import chosen_targets
from vitlens.data.split import Split
from vitlens.models.model import Model

EXAMPLES: Final = 6  # images of each cell that are shown with their maps


@dataclass(frozen=True)
class Maps:
    """Maps of some images: indices (m,) into the split, sorted; sampled: (m,), those of the random subset over which
    statistics are averaged, the others are examples; first, second: raw maps of each model (m, rows, columns)."""

    indices: Tensor
    sampled: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class MapProperties:
    """Position and concentration of each model's maps, and their overlap, all (m,); grid: of cells, and size in px,
    on which they were computed."""

    first: MapShares
    second: MapShares
    overlap: MapOverlap
    grid: tuple[int, int]
    size: tuple[int, int]


def sample(split: Split, count: int, *, seed: int) -> Tensor:
    """Indices (sorted) of a seeded, class-balanced subset of at most count images."""
    numbered = replace(split, groups=torch.arange(len(split))).limit(count, seed=seed)
    return torch.arange(len(split)) if numbered.groups is None else numbered.groups


def examples(comparison: Comparison) -> list[Tensor]:
    """For each cell the indices of at most 6 of its images: those with the most confident wrong predictions (both
    right: at random)."""
    first, second = comparison.first, comparison.second
    wrong = torch.where(first.correct, torch.zeros_like(first.confidence), first.confidence)
    wrong = torch.maximum(wrong, torch.where(second.correct, torch.zeros_like(wrong), second.confidence))
    by_cell = []
    for cell in range(len(CELLS)):
        members = (comparison.cells == cell).nonzero().flatten()
        if cell == 0:
            order = torch.randperm(len(members), generator=torch.Generator().manual_seed(0))
        else:
            order = wrong[members].argsort(descending=True, stable=True)
        by_cell.append(members[order[:EXAMPLES]])
    return by_cell


def maps_of_both(
    models: Sequence[Model],
    splits: Sequence[Split],
    methods: Sequence[str],
    *,
    indices: Tensor,
    sampled: Tensor,
    target: str,
    options: RunOptions,
) -> Maps:
    """Both models' maps of the images at these indices, of the target class's logit."""
    both = []
    for model, split, method in zip(models, splits, methods):
        targets = chosen_targets(target, model, split)
        size = options.batch_size or max(1, fitting_batch_size(model) // BACKWARD)
        parts = []
        with progress(f"{method} of {model.alias}", len(indices), quiet=options.quiet) as advance:
            for batch in split.pick(indices).batches(size, device=model.device):
                own = None if targets is None else targets[indices[batch.indices]].to(model.device)
                maps = explain(model, batch.images, targets=own, method=method, seed=options.seed)
                parts.append(maps.detach().float().cpu())
                advance(len(maps))
        both.append(torch.cat(parts))
    return Maps(indices, sampled, both[0], both[1])


def map_properties(maps: Maps, models: Sequence[Model], split: Split) -> MapProperties:
    """Position, concentration and overlap, on the patches of the first model that has patches (else about 14 cells a
    side)."""
    reference = next((model for model in models if model.anatomy.layout is not None), models[0])
    grid = removal_grid(reference)
    height, width = reference.input_size
    size = grid[0] * -(-height // grid[0]), grid[1] * -(-width // grid[1])
    masks = None if split.masks is None else split.masks[maps.indices]
    first, second = (map_shares(values, size=size, grid=grid, masks=masks) for values in (maps.first, maps.second))
    return MapProperties(first, second, map_overlap(maps.first, maps.second, size=size, grid=grid), grid, size)


def attention_numbers(model: Model, split: Split, *, options: RunOptions) -> dict[str, Tensor]:
    """Means over all heads of the statistics that comparisons show, by image (n,); none for a model without heads."""
    if model.anatomy.family not in ("vit", "windowed"):
        return {}
    size = options.batch_size or fitting_batch_size(model)
    parts: dict[str, list[Tensor]] = {}
    chosen = shown_in("comparison")
    with progress(f"attention of {model.alias}", len(split), quiet=options.quiet) as advance:
        for batch in split.batches(size, device=model.device):
            for (name, _), values in over_heads(measure(model, batch.images).values).items():
                if name in chosen:
                    parts.setdefault(name, []).append(values[:, 0].cpu())
            advance(len(batch.images))
    return {STATISTICS[name].title: torch.cat(parts[name]).double() for name in chosen if name in parts}
