"""The effect of removing each unit: measurements, and their rows in the record."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vitlens.analysis.ablation.importance import Importance, first_order, mean_changes, summarise
from vitlens.analysis.ablation.outcomes import Outcomes
from vitlens.analysis.ablation.units import Unit
from vitlens.analysis.dictionary.dictionary import Dictionary
from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.evaluation.intervals import spearman
from vitlens.commands.ablate.ablation_setup import AblationSetup, name_of
from vitlens.commands.ablate.record import (
    FIRST_ORDER,
    AblatedModelRow,
    EffectArrays,
    UnitRow,
    judge_effect,
    smallest_effect,
)
from vitlens.commands.ablate.removal import RemovalCurves
from vitlens.names import Replacement
from vitlens.uncertainty import Estimate, bootstrap_mean, finite

HeadLabels = Mapping[tuple[int, int], str]  # by layer and head


@dataclass(frozen=True)
class UnitEffects:
    """The effects of all units on all images, with one replacement.

    effects: loss, log-odds and predictions without each unit, and of the unchanged model.
    first_order: estimates of the rise of the loss (units, n), nats.
    importance: the means of both over the images, with tests.
    """

    effects: Outcomes
    first_order: Tensor
    importance: Importance

    @property
    def ranking(self) -> Tensor:
        """Return the change by which units are ranked (units, n): of the loss, or of log-odds if
        the loss is near 0.
        """
        if self.importance.log_odds is None:
            return self.effects.delta_loss
        return self.effects.delta_log_odds

    def loss(self, index: int) -> Estimate:
        """Return the rise of the mean loss without the unit at an index, nats."""
        return self.importance.loss.estimate(index, self.importance.n, "nats")

    def p(self, index: int) -> float | None:
        """Return p of that rise, after Holm's correction over the units of the kind."""
        return finite(self.importance.loss.p_holm[index])


EffectsByReplacement = Mapping[Replacement, UnitEffects]  # the replacement of the figures first


def measure_effects(setup: AblationSetup, replacement: Replacement) -> UnitEffects:
    """Return the effects of all units and their first-order estimates, gathered from all
    processes."""
    analysis = setup.for_replacement(replacement)
    sets = [(unit,) for unit in setup.units]
    effects = analysis.without(sets, what=f"Removing each unit ({replacement})")
    estimates = first_order(analysis, setup.units)
    importance = summarise(effects, groups=setup.groups(), first=estimates, seed=setup.seed)
    return UnitEffects(effects, estimates, importance)


def unit_rows(
    setup: AblationSetup, measured: EffectsByReplacement, labels: HeadLabels
) -> Iterator[UnitRow]:
    """Yield a row for each unit with its effects and their tests."""
    importance = measured[setup.replacement].importance
    smallest = smallest_effect(importance.clean_loss)
    hidden = _hidden_by_mean(setup, measured)
    for index, unit in enumerate(importance.units):
        tests = len(importance.of_kind(unit.kind))
        losses = {}
        p_values = {}
        judgements = {}
        for name, effects in measured.items():
            losses[name] = effects.loss(index)
            p_values[name] = effects.p(index)
            judgements[name] = judge_effect(losses[name], p_values[name], smallest, tests)
        alternatives = [name for name in measured if name != setup.replacement]
        yield UnitRow(
            model=setup.run.model.alias,
            unit=name_of(unit),
            kind=unit.kind,
            layer=unit.layer,
            replace=setup.replacement,
            loss=losses[setup.replacement],
            p=p_values[setup.replacement],
            accuracy=importance.accuracy.estimate(index, importance.n, "points"),
            effect=judgements[setup.replacement],
            other_losses={name: losses[name] for name in alternatives},
            other_p=_without_none(p_values, alternatives),
            other_effects={name: judgements[name] for name in alternatives},
            **_name_fields(unit, labels),
            **_estimate_fields(importance, index),
            **hidden.get(index, {}),
        )


def _without_none(
    p_values: Mapping[Replacement, float | None], names: Sequence[Replacement]
) -> dict[Replacement, float]:
    """Return the p-values of these replacements, as far as they are defined."""
    defined = {}
    for name in names:
        p = p_values[name]
        if p is not None:
            defined[name] = p
    return defined


def _name_fields(unit: Unit, labels: HeadLabels) -> dict[str, Any]:
    """Return the fields of UnitRow that name the unit in its layer, and the label of a head."""
    if unit.latent is not None:
        return {"part": f"latent{unit.latent}", "latent": unit.latent}
    if unit.head is None:
        return {"part": unit.kind}
    return {"part": str(unit.head), "head": unit.head, "label": labels.get((unit.layer, unit.head))}


def _estimate_fields(importance: Importance, index: int) -> dict[str, Any]:
    """Return the first-order estimate of a unit, and the fall of the log-odds where units are
    ranked by it.
    """
    fields: dict[str, Any] = {}
    if importance.first_order is not None:
        fields["first_order"] = finite(importance.first_order[index])
    log_odds = importance.log_odds
    if log_odds is not None:
        fields["log_odds"] = log_odds.estimate(index, importance.n, "nats")
        fields["log_odds_p"] = finite(log_odds.p_holm[index])
    return fields


def _hidden_by_mean(
    setup: AblationSetup, measured: EffectsByReplacement
) -> dict[int, dict[str, Any]]:
    """Return the rise of the loss under resampling minus that under the mean, with p, by index of
    the head.

    Empty unless both replacements were measured.
    """
    heads = [index for index, unit in enumerate(setup.units) if unit.kind == "head"]
    if not heads or not {"mean", "resample"} <= measured.keys():
        return {}
    under_resampling = measured["resample"].effects.delta_loss[heads]
    under_mean = measured["mean"].effects.delta_loss[heads]
    [change] = mean_changes(
        (under_resampling - under_mean,),
        families=["head"] * len(heads),
        groups=setup.groups(),
        seed=setup.seed,
    )
    fields = {}
    for position, index in enumerate(heads):  # positions among the heads, indices among the units
        fields[index] = {
            "hidden": change.estimate(position, setup.images, "nats"),
            "hidden_p": finite(change.p_holm[position]),
        }
    return fields


def model_row(
    setup: AblationSetup,
    measured: EffectsByReplacement,
    curves: RemovalCurves,
    units: Sequence[UnitRow],
) -> AblatedModelRow:
    """Return the row of the model: its metrics without removal, and counts of heads."""
    main = measured[setup.replacement]  # the effects that the figures show
    heads = [row for row in units if row.kind == "head"]
    matter = None
    without_effect = None
    if heads:
        matter = _share([row.matters for row in heads])
    if heads and setup.images > 1:
        without_effect = _share([row.effect == "no effect" for row in heads])
    groups = setup.groups()
    group_array = None if groups is None else groups.numpy()
    cross_entropy = bootstrap_mean(
        main.effects.clean_loss.numpy(),
        groups=group_array,
        seed=setup.seed,
        unit="nats",
        least=0.0,
    )
    return AblatedModelRow(
        model=setup.run.model.alias,
        replace=setup.replacement,
        accuracy=accuracy(main.effects.clean_correct, groups=groups),
        cross_entropy=cross_entropy,
        smallest=smallest_effect(main.importance.clean_loss),
        matter=matter,
        without_effect=without_effect,
        rank_correlation=_rank_correlations(measured, main),
        removable=curves.removable,
        forwards=_forwards(measured, curves),
        **_dictionary_fields(setup.dictionary),
    )


def _dictionary_fields(dictionary: Dictionary | None) -> dict[str, Any]:
    if dictionary is None:
        return {}
    return {"dictionary": dictionary.place, "latents": len(dictionary)}


def _share(flags: Sequence[bool]) -> Estimate:
    return Estimate(sum(flags) / len(flags), n=len(flags))


def _rank_correlations(measured: EffectsByReplacement, main: UnitEffects) -> dict[str, Estimate]:
    """Return Spearman's correlation of the heads' main effects with those of other replacements,
    and with first-order ones.
    """
    heads = main.importance.of_kind("head")  # indices
    reference = main.importance.loss.mean[heads]
    correlations: dict[str, float] = {}
    for name, effects in measured.items():
        if effects is not main:
            losses = effects.importance.loss.mean[heads]
            correlations[name] = spearman(reference[None], losses[None]).item()
    correlations[FIRST_ORDER] = main.importance.rank_correlation
    estimates: dict[str, Estimate] = {}
    for ranking, correlation in correlations.items():
        if np.isfinite(correlation):
            estimates[ranking] = Estimate(correlation, n=len(heads), unit="")
    return estimates


def _forwards(measured: EffectsByReplacement, curves: RemovalCurves) -> dict[str, Estimate]:
    """Return the forward passes that each image took, by replacement, and for the greedy order."""
    forwards: dict[str, Estimate] = {}
    for name, effects in measured.items():
        importance = effects.importance
        forwards[name] = Estimate(importance.forward_equivalents, n=importance.n, unit="forwards")
    if curves.greedy_forwards is not None:
        forwards["greedy"] = Estimate(curves.greedy_forwards, unit="forwards")
    return forwards


def effect_arrays(measured: UnitEffects) -> EffectArrays:
    """Return the results of all images with one replacement."""
    effects = measured.effects
    return EffectArrays(
        units=np.array([name_of(unit) for unit in effects.units]),
        delta_loss=effects.delta_loss.float().numpy(),
        correct=effects.correct.numpy(),
        clean_loss=effects.clean_loss.float().numpy(),
        clean_correct=effects.clean_correct.numpy(),
        labels=effects.labels.numpy(),
        first_order=measured.first_order.float().numpy(),
    )
