"""All checks of the methods of one model, as the tables and arrays of the record."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.analysis.faithfulness.league import CHECKS, MethodChecks, Settings, league
from vitlens.analysis.faithfulness.maps import (
    Explain,
    map_iou,
    on_grid,
    removal_grid,
    spearman,
    top_overlap,
)
from vitlens.commands.explain.composites import composite_tables
from vitlens.commands.explain.league import league_rows, power_rows
from vitlens.commands.explain.options import NONE, ExplainOptions
from vitlens.commands.explain.orders import (
    order_rows,
    removal_orders,
    replacement_tables,
    set_arrays,
)
from vitlens.commands.explain.record import CurveArrays, PairRow, StabilityRow, StageRow
from vitlens.commands.run.progress import progress
from vitlens.commands.shared.maps.measure import CheckedMaps, on_object_rows
from vitlens.commands.shared.maps.record import OnObjectRow
from vitlens.data.identity import sources
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Labels, Masks
from vitlens.uncertainty import Estimate

_BATCH: Final = 256  # images read at once
_ON_OBJECT: Final = ("roc_auc", "mass", "pointing")  # scores of maps on objects


def check_methods(
    model: Model,
    split: Split,
    targets: Labels,
    functions: Mapping[str, Explain],
    computed: Mapping[str, tuple[Tensor, float | None]],
    options: ExplainOptions,
) -> dict[str, object]:
    """Return the tables and arrays of all checks.

    functions: the methods, by name.
    computed: by name, the maps of each method and its seconds per image. Fixed maps, of which there
        is no function, have None for the seconds.
    """
    masks = None
    if split.masks is not None:
        masks = split.masks.to(model.device)
    checked = _checked_maps(
        model,
        split,
        targets.to(model.device),
        masks,
        functions=functions,
        computed=computed,
        options=options,
    )
    on_object = list(_on_object(checked, split))
    orders = removal_orders(checked)
    fields: dict[str, object] = {
        "checks": tuple(checked.rows(on_object)),
        "league": league_rows(checked, split),
        "stages": tuple(_stage_rows(checked)),
        "agreement": tuple(_pair_rows(checked)),
        "on_object": tuple(on_object),
        "power": tuple(power_rows(checked, split)),
        "curves": {model.alias: _curves(checked.results)},
    }
    if orders is not None:
        fields["orders"] = order_rows(checked, orders)
        fields["sets"] = {model.alias: set_arrays(checked, orders, split)}
    fields |= replacement_tables(checked)
    if options.stability:
        fields["stability"] = tuple(_stability_rows(checked))
    fields |= composite_tables(checked, split, masks, options)
    return fields


def _checked_maps(
    model: Model,
    split: Split,
    targets: Labels,
    masks: Masks | None,
    *,
    functions: Mapping[str, Explain],
    computed: Mapping[str, tuple[Tensor, float | None]],
    options: ExplainOptions,
) -> CheckedMaps:
    """Run all checks of `league` on every method and baseline.

    targets, masks: on the model's device.
    """
    run = options.run
    settings = Settings(
        substrate=options.substrate,
        counterfactuals=options.counterfactuals and len(model.classes) > 1,
        seed=run.seed,
        batch_size=run.batch_size,
    )
    images = torch.cat([batch.images for batch in split.batches(_BATCH, device=model.device)])
    total = CHECKS * (len(computed) + len(BASELINES))
    with progress("Checking explanations", total, unit="checks", quiet=run.quiet) as advance:
        results = league(
            model,
            images,
            targets,
            functions,
            masks=masks,
            computed=computed,
            settings=settings,
            advance=advance,
        )
    return CheckedMaps(
        model=model,
        images=images,
        targets=targets,
        functions=functions,
        results=results,
        settings=settings,
        groups=split.groups,
        sources=sources(split),
        substrates=[name for name in options.other_substrates if name != NONE],
        steadiness=options.stability,
        quiet=run.quiet,
    )


def _on_object(checked: CheckedMaps, split: Split) -> Iterator[OnObjectRow]:
    """Yield the scores of each method's maps on objects, compared with maps that ignore the
    image."""
    if split.masks is None:
        return
    # `methods` has no baselines; `results` and `by_name` have them, too
    maps = [(name, checked.by_name[name].maps) for name in checked.methods]
    for score in _ON_OBJECT:
        yield from on_object_rows(
            checked.model.alias,
            maps,
            score,
            split.masks.cpu(),
            groups=split.groups,
            sources=checked.sources,
            seed=checked.settings.seed,
        )


def _stage_rows(checked: CheckedMaps) -> Iterator[StageRow]:
    """Yield the similarity of each method's maps at every stage of the randomisation."""
    has_predictions = len(checked.model.classes) > 1  # a single class is always predicted
    for checks in checked.results:
        if checks.randomisation is None:
            continue
        for stage in checks.randomisation.stages(groups=checked.groups, seed=checked.settings.seed):
            row = StageRow(checked.model.alias, checks.name, stage.name, stage.similarity)
            if has_predictions:
                row = replace(row, kept=stage.kept)
            yield row


def _pair_rows(checked: CheckedMaps) -> Iterator[PairRow]:
    """Yield the similarity of the maps of each pair of methods, on the grid of the checks.

    The rank correlation with a constant map, which has no ranks, counts as 0.
    """
    grid = removal_grid(checked.model)
    maps = {name: on_grid(checked.by_name[name].maps, grid) for name in checked.methods}
    pairs = list(combinations(maps, 2))
    if not pairs:
        return

    def means(
        measure: Callable[[Tensor, Tensor], Tensor], *, unit: str, least: float
    ) -> list[Estimate]:
        values = [measure(maps[first], maps[second]).nan_to_num(0.0) for first, second in pairs]
        return checked.means(torch.stack(values), unit=unit, least=least)

    correlations = means(spearman, unit="", least=-1.0)
    overlaps = means(top_overlap, unit="fraction", least=0.0)
    ious = means(map_iou, unit="fraction", least=0.0)
    for index, (first, second) in enumerate(pairs):
        yield PairRow(
            model=checked.model.alias,
            first=first,
            second=second,
            spearman=correlations[index],
            top_overlap=overlaps[index],
            iou=ious[index],
        )


def _stability_rows(checked: CheckedMaps) -> Iterator[StabilityRow]:
    """Yield the stability of each method's maps under shifts and a flip of the images."""
    for method, stability in checked.steady.items():
        for means in stability.rows(groups=checked.groups, seed=checked.settings.seed):
            yield StabilityRow(
                model=checked.model.alias,
                method=method,
                disturbance=means.disturbance,
                correlation=means.correlation,
                jumped=means.jumped,
            )


def _curves(results: Sequence[MethodChecks]) -> CurveArrays:
    """Return the mean removal curves of each method and baseline."""
    deletion = []
    insertion = []
    for checks in results:
        deletion.append(checks.curves.deletion.probability.mean(0).numpy())
        insertion.append(checks.curves.insertion.probability.mean(0).numpy())
    any_curves = results[0].curves  # the shares are the same for all methods
    return CurveArrays(
        methods=np.array([checks.name for checks in results]),
        shares=any_curves.deletion.shares.numpy(),
        inserted=any_curves.insertion.shares.numpy(),
        deletion=np.stack(deletion),
        insertion=np.stack(insertion),
    )
