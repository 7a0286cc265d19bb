"""Every check on every method, for one model and its images, as the tables and arrays of the record."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import accuracy, fitting_batch_size
from vitlens.analysis.evaluation.intervals import estimates
from vitlens.analysis.faithfulness.checks import ENOUGH
from vitlens.analysis.faithfulness.counterfactual import Counterfactuals, by_search
from vitlens.analysis.faithfulness.defaults import BASELINES, COMPOSITE_KINDS, FEWEST, CompositeKind
from vitlens.analysis.faithfulness.league import CHECKS, MethodChecks, Settings, explained, league, rank_agreement
from vitlens.analysis.faithfulness.localisation import (
    COMPOSITE_SCORES,
    Composites,
    confident_images,
    has_edge,
    pointing_rate,
    recognised,
)
from vitlens.analysis.faithfulness.maps import Explain, map_iou, on_grid, removal_grid, spearman, top_overlap
from vitlens.analysis.faithfulness.removal import resized
from vitlens.classes import label_columns
from vitlens.commands.explain import record as kept
from vitlens.commands.explain.options import AUTO, NONE, ExplainOptions
from vitlens.commands.run.progress import progress
from vitlens.commands.shared.maps.measure import CheckedMaps, on_object_rows
from vitlens.commands.shared.maps.record import OnObjectRow
from vitlens.data.identity import sources
from vitlens.data.split import Split
from vitlens.devices import evaluating
from vitlens.errors import DataError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits, Maps, Masks
from vitlens.uncertainty import Estimate, Side, beyond, power_of, widened

SEARCHED: Final = 32  # images of the greedy search, at most
_DRAWN: Final = 5  # images whose counterfactuals are drawn
_COMPOSITES: Final = 4  # maps of each kind of composites that are drawn
_UNITS: Final = {"relevance_gain": "logits"}  # of columns that are no fractions
# possible values of columns that are no shares: differences of areas, and of logits
_RANGES: Final = {"gap": (-1.0, 1.0), "road": (-1.0, 1.0), "relevance_gain": (-math.inf, math.inf)}


def check_methods(
    model: Model,
    split: Split,
    targets: Labels,
    functions: Mapping[str, Explain],
    made: Mapping[str, tuple[Tensor, float]],
    options: ExplainOptions,
) -> dict[str, object]:
    """Return the fields of the record. made: maps that were computed before, with the seconds for each image."""
    run = options.run
    alias = model.alias
    settings = Settings(
        substrate=options.substrate, counterfactuals=options.counterfactuals, seed=run.seed, batch_size=run.batch_size
    )
    images = torch.cat([batch.images for batch in split.batches(256, device=model.device)])
    targets = targets.to(model.device)
    masks = None if split.masks is None else split.masks.to(model.device)
    total = CHECKS * (len(functions) + len(BASELINES))
    with progress("Checking explanations", total, unit="checks", quiet=run.quiet) as advance:
        results = league(
            model, images, targets, functions, masks=masks, computed=made, settings=settings, advance=advance
        )
    checked = CheckedMaps(
        model,
        images,
        targets,
        functions,
        results,
        settings,
        split.groups,
        sources(split),
        [name for name in options.other_substrates if name != NONE],
        options.stability,
        run.quiet,
    )
    on_object = list(_on_object(checked, split))
    searched = None
    if settings.counterfactuals and len(images):
        searched = by_search(model, images[:SEARCHED], substrate=settings.substrate)
    return {
        "checks": tuple(checked.rows(on_object)),
        "league": league_rows(alias, results, split, settings.seed),
        "stages": tuple(_stage_rows(checked)),
        "agreement": tuple(_pair_rows(checked)),
        "orders": () if searched is None else tuple(_order_rows(checked, searched)),
        "on_object": tuple(on_object),
        **_substrate_rows(checked),
        "stability": tuple(_stability_rows(checked)) if options.stability else (),
        "power": tuple(_power_rows(checked, split)),
        "curves": {alias: _curves(results)},
        "sets": {} if searched is None else {alias: _sets(checked, searched, split)},
        **_composite_rows(checked, split, masks, options),
    }


def _on_object(checked: CheckedMaps, split: Split) -> Iterator[OnObjectRow]:
    """Yield where the maps of each method lie, beside maps that ignore the image; none without masks."""
    named = [(checks.name, checks.maps) for checks in checked.results if checks.name in checked.methods]
    for score in ("roc_auc", "mass", "pointing") if split.masks is not None else ():
        assert split.masks is not None
        yield from on_object_rows(
            checked.model.alias,
            named,
            score,
            split.masks.cpu(),
            groups=split.groups,
            sources=checked.sources,
            seed=checked.settings.seed,
        )


def league_rows(alias: str, results: Sequence[MethodChecks], split: Split, seed: int) -> tuple[kept.LeagueRow, ...]:
    """Return the means of every check with their intervals, the best method first, by ROAD."""
    by_image = [{**checks.values, **checks.scores} for checks in results]
    means = dict[str, list[Estimate]]()
    rows = []
    for name in by_image[0]:
        groups = _masked_groups(split) if name in results[0].scores else split.groups
        values = torch.stack([own[name].float() for own in by_image])  # methods share bootstrap draws
        least, most = _RANGES.get(name, (0.0, 1.0))
        means[name] = (
            [pointing_rate(own, groups=groups) for own in values]
            if name == "pointing"
            else estimates(values, groups=groups, unit=_UNITS.get(name, "fraction"), least=least, most=most)
        )
    for at, checks in enumerate(results):
        own = {name: every[at] for name, every in means.items()}
        changed = checks.randomisation
        if changed is not None and changed.usable.shape[1]:
            members = changed.groups_of_usable(split.groups)
            for name, each in changed.values.items():
                (own[name],) = estimates(each[None], groups=members, seed=seed, unit="", least=-1.0, most=1.0)
        own["seconds"] = Estimate(checks.seconds, n=len(checks.maps), unit="s")
        if checks.forwards is not None:
            own["forwards"] = Estimate(checks.forwards, unit="forwards")
        rows.append(kept.LeagueRow(alias, checks.name, checks.name in BASELINES, faults=checks.faults.words, **own))
    return tuple(sorted(rows, key=lambda row: -(row.road or row.gap).value))


def _masked_groups(split: Split) -> Tensor | None:
    """Return the groups of the images whose mask can be scored; None where images have no groups or no masks."""
    if split.groups is None or split.masks is None:
        return None
    return split.groups[has_edge(split.masks).cpu()]


def _stage_rows(checked: CheckedMaps) -> Iterator[kept.StageRow]:
    """Yield the similarity of each method's maps at every stage of the randomisation."""
    for checks in checked.results:
        found = checks.randomisation
        for stage in () if found is None else found.stages(groups=checked.groups, seed=checked.settings.seed):
            yield kept.StageRow(checked.model.alias, checks.name, stage.name, stage.similarity, stage.kept)


def _pair_rows(checked: CheckedMaps) -> Iterator[kept.PairRow]:
    """Yield how similar the maps of each pair of methods are, on the grid of the checks.

    A constant map has no ranks: its correlation with any other counts as 0.
    """
    grid = removal_grid(checked.model)
    maps = {checks.name: on_grid(checks.maps, grid) for checks in checked.results if checks.name not in BASELINES}
    pairs = list(combinations(maps, 2))
    columns = [
        checked.means(
            torch.stack([measured(maps[first], maps[second]).nan_to_num(0.0) for first, second in pairs]),
            unit="" if measured is spearman else "fraction",
            least=-1.0 if measured is spearman else 0.0,
        )
        for measured in (spearman, top_overlap, map_iou)
        if pairs
    ]
    for (first, second), *found in zip(pairs, *columns) if pairs else ():
        yield kept.PairRow(checked.model.alias, first, second, *found)


def _order_rows(checked: CheckedMaps, searched: Counterfactuals) -> Iterator[kept.OrderRow]:
    """With how many patches the prediction changes, in the order of each map and in that of the greedy search."""
    count = len(searched.prediction)
    by_map = _by_map(checked)
    shares = {  # of the patches; all of them where no removal changes the prediction
        name: own.sizes.float() / own.removed[0].numel() for name, own in (by_map | {kept.SEARCH: searched}).items()
    }
    sizes = checked.means(torch.stack([shares[name] for name in by_map]), unit="fraction", least=0.0)
    few = checked.means(torch.stack([own[:count] for own in shares.values()]), unit="fraction", least=0.0)
    for (name, own), size, some in zip(by_map.items(), sizes, few):
        yield kept.OrderRow(checked.model.alias, name, size, accuracy(own.found, groups=checked.groups), some)
    yield kept.OrderRow(checked.model.alias, kept.SEARCH, searched=few[-1])


def _by_map(checked: CheckedMaps) -> dict[str, Counterfactuals]:
    """Return the sets of patches in the order of each map."""
    return {each.name: each.counterfactuals for each in checked.results if each.counterfactuals is not None}


def _sets(checked: CheckedMaps, searched: Counterfactuals, split: Split) -> kept.SetArrays:
    """Return the sets of the images that are drawn."""
    shown = torch.arange(min(_DRAWN, len(searched.prediction)))
    orders = _by_map(checked) | {kept.SEARCH: searched}
    return kept.SetArrays(
        images=split.source.read(shown).numpy(),
        methods=np.array(list(orders)),
        removed=np.stack([own.removed[: len(shown)].numpy() for own in orders.values()], 1),
        turned=np.stack([own.turned[: len(shown)].numpy() for own in orders.values()], 1),
        prediction=searched.prediction[: len(shown)].numpy(),
        classes=np.array(checked.model.classes),
    )


def _curves(results: Sequence[MethodChecks]) -> kept.CurveArrays:
    return kept.CurveArrays(
        methods=np.array([checks.name for checks in results]),
        shares=results[0].curves.deletion.shares.numpy(),
        inserted=results[0].curves.insertion.shares.numpy(),
        deletion=np.stack([checks.curves.deletion.probability.mean(0).numpy() for checks in results]),
        insertion=np.stack([checks.curves.insertion.probability.mean(0).numpy() for checks in results]),
    )


def _substrate_rows(checked: CheckedMaps) -> dict[str, object]:
    """Return insertion minus deletion by replacement, and the agreement of each pair of replacements."""
    alias = checked.model.alias
    seed = checked.settings.seed
    count = checked.count
    groups = None if checked.groups is None else checked.groups[:count]
    gaps = {name: {method: own[:count] for method, own in found.items()} for name, found in checked.removals[0].items()}
    rows = []
    rankings = []
    swapped = []
    for substrate, by_method in gaps.items() if len(gaps) > 1 else ():
        means = checked.means(torch.stack(list(by_method.values())), seed=seed)
        rows += [
            kept.SubstrateRow(alias, name, name in BASELINES, substrate, own) for name, own in zip(by_method, means)
        ]
    for first, second in combinations(gaps, 2) if len(checked.methods) > 1 else ():
        both = [{name: gaps[substrate][name] for name in checked.methods} for substrate in (first, second)]
        tau, pairs = rank_agreement(*both, groups=groups, seed=seed)
        rankings.append(kept.RankingRow(alias, first, second, tau, len(checked.methods), len(pairs)))
        swapped += [kept.SwappedRow(alias, first, second, *pair) for pair in pairs]
    return {"substrates": tuple(rows), "rankings": tuple(rankings), "swapped": tuple(swapped)}


def _stability_rows(checked: CheckedMaps) -> Iterator[kept.StabilityRow]:
    """Yield whether the maps of each method follow shifts of the images, and a flip."""
    seed = checked.settings.seed
    for method, found in checked.steady.items():
        for row in found.rows(groups=checked.groups, seed=seed):
            yield kept.StabilityRow(checked.model.alias, method, *row)


def _power_rows(checked: CheckedMaps, split: Split) -> Iterator[kept.PowerRow]:
    """Yield what paired comparisons of the best method with the others can see, in each check that has a value an
    image."""
    by_image = {
        checks.name: {**checks.values, **checks.scores} for checks in checked.results if checks.name not in BASELINES
    }
    for check in ("road", "roc_auc", "pointing"):
        if not all(check in own for own in by_image.values()):
            continue
        values = {name: own[check] for name, own in by_image.items()}
        own_groups = checked.groups if check == "road" else _masked_groups(split)
        best = max(values, key=lambda name: float(values[name].mean()))
        others = [values[best].double() - values[name].double() for name in values if name != best]
        known = [power_of(other, groups=own_groups) for other in others]
        found = [power for power in known if power is not None and power.error > 0]
        if found:
            error, detectable = (median(getattr(power, each) for power in found) for each in ("error", "detectable"))
            least, most = _RANGES.get(check, (0.0, 1.0))
            is_possible = detectable <= most - least
            estimate = Estimate(detectable, n=found[0].n) if is_possible else None
            yield kept.PowerRow(checked.model.alias, check, best, error, found[0].groups, estimate)


def composite_names(chosen: Sequence[str], *, has_masks: bool) -> tuple[str, ...]:
    """Return the kinds of `--composites`: "auto" is the default kinds where masks are not known."""
    names = [name for name in chosen if name not in (AUTO, NONE)]
    if AUTO in chosen and not has_masks:
        names += [kind.name for kind in COMPOSITE_KINDS.values() if kind.default]
    return tuple(name for name in COMPOSITE_KINDS if name in names)


def _composite_rows(
    checked: CheckedMaps, split: Split, masks: Masks | None, options: ExplainOptions
) -> dict[str, object]:
    """Localisation without masks: composites of the given images, explained by every method."""
    kinds = [COMPOSITE_KINDS[name] for name in composite_names(options.composites, has_masks=masks is not None)]
    if not kinds:
        return {}
    model = checked.model
    seed = checked.settings.seed
    labels, words = _labels(checked, split)
    images = resized(model, checked.images)
    usable = confident_images(_logits(model, images), labels).cpu()
    classes = len(set(labels[usable].tolist()))
    if masks is not None and masks.shape[-2:] != images.shape[-2:]:
        masks = F.interpolate(masks[:, None].float(), size=images.shape[-2:], mode="nearest-exact")[:, 0] > 0.5
    sets = []
    rows = list[kept.CompositeRow]()
    arrays = {}
    total = len(kinds) * len(checked.functions)
    with progress("Explaining composites", total, unit="methods", quiet=checked.quiet) as advance:
        for kind in kinds:
            guessed = min(1.0, kind.classes / len(model.classes))
            refused = _refusal(kind, len(usable), classes, masks)
            found: dict[str, Any] = {"composites": 0, "maps": 0}
            if not refused:
                made = kind.make(
                    images[usable],
                    labels[usable],
                    None if masks is None else masks[usable],
                    count=options.composite_count,
                    seed=seed,
                )
                # whether an explained class is among the most probable ones of its composite, as many as it has classes
                named = recognised(_logits(model, made.images)[made.which], made.targets, kind.classes)
                share = accuracy(named, groups=made.which)
                found = {
                    "composites": len(made.images),
                    "maps": len(made),
                    "chance": round(made.chance, 6),
                    "recognised": share,
                    "seen": beyond(share, guessed) is Side.ABOVE,
                }
                given = model, checked.functions, made.images[made.which.to(made.images.device)], made.targets
                maps = explained(*given, seed=seed, advance=advance)
                rows += _method_rows(checked, kind.name, made, maps)
                arrays[f"{kind.name}-{model.alias}"] = _arrays(checked, made, maps)
            given_set = model.alias, kind.name, refused, words, len(usable), classes
            sets.append(kept.CompositeSetRow(*given_set, guessed=round(guessed, 6), **found))
    return {"composite_sets": tuple(sets), "composites": tuple(rows), "composite_maps": arrays}


def _labels(checked: CheckedMaps, split: Split) -> tuple[Labels, str]:
    """Return the class of each image as a column of the logits, and whether it is a label or a prediction."""
    if split.labels is not None:
        try:
            return label_columns(checked.model.classes, split).cpu(), "labels"
        except DataError:
            pass  # the labels are not the model's classes, and its predictions are explained instead
    return _logits(checked.model, checked.images).argmax(-1).cpu(), "predictions"


def _logits(model: Model, images: Images) -> Logits:
    with evaluating(model), torch.no_grad():
        return torch.cat([model(part).float().cpu() for part in images.split(fitting_batch_size(model))])


def _refusal(kind: CompositeKind, usable: int, classes: int, masks: Masks | None) -> str:
    """Return why there are no composites of a kind, in a line; empty where there are."""
    if kind.needs_masks and masks is None:
        return "the objects' masks are not known"
    least = max(FEWEST, kind.classes)
    if classes >= least:
        return ""
    return (
        f"expected confidently and correctly classified images of at least {least} distinct classes, found {usable} of "
        f"{classes}"
    )


def _method_rows(
    checked: CheckedMaps, kind: str, made: Composites, maps: Mapping[str, Maps]
) -> list[kept.CompositeRow]:
    """Return the scores of every method with their intervals, the greatest mass first."""
    alias = checked.model.alias
    seed = checked.settings.seed
    above = {name: list[str]() for name in maps}
    scores = {
        name: torch.stack([score(own, made.masks) for own in maps.values()]) for name, score in COMPOSITE_SCORES.items()
    }
    means = {
        name: estimates(values, groups=made.which, seed=seed, least=0.0, most=1.0) for name, values in scores.items()
    }
    means["pointing"] = [pointing_rate(hits, groups=made.which, seed=seed) for hits in scores["pointing"]]
    mass = scores["mass"].double()
    for baseline in BASELINES if len(made.which.unique()) >= ENOUGH else ():
        gains = estimates(mass - mass[list(maps).index(baseline)], groups=made.which, least=-1.0, most=1.0)
        for name, gain in zip(maps, gains):  # paired, as wide as so many methods require
            above[name] += [baseline] if beyond(widened(gain, len(checked.functions)), 0.0) is Side.ABOVE else []
    found = [dict(zip(means, every)) for every in zip(*means.values())]
    rows = [
        kept.CompositeRow(alias, kind, name, name in BASELINES, **own, above=tuple(above[name]))
        for name, own in zip(maps, found)
    ]
    return sorted(rows, key=lambda row: -row.mass.value)


def _arrays(checked: CheckedMaps, made: Composites, maps: Mapping[str, Maps]) -> kept.CompositeArrays:
    """Return the first composites with the maps of every method."""
    shown = slice(0, min(_COMPOSITES, len(made)))
    own = {name: values for name, values in maps.items() if name not in BASELINES}
    return kept.CompositeArrays(
        images=(made.images[made.which[shown]].cpu() * 255).round().to(torch.uint8).numpy(),
        masks=made.masks[shown].numpy(),
        maps={place: values[shown].numpy() for place, values in enumerate(own.values())},
        methods=np.array(list(own)),
        targets=np.array([checked.model.classes[int(target)] for target in made.targets[shown]]),
    )
