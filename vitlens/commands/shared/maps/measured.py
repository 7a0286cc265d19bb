"""The rows of the checks of maps, measured: of each method of a model, and the information of maps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from vitlens.analysis.answers.paired import estimates
from vitlens.analysis.attention.map_checks import FEWEST, fixed_share, map_bits
from vitlens.analysis.faithfulness.cascade import Cascade
from vitlens.analysis.faithfulness.league import BASELINES, MethodChecks
from vitlens.analysis.faithfulness.localisation import (
    baseline_scores,
    has_edge,
    mass_inside,
    pointing_hits,
    pointing_rate,
    roc_auc,
)
from vitlens.analysis.faithfulness.resampled import AnyMaps
from vitlens.commands.shared.maps.information import InformationRow, MapRow
from vitlens.commands.shared.maps.on_object import OnObjectRow
from vitlens.commands.shared.maps.rows import INSERTION, ROAD, MapCheck, Margin
from vitlens.data.identity import sources as same_photograph
from vitlens.data.split import Split
from vitlens.shapes import Maps, Masks
from vitlens.uncertainty import Estimate, difference_of, in_points, student_mean


def map_checks(
    checked: Sequence[MethodChecks], alias: str, *, groups: Tensor | None = None, seed: int = 0
) -> dict[str, MapCheck]:
    """The row of each method, without the baselines. checked: of all methods and both baselines, on the same images;
    groups (n,): of images that share a source."""
    by_name = {checks.name: checks for checks in checked}
    methods = [name for name in by_name if name not in BASELINES]
    cascades = {
        name: None if result is None else result.cascade(seed=seed)
        for name, result in ((name, by_name[name].randomisation) for name in methods)
    }
    scores = {name: checks.judged for name, checks in by_name.items()}
    leader = _leader(scores, methods, cascades)
    by_gap = estimates(torch.stack([by_name[name].fidelity.gaps for name in methods]), groups=groups, unit="")
    by_score = estimates(torch.stack([scores[name] for name in methods]), groups=groups, unit="")
    rows = {}
    for name, gap, score in zip(methods, by_gap, by_score):
        checks, imputed = by_name[name], by_name[name].road is not None
        against = [*BASELINES, *([leader] if leader != name else [])]
        rows[name] = MapCheck(
            model=alias,
            method=name,
            images=len(checks.maps),
            unusable=int((~checks.faults.sound).sum()),
            gap=gap.value,
            low=gap.low,
            high=gap.high,
            road=score.value if imputed else None,
            margins=tuple(_margin(other, scores[name] - scores[other], groups) for other in against),
            cascade=cascades[name],
            road_low=score.low if imputed else None,
            road_high=score.high if imputed else None,
            judged_by=ROAD if imputed else INSERTION,
        )
    return rows


def information_row(name: str, maps: Maps, groups: ArrayLike | None) -> InformationRow:
    """The information and fixed places of the maps of one method or layer; groups: of the images (n,), or None."""
    bits = student_mean(map_bits(maps).numpy(), groups=groups, unit="bits")
    fixed = student_mean(fixed_share(maps).numpy(), groups=groups) if len(maps) >= FEWEST else None
    return InformationRow(name, bits, fixed)


def map_rows(alias: str, maps: Sequence[tuple[str, Maps]], split: Split) -> list[MapRow]:
    """The row of each kind of map of the split's images, by its name; the pointing game where masks are known."""
    groups = None if split.groups is None else split.groups.numpy()
    told = [information_row(name, own, groups) for name, own in maps]
    rows = [MapRow(model=alias, maps=each.maps, information=each.information, by_place=each.by_place) for each in told]
    if split.masks is None:
        return rows
    of = same_photograph(split)
    hits = on_object_rows(alias, maps, "pointing", split.masks.cpu(), groups=split.groups, sources=of)
    return [
        replace(
            row, pointing=hit.estimate, baseline=hit.baseline, of_baseline=hit.of_baseline, difference=hit.difference
        )
        for row, hit in zip(rows, hits)
    ] or rows


def on_object_rows(
    model: str,
    maps: Sequence[tuple[str, AnyMaps]],
    score: str,
    masks: Masks,
    *,
    groups: Tensor | None = None,
    sources: Tensor | None = None,
    seed: int = 0,
) -> list[OnObjectRow]:
    """The row of each kind of map, with its name, of one model in one score on the same images.

    Images without an object, and but for pointing those without background, are left out. All tensors on the CPU;
    groups (n,): of the images; sources (n,): which photograph each image is (None: its group), as no baseline is to be
    of the same one.
    """
    sources = groups if sources is None else sources
    known = masks.flatten(1).any(1) if score == "pointing" else has_edge(masks)
    if not bool(known.any()):
        return []
    masks = masks[known]
    groups, sources = (None if each is None else each[known] for each in (groups, sources))
    judge = _ON_OBJECT[score]
    values, chances, names = [], [], []
    for _, every in maps:
        own = every[known].float()
        baselines = baseline_scores(judge, own, masks, groups=sources, seed=seed)
        names.append(max(baselines, key=lambda name: float(baselines[name].mean())))
        values.append(judge(own, masks).double())
        chances.append(baselines[names[-1]].double())
    unit = "" if score == "roc_auc" else "fraction"
    scored = torch.stack(values)
    means = (
        [pointing_rate(hits, groups=groups, seed=seed) for hits in scored]
        if score == "pointing"
        else estimates(scored, groups=groups, seed=seed, unit=unit)
    )
    gains = estimates(scored - torch.stack(chances), groups=groups, seed=seed, unit=unit)
    if score == "pointing":  # of hits that are all 0, or all 1, the bootstrap would have no width
        apart = [
            difference_of(hits, pointing_rate(each, groups=groups, seed=seed)) for hits, each in zip(means, chances)
        ]
        gains = [_wider(*pair) for pair in zip(gains, apart)]
    return [
        OnObjectRow(
            model, name, score, replace(mean, n=len(masks), unit=unit), baseline,
            Estimate(float(chance.mean()), unit=unit), in_points(replace(gain, n=len(masks), unit=unit)),
        )
        for (name, _), mean, baseline, chance, gain in zip(maps, means, names, chances, gains)
    ]  # fmt: skip


def _wider(paired: Estimate, apart: Estimate) -> Estimate:
    """The paired difference, at each end with the wider of its interval and that of independent rates, in points."""
    if paired.low is None or paired.high is None or apart.low is None or apart.high is None:
        return paired
    return replace(paired, low=min(paired.low, apart.low / 100), high=max(paired.high, apart.high / 100))


_ON_OBJECT: Final = {"pointing": pointing_hits, "mass": mass_inside, "roc_auc": roc_auc}


def _leader(scores: Mapping[str, Tensor], methods: Sequence[str], cascades: Mapping[str, Cascade | None]) -> str:
    """The method of the greatest score among those that pass the randomisation check, or of all."""
    passing = [name for name in methods if (cascade := cascades[name]) is not None and cascade.state == "passes"]
    return max(passing or methods, key=lambda name: float(scores[name].mean()))


def _margin(against: str, paired: Tensor, groups: Tensor | None) -> Margin:
    (difference,) = estimates(paired.unsqueeze(0), groups=groups, unit="")
    return Margin(against, difference.value, difference.low, difference.high, len(paired))
