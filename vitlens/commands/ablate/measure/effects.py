"""The loss and the predictions without each unit, for every image: measured, summarised, written."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from vitlens.analysis.ablation.ablate import measure_effects
from vitlens.analysis.ablation.effects import Effects
from vitlens.analysis.ablation.first_order import first_order
from vitlens.analysis.ablation.importance import Importance, MeanChange, summarise
from vitlens.analysis.ablation.replacements import MeanOutputs, means_of
from vitlens.analysis.answers.evaluate import accuracy
from vitlens.commands.ablate.measure.work import AblationRun, finite
from vitlens.commands.ablate.record import (
    ACCURACY,
    AGREEMENT,
    CLASS_ARRAYS,
    CLASS_HEADS,
    CROSS_ENTROPY,
    DELTA_ACCURACY,
    DELTA_LOSS,
    EFFECT_ARRAYS,
    FIRST_ORDER,
    FORWARDS,
    HEADS_THAT_MATTER,
    RANK_CORRELATION,
    UNITS,
)
from vitlens.commands.ablate.record.arrays import ClassEffectArrays, EffectArrays
from vitlens.commands.ablate.record.rows import ClassHeadRow, ReplacementAgreementRow, UnitRow, unit_place
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.names import Replacement
from vitlens.processes import share_of
from vitlens.uncertainty import Estimate, bootstrap_mean


@dataclass(frozen=True)
class UnitEffects:
    """The effects of all units on all images, with one replacement. first_order: (units, n)."""

    effects: Effects
    first_order: Tensor
    importance: Importance


def mean_outputs(ablation: AblationRun) -> MeanOutputs | None:
    """The mean outputs over the data; None where they are not needed, or where one batch holds all images, whose clean
    pass gives them."""
    options, split = ablation.options, ablation.split
    alone = ablation.processes.count == 1 and len(split) <= ablation.batch_size
    if "mean" not in options.replace or (alone and not options.curves and not options.pairs):
        return None
    with progress("Mean outputs", len(split), quiet=ablation.run.quiet) as advance:
        means = means_of(ablation.model, _images(ablation, advance))
    means.join(ablation.processes.total)
    return means


def _images(ablation: AblationRun, advance: Callable[[int], None]) -> Iterator[Tensor]:
    for batch in ablation.batches():
        yield batch.images
        advance(len(batch.images) * ablation.processes.count)


def unit_effects(ablation: AblationRun, replacement: Replacement, means: MeanOutputs | None) -> UnitEffects:
    """The effects of all units on all images, and the first-order estimates, gathered from all processes."""
    parts: list[Effects] = []
    estimates: list[Tensor] = []
    total = len(share_of(ablation.split, ablation.processes)) * len(ablation.units)
    title, seed = f"Removing each unit ({replacement})", ablation.run.seed
    with progress(title, total, unit="removals", quiet=ablation.run.quiet) as advance:
        for batch in ablation.batches():
            inputs = (ablation.model, batch.images, batch.labels, ablation.units)
            parts.append(
                measure_effects(
                    *inputs, replace=replacement, means=means, donors=batch.donors, seed=seed, offset=batch.offset,
                    advance=lambda units: advance(units * len(batch.images)),  # noqa: B023
                    memory=ablation.memory(replacement, batch),
                )
            )  # fmt: skip
            estimates.append(first_order(*inputs, replace=replacement, means=means, donors=batch.donors))
    estimate = ablation.processes.gathered(torch.cat(estimates, 1).T.contiguous()).T
    effects = Effects.join(parts).gathered(ablation.processes)
    importance = summarise(
        effects,
        groups=ablation.groups(),
        first=estimate,
        classes=len(ablation.model.classes) if ablation.split.classes else 0,  # labels are columns of the logits
        seed=seed,
    )
    return UnitEffects(effects, estimate, importance)


def write_effects(folder: RunFolder, ablation: AblationRun, measured: Mapping[Replacement, UnitEffects]) -> None:
    """Write importance with its tests, agreement of the rankings, effects by class, and the effects on every image; no
    rows with --top."""
    importance = {name: one.importance for name, one in measured.items()}
    folder.write(UNITS, [row for name, one in importance.items() for row in unit_rows(name, one)])
    folder.write(AGREEMENT, _agreement_rows(importance))
    folder.write(CLASS_HEADS, _class_rows(ablation, importance))
    if measured:
        _write_metrics(folder, ablation, measured)
        _save_classes(folder, ablation, importance[ablation.replacement])
    for name, one in measured.items():
        folder.save(EFFECT_ARRAYS, _arrays(one), replace=name)


def _write_metrics(folder: RunFolder, ablation: AblationRun, measured: Mapping[Replacement, UnitEffects]) -> None:
    alias, seed = ablation.model.alias, ablation.run.seed
    main = measured[ablation.replacement]
    effects, importance = main.effects, main.importance
    folder.metric(ACCURACY(model=alias), accuracy(effects.clean_correct, groups=ablation.groups(), seed=seed))
    groups = ablation.groups()
    losses = bootstrap_mean(
        effects.clean_loss.numpy(), groups=None if groups is None else groups.numpy(), seed=seed, unit="nats"
    )
    folder.metric(CROSS_ENTROPY(model=alias), losses)
    for metric, change, measure in (
        (DELTA_LOSS, importance.loss, "nats"),
        (DELTA_ACCURACY, importance.accuracy, "points"),
    ):
        for index, unit in enumerate(importance.units):
            estimate = _estimate(change, index, importance.n, measure)
            folder.metric(metric(model=alias, **unit_place(unit.name)), estimate)
    heads = importance.of_kind("head")
    if heads:
        significant = int(importance.matters[heads].sum())
        folder.metric(HEADS_THAT_MATTER(model=alias), Estimate(significant / len(heads), n=len(heads)))
    if np.isfinite(importance.rank_correlation):
        rho = Estimate(importance.rank_correlation, n=len(heads), unit="")
        folder.metric(RANK_CORRELATION(model=alias), rho)
    for name, one in measured.items():
        cost = Estimate(one.importance.forward_equivalents, n=one.importance.n, unit="forwards")
        folder.metric(FORWARDS(model=alias, what=name), cost)


def _estimate(change: MeanChange, index: int, n: int, unit: str) -> Estimate:
    low, high = finite(change.low[index]), finite(change.high[index])
    if low is None or high is None:
        low = high = None
    return Estimate(float(change.mean[index]), low, high, n, unit)


def unit_rows(replacement: Replacement, importance: Importance) -> Iterator[UnitRow]:
    """One row for each unit, with its effects and their tests."""
    loss, right = importance.loss, importance.accuracy
    for index, unit in enumerate(importance.units):
        yield UnitRow(
            replace=replacement,
            unit=unit.name,
            kind=unit.kind,
            layer=unit.layer,
            head=unit.head,
            delta_loss=float(loss.mean[index]),
            delta_loss_low=finite(loss.low[index]),
            delta_loss_high=finite(loss.high[index]),
            p_holm=finite(loss.p_holm[index]),
            matters=bool(importance.matters[index]),
            delta_accuracy=float(right.mean[index]),
            delta_accuracy_low=finite(right.low[index]),
            delta_accuracy_high=finite(right.high[index]),
            accuracy_p_holm=finite(right.p_holm[index]),
            first_order=None if importance.first_order is None else finite(importance.first_order[index]),
        )


def _agreement_rows(importance: Mapping[Replacement, Importance]) -> Iterator[ReplacementAgreementRow]:
    """Spearman's correlation of the rankings of heads by each replacement and by the first-order estimate."""
    if not importance:
        return
    main = next(iter(importance.values()))
    heads = main.of_kind("head")
    rankings: dict[str, Any] = {name: one.loss.mean[heads].numpy() for name, one in importance.items()}
    if main.first_order is not None and not main.first_order[heads].isnan().any():
        rankings[FIRST_ORDER] = main.first_order[heads].numpy()
    for one, two in combinations(rankings, 2):
        constant = len(heads) < 2 or np.ptp(rankings[one]) == 0 or np.ptp(rankings[two]) == 0
        rho = None if constant else finite(spearmanr(rankings[one], rankings[two]).statistic)
        yield ReplacementAgreementRow(one, two, rho, len(heads))


def _save_classes(folder: RunFolder, ablation: AblationRun, importance: Importance) -> None:
    by_class = importance.by_class
    if by_class is not None:
        arrays = ClassEffectArrays(
            units=np.array([unit.name for unit in importance.units]),
            names=np.array(ablation.model.classes),
            images=by_class.images.numpy(),
            delta_loss=by_class.loss.numpy(),
            delta_accuracy=by_class.accuracy.numpy(),
        )
        folder.save(CLASS_ARRAYS, arrays)


def _class_rows(ablation: AblationRun, measured: Mapping[Replacement, Importance]) -> Iterator[ClassHeadRow]:
    """For each class the head whose removal raises the loss most; no rows where heads are not ranked."""
    importance = measured.get(ablation.replacement)
    by_class = None if importance is None else importance.by_class
    if importance is None or by_class is None or not importance.is_ranked("head"):
        return
    heads = importance.of_kind("head")
    for index in by_class.images.nonzero().flatten().tolist():
        if by_class.loss[heads, index].isnan().all():
            continue
        worst = heads[int(by_class.loss[heads, index].nan_to_num(nan=-1e9).argmax())]
        yield ClassHeadRow(
            class_name=ablation.model.classes[index],
            images=int(by_class.images[index]),
            head=importance.units[worst].name,
            delta_loss=float(by_class.loss[worst, index]),
            delta_accuracy=float(by_class.accuracy[worst, index]),
        )


def _arrays(measured: UnitEffects) -> EffectArrays:
    effects = measured.effects
    return EffectArrays(
        units=np.array([unit.name for unit in effects.units]),
        delta_loss=effects.delta_loss.float().numpy(),
        correct=effects.correct.numpy(),
        clean_loss=effects.clean_loss.float().numpy(),
        clean_correct=effects.clean_correct.numpy(),
        labels=effects.labels.numpy(),
        first_order=measured.first_order.float().numpy(),
    )
