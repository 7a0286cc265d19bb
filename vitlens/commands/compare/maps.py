"""The maps of both models: the method of each, which is checked, and position, concentration and overlap of these."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.answers.evaluate import BACKWARD, accuracy, answers, fitting_batch_size
from vitlens.analysis.faithfulness.league import Settings, checks_in, league
from vitlens.analysis.faithfulness.map_shares import MapOverlap, MapShares, as_shares, map_overlap, map_shares
from vitlens.analysis.faithfulness.randomisation import Explain
from vitlens.analysis.faithfulness.resampled import removal_grid
from vitlens.attribution.explain import explain, preferred_methods, require_method
from vitlens.attribution.registry import attribution
from vitlens.commands.compare import record as rows
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress import progress
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.maps.measure import CheckedMaps, on_object_rows
from vitlens.commands.shared.maps.record import MapCheckRow, OnObjectRow, judged_maps
from vitlens.data.identity import sources
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels
from vitlens.shapes import Maps as MapsOf
from vitlens.uncertainty import Estimate, bootstrap_difference, bootstrap_mean

CANDIDATES: Final = 2  # methods of a model of which the best is taken
STEPS: Final = 8  # of the removal curves; vitlens explain has 20


def candidates(method: Sequence[str], models: Sequence[Model]) -> tuple[tuple[str, ...], ...]:
    """The methods of each model that are checked: the one of `method`, or the first and second of two, else the
    preferred ones of its family.

    Raises InputError for more than two, UnknownNameError and UnsupportedError as the registry does.
    """
    if len(method) > 2:
        raise InputError(f"expected --method A or A,B (the first model's, the second's), found {len(method)} methods")
    for name in method:
        attribution(name)
    chosen = (
        [(name,) for name in [*method, *method][:2]] if method else [preferred_methods(m, CANDIDATES) for m in models]
    )
    for model, names in zip(models, chosen):
        for name in names:
            require_method(model, name)
    return tuple(chosen)


def checked(run: Run[CompareOptions], model: Model, split: Split, names: Sequence[str]) -> tuple[MapCheckRow, ...]:
    """The checks of a model's methods on a seeded, class-balanced subset of at most --checked images, of the target
    class's logit."""
    options, target = run.run, run.options.target
    chosen = sample(split, run.options.checked, seed=options.seed)
    part = split.pick(chosen)
    size = options.batch_size or fitting_batch_size(model)
    images = torch.cat([batch.images for batch in part.batches(size, device=model.device)])
    targets = chosen_targets(target, model, split)
    classes = answers(model, part, batch_size=size).argmax(-1) if targets is None else targets[chosen]
    functions: dict[str, Explain] = {name: _function(name, options) for name in names}
    settings = Settings(steps=STEPS, counterfactuals=False, seed=options.seed, batch_size=size)
    what = f"checking maps of {model.alias}"
    with progress(what, checks_in(len(names)), unit="checks", quiet=options.quiet) as advance:
        found = league(model, images, classes.to(model.device), functions, settings=settings, advance=advance)
    given = (model, images, classes.to(model.device), functions, found, settings, part.groups, sources(part))
    return tuple(CheckedMaps(*given, quiet=options.quiet).rows())


def _function(name: str, options: RunOptions) -> Explain:
    def maps(model: Model, images: Images, targets: Labels) -> MapsOf:
        return explain(model, images, targets=targets, method=name, batch_size=options.batch_size, seed=options.seed)

    return maps


def best_method(checks: Sequence[MapCheckRow]) -> str:
    """The method of the best verdict, then of the greatest ROAD; where no verdict is better than inconclusive, the
    first, which is the preferred one."""
    best = judged_maps(checks)[0]
    return best.method if best.state in ("pass", "warn") else checks[0].method


@dataclass(frozen=True)
class Maps:
    """Maps of some images: indices (m,) into the split, sorted; sampled: (m,), those of the random subset over which
    statistics are averaged, the others are examples; values: raw maps of each model (m, rows, columns); shares,
    overlap: their position, concentration and overlap, all (m,); grid: of cells, and size in px, on which these were
    computed."""

    indices: Tensor
    sampled: Tensor
    values: tuple[Tensor, ...]
    shares: tuple[MapShares, ...]
    overlap: MapOverlap
    grid: tuple[int, int]
    size: tuple[int, int]


def sample(split: Split, count: int, *, seed: int) -> Tensor:
    """Indices (sorted) of a seeded, class-balanced subset of at most count images."""
    numbered = replace(split, groups=torch.arange(len(split))).limit(count, seed=seed)
    return torch.arange(len(split)) if numbered.groups is None else numbered.groups


def quicker(run: Run[CompareOptions]) -> str:
    """What a line of progress says where --limit was not given."""
    return "" if run.run.limit else " (--limit N: fewer images)"


def maps_of_both(run: Run[CompareOptions], methods: Sequence[str], indices: Tensor, sampled: Tensor) -> Maps:
    """Both models' maps of the images at these indices, of the target class's logit, with their properties on the
    patches of the first model that has patches (else about 14 cells a side)."""
    options, both = run.run, []
    for model, split, method in zip(run.models, run.splits, methods):
        targets = chosen_targets(run.options.target, model, split)
        count = options.batch_size or max(1, fitting_batch_size(model) // BACKWARD)
        parts = []
        with progress(f"{method} of {model.alias}{quicker(run)}", len(indices), quiet=options.quiet) as advance:
            for batch in split.pick(indices).batches(count, device=model.device):
                own = None if targets is None else targets[indices[batch.indices]].to(model.device)
                found = explain(model, batch.images, targets=own, method=method, seed=options.seed)
                parts.append(found.detach().float().cpu())
                advance(len(found))
        both.append(torch.cat(parts))
    reference = next((model for model in run.models if model.anatomy.layout is not None), run.model)
    grid, (height, width) = removal_grid(reference), reference.input_size
    size = (grid[0] * -(-height // grid[0]), grid[1] * -(-width // grid[1]))
    masks = None if run.split.masks is None else run.split.masks[indices]
    shares = tuple(map_shares(values, size=size, grid=grid, masks=masks) for values in both)
    overlap = map_overlap(*both, size=size, grid=grid)
    return Maps(indices, torch.isin(indices, sampled), tuple(both), shares, overlap, grid, size)


def described(run: Run[CompareOptions], methods: Sequence[str], maps: Maps) -> dict[str, Any]:
    """The fields of the record that describe the maps: means over those of the sampled images that are usable."""
    split, seed, (first, second) = run.split, run.run.seed, run.aliases

    def mean(values: Tensor, members: Tensor, unit: str = "fraction") -> Estimate:
        return bootstrap_mean(values[members].numpy(), groups=_groups(split, maps, members), seed=seed, unit=unit)

    methods_rows: list[rows.MapRow] = []
    on_object: list[OnObjectRow] = []
    agreement: tuple[rows.AgreementRow, ...] = ()
    for at, (alias, method) in enumerate(zip(run.aliases, methods)):
        shares, usable = maps.shares[at], maps.shares[at].usable & maps.sampled
        row = rows.MapRow(alias, method, accuracy(shares.usable[maps.sampled]))
        if usable.any():
            own = {each.score: each for each in _on_object(maps, at, alias, split, usable, seed)}
            on_object += own.values()
            row = replace(
                row,
                half=mean(shares.half, usable),
                spread=mean(shares.spread, usable),
                central=mean(shares.central, usable),
                row=mean(shares.row, usable),
                column=mean(shares.column, usable),
                inside=own["mass"].estimate if "mass" in own else None,
                pointing=own["pointing"].estimate if "pointing" in own else None,
            )
        methods_rows.append(row)
    usable, overlap = maps.overlap.usable & maps.sampled, maps.overlap
    if usable.any():
        one, two = (each.half[usable].numpy() for each in maps.shares)
        gap = bootstrap_difference(one, two, groups=_groups(split, maps, usable), seed=seed)
        means = (mean(overlap.spearman, usable, ""), mean(overlap.top, usable), mean(overlap.shared, usable))
        agreement = (rows.AgreementRow(first, second, *means, gap),)
    return {
        "methods": tuple(methods_rows),
        "on_object": tuple(on_object),
        "agreement": agreement,
        "mean_maps": rows.MeanMapArrays(_mean_map(maps, 0), _mean_map(maps, 1)),
    }


def _groups(split: Split, maps: Maps, members: Tensor) -> NDArray[Any] | None:
    return None if split.groups is None else split.groups[maps.indices][members].numpy()


def _on_object(maps: Maps, at: int, alias: str, split: Split, usable: Tensor, seed: int) -> Iterator[OnObjectRow]:
    """Where the usable maps of one model lie on the objects, by score; none without masks."""
    if split.masks is None:
        return
    members = maps.indices[usable]
    groups = None if split.groups is None else split.groups[members]
    photographs = sources(split.pick(maps.indices))[usable]
    for score in ("mass", "pointing"):
        named = [(alias, maps.values[at][usable])]
        yield from on_object_rows(
            alias, named, score, split.masks[members], groups=groups, sources=photographs, seed=seed
        )


def _mean_map(maps: Maps, at: int) -> NDArray[np.float64]:
    """The mean of one model's usable maps, each divided by its sum; uniform where there is none."""
    usable = maps.shares[at].usable & maps.sampled
    if not usable.any():
        return np.full(maps.grid, 1 / np.prod(maps.grid))
    mean = as_shares(maps.values[at][usable], size=maps.size, grid=maps.grid).mean(0)
    return np.asarray(mean.numpy())
