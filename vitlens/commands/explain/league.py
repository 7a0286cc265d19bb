"""The league of methods, and what the comparisons of methods can detect."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.evaluation.intervals import estimates
from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.analysis.faithfulness.league import MethodChecks
from vitlens.analysis.faithfulness.localisation import has_edge, pointing_rate
from vitlens.commands.explain.record import LeagueRow, PowerRow
from vitlens.commands.shared.maps.measure import CheckedMaps
from vitlens.data.split import Split
from vitlens.uncertainty import Estimate, Power, power_of

_UNITS: Final = {"relevance_gain": "logits"}  # units of the columns that are not fractions
# (lowest, highest) value of the columns that are not shares: differences of areas, and of logits
_RANGES: Final = {
    "gap": (-1.0, 1.0),
    "road": (-1.0, 1.0),
    "relevance_gain": (-math.inf, math.inf),
}
# columns that a model with a single class does not have
_OF_PREDICTIONS: Final = ("deletion_accuracy", "insertion_accuracy")
# checks in which the best method is compared with the others
_COMPARED: Final = ("road", "roc_auc", "pointing")


def league_rows(checked: CheckedMaps, split: Split) -> tuple[LeagueRow, ...]:
    """Return the means of every check with their intervals, the best method first, by ROAD."""
    columns = _columns(checked, split)
    rows = []
    has_predictions = len(checked.model.classes) > 1
    for index, checks in enumerate(checked.results):
        values = {
            name: means[index]
            for name, means in columns.items()
            if has_predictions or name not in _OF_PREDICTIONS
        }
        values |= _randomisation_means(checked, checks)
        if checks.seconds is not None:
            values["seconds"] = Estimate(checks.seconds, n=len(checks.maps), unit="s")
        if checks.forwards is not None:
            values["forwards"] = Estimate(checks.forwards, unit="forwards")
        row = LeagueRow(
            model=checked.model.alias,
            method=checks.name,
            baseline=checks.name in BASELINES,
            faults=checks.faults.words,
            **values,
        )
        rows.append(row)
    return tuple(sorted(rows, key=_best_first))


def _best_first(row: LeagueRow) -> float:
    score = row.road
    if score is None:
        score = row.gap
    return -score.value


def _columns(checked: CheckedMaps, split: Split) -> dict[str, list[Estimate]]:
    """Return the mean of every check for each method and baseline, in the order of the results."""
    seed = checked.settings.seed
    columns: dict[str, list[Estimate]] = {}
    values_of_methods = [_values_of(checks) for checks in checked.results]
    for name in values_of_methods[0]:
        groups = split.groups
        is_localisation = name in checked.results[0].scores
        if is_localisation:  # measured on images with a mask only
            groups = masked_groups(split)
        # (methods, images): one call of `estimates`, so that methods share bootstrap draws
        values = torch.stack([by_check[name].float() for by_check in values_of_methods])
        if name == "pointing":
            columns[name] = [pointing_rate(hits, groups=groups, seed=seed) for hits in values]
        else:
            least, most = _RANGES.get(name, (0.0, 1.0))
            unit = _UNITS.get(name, "fraction")
            columns[name] = estimates(
                values, groups=groups, seed=seed, unit=unit, least=least, most=most
            )
    return columns


def _values_of(checks: MethodChecks) -> dict[str, Tensor]:
    """Return every number that a method has for each image, by check."""
    return {**checks.values, **checks.scores}


def _randomisation_means(checked: CheckedMaps, checks: MethodChecks) -> dict[str, Estimate]:
    """Return the mean rank correlations with random weights; nothing without a usable map."""
    randomisation = checks.randomisation
    if randomisation is None or not randomisation.usable.shape[1]:
        return {}
    groups = randomisation.groups_of_usable(checked.groups)
    means = {}
    for name, values in randomisation.values.items():
        (means[name],) = estimates(
            values[None],
            groups=groups,
            seed=checked.settings.seed,
            unit="",
            least=-1.0,
            most=1.0,
        )
    return means


def masked_groups(split: Split) -> Tensor | None:
    """Return the groups of the images whose mask can be scored; None without groups or masks."""
    if split.groups is None or split.masks is None:
        return None
    return split.groups[has_edge(split.masks).cpu()]


def power_rows(checked: CheckedMaps, split: Split) -> Iterator[PowerRow]:
    """Yield the power of paired comparisons of the best method with the others, for each check of
    single images.
    """
    for check in _COMPARED:
        values = _values_by_method(checked, check)
        if values is None:
            continue
        groups = checked.groups
        if check != "road":
            groups = masked_groups(split)
        best = max(values, key=lambda name: float(values[name].mean()))
        powers = _powers(values, best, groups)
        if not powers:
            continue
        detectable = median(power.detectable for power in powers)
        least, most = _RANGES.get(check, (0.0, 1.0))
        estimate = None
        if detectable <= most - least:
            estimate = Estimate(detectable, n=powers[0].n)  # all comparisons have the same images
        yield PowerRow(
            model=checked.model.alias,
            check=check,
            best=best,
            error=median(power.error for power in powers),
            groups=powers[0].groups,
            detectable=estimate,
        )


def _values_by_method(checked: CheckedMaps, check: str) -> dict[str, Tensor] | None:
    """Return the values of one check, image by image, by method; None if a method has none."""
    values = {}
    for name in checked.methods:
        by_check = _values_of(checked.by_name[name])
        if check not in by_check:
            return None
        values[name] = by_check[check]
    return values


def _powers(values: Mapping[str, Tensor], best: str, groups: Tensor | None) -> Sequence[Power]:
    """Return the power of the comparison of the best method with each other method that differs
    from it.
    """
    powers = []
    for name in values:
        if name == best:
            continue
        differences = values[best].double() - values[name].double()
        power = power_of(differences, groups=groups)
        if power is not None and power.error > 0:
            powers.append(power)
    return powers
