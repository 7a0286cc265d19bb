"""What a run of `vitlens ablate` writes down of what it measured: metrics, tables, arrays."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from torch import Tensor

from vitlens.analysis.ablation.adaptive import Adaptive
from vitlens.analysis.ablation.effects import Unit
from vitlens.analysis.ablation.importance import Importance, MeanChange
from vitlens.analysis.ablation.pairs import Redundancy, Synergy
from vitlens.analysis.ablation.removal import AblationCurve
from vitlens.analysis.answers.evaluate import accuracy
from vitlens.names import Replacement
from vitlens.runs.ablate_work import Found, Work
from vitlens.runs.folder import RunFolder
from vitlens.uncertainty import Estimate, bootstrap_mean

FIRST_ORDER = "first-order"


def keep(folder: RunFolder, work: Work, found: Found) -> None:
    """Write everything that was found."""
    folder.table("notes", [{"note": note} for note in (*filter(None, [work.choices.because]), *_notes(found))])
    if found.adaptive is not None:
        _keep_adaptive(folder, found.adaptive)
        return
    main = work.choices.replace[0]
    _keep_metrics(folder, work, found, main)
    folder.table("units", [row for name, one in found.importance.items() for row in _units(name, one)])
    folder.table("agreement", list(_agreement(found)))
    _keep_classes(folder, work, found.importance[main])
    for name, effects in found.effects.items():
        folder.arrays(
            f"effects-{name}",
            units=np.array([unit.name for unit in effects.units]),
            delta_loss=effects.delta_loss.float().numpy(),
            correct=effects.correct.numpy(),
            clean_loss=effects.clean_loss.float().numpy(),
            clean_correct=effects.clean_correct.numpy(),
            labels=effects.labels.numpy(),
            first_order=found.firsts[name].float().numpy(),
        )
    if found.curves:
        folder.table("curves", [row for name, curve in found.curves.items() for row in _curve(name, curve)])
    if found.removable is not None:
        folder.metric("removable_share", found.removable)
    if found.greedy_cost is not None:
        folder.metric("forward_equivalents/greedy", Estimate(found.greedy_cost, unit="forwards"))
    if found.redundancy is not None:
        _keep_redundancy(folder, found.redundancy)
    if found.synergy is not None:
        folder.table("pairs", list(_pairs(found.synergy)))


def _notes(found: Found) -> dict[str, None]:
    """What the parts have to say, each once."""
    said = [one.note for one in found.importance.values()]
    said += [one.note for one in (found.synergy, found.adaptive) if one is not None]
    return dict.fromkeys(note for note in said if note)


def _keep_metrics(folder: RunFolder, work: Work, found: Found, main: Replacement) -> None:
    effects, importance = found.effects[main], found.importance[main]
    groups = None if work.split.groups is None else work.split.groups.numpy()
    folder.metric("accuracy", accuracy(effects.clean_correct, groups=work.split.groups, seed=work.options.seed))
    losses = effects.clean_loss.numpy()
    folder.metric("cross_entropy", bootstrap_mean(losses, groups=groups, seed=work.options.seed, unit="nats"))
    for word, change, unit in (
        ("delta_loss", importance.loss, "nats"),
        ("delta_accuracy", importance.accuracy, "points"),
    ):
        for index, found_unit in enumerate(importance.units):
            folder.metric(f"importance/{word}/{metric_name(found_unit)}", _estimate(change, index, importance.n, unit))
    heads = importance.of_kind("head")
    if heads:
        matter = int(importance.matters[heads].sum())
        folder.metric("heads_that_matter", Estimate(matter / len(heads), n=len(heads)))
    if np.isfinite(importance.rank_correlation):
        folder.metric(f"rank_correlation/{FIRST_ORDER}", Estimate(importance.rank_correlation, n=len(heads), unit=""))
    for name, one in found.importance.items():
        spent = Estimate(one.forward_equivalents, n=one.n, unit="forwards")
        folder.metric(f"forward_equivalents/{name}", spent)


def metric_name(unit: Unit) -> str:
    """3/7 for a head, mlp/3 and block/3 for the others; from 0."""
    return unit.name.removeprefix("head/")


def _estimate(change: MeanChange, index: int, n: int, unit: str) -> Estimate:
    low, high = float(change.low[index]), float(change.high[index])
    if not (np.isfinite(low) and np.isfinite(high)):
        return Estimate(float(change.mean[index]), n=n, unit=unit)
    return Estimate(float(change.mean[index]), low, high, n, unit)


def _units(name: Replacement, importance: Importance) -> Iterator[dict[str, object]]:
    for index, unit in enumerate(importance.units):
        first = None if importance.first_order is None else number(importance.first_order[index])
        yield {
            "replace": name,
            "unit": unit.name,
            "kind": unit.kind,
            "layer": unit.layer,
            "head": unit.head,
            "delta_loss": number(importance.loss.mean[index]),
            "delta_loss_low": number(importance.loss.low[index]),
            "delta_loss_high": number(importance.loss.high[index]),
            "p_holm": number(importance.loss.p_holm[index]),
            "matters": bool(importance.matters[index]),
            "delta_accuracy": number(importance.accuracy.mean[index]),
            "delta_accuracy_low": number(importance.accuracy.low[index]),
            "delta_accuracy_high": number(importance.accuracy.high[index]),
            "accuracy_p_holm": number(importance.accuracy.p_holm[index]),
            "first_order": first,
        }


def number(value: Tensor | float) -> float | None:
    """For JSON: six digits, nothing for NaN."""
    found = float(value)
    return float(f"{found:.6g}") if np.isfinite(found) else None


def _agreement(found: Found) -> Iterator[dict[str, object]]:
    """Spearman between the rankings of heads by each replacement and by the first-order estimate."""
    main = next(iter(found.importance))
    heads = found.importance[main].of_kind("head")
    columns: dict[str, Any] = {name: one.loss.mean[heads].numpy() for name, one in found.importance.items()}
    first = found.importance[main].first_order
    if first is not None and not first[heads].isnan().any():
        columns[FIRST_ORDER] = first[heads].numpy()
    for one, two in combinations(columns, 2):
        flat = len(heads) < 2 or np.ptp(columns[one]) == 0 or np.ptp(columns[two]) == 0
        rho = None if flat else float(spearmanr(columns[one], columns[two]).statistic)
        yield {"first": one, "second": two, "rank_correlation": rho, "heads": len(heads)}


def _keep_classes(folder: RunFolder, work: Work, importance: Importance) -> None:
    """For each class the unit it loses most accuracy without, and all of them as an array."""
    found = importance.by_class
    if found is None:
        return
    folder.arrays(
        "classes",
        units=np.array([unit.name for unit in importance.units]),
        names=np.array(work.model.classes),
        images=found.images.numpy(),
        delta_loss=found.loss.numpy(),
        delta_accuracy=found.accuracy.numpy(),
    )
    heads, rows = importance.of_kind("head"), []
    for index in found.images.nonzero().flatten().tolist() if importance.is_ranked("head") else ():
        if not heads or found.loss[heads, index].isnan().all():
            continue
        worst = heads[int(found.loss[heads, index].nan_to_num(nan=-1e9).argmax())]
        rows.append(
            {
                "class": work.model.classes[index],
                "images": int(found.images[index]),
                "head": importance.units[worst].name,
                "delta_loss": number(found.loss[worst, index]),
                "delta_accuracy": number(found.accuracy[worst, index]),
            }
        )
    folder.table("classes", rows)


def _curve(name: str, curve: AblationCurve) -> Iterator[dict[str, object]]:
    losses = curve.loss.tolist()
    for count, estimate, loss in zip(curve.removed, curve.accuracy(), losses):
        yield {
            "order": name,
            "removed": count,
            "share": count / len(curve.order),
            "accuracy": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
            "n": estimate.n,
            "loss": number(loss),
        }


def _keep_redundancy(folder: RunFolder, redundancy: Redundancy) -> None:
    units = np.array([unit.name for unit in redundancy.units])
    layers = np.array([unit.layer for unit in redundancy.units])
    folder.arrays("redundancy", units=units, layers=layers, similarity=redundancy.matrix.numpy())


def _pairs(synergy: Synergy) -> Iterator[dict[str, object]]:
    for index, (one, two) in enumerate(synergy.pairs):
        change = synergy.change
        yield {
            "first": synergy.units[one].name,
            "second": synergy.units[two].name,
            "both": number(synergy.both[index]),
            "synergy": number(change.mean[index]),
            "low": number(change.low[index]),
            "high": number(change.high[index]),
            "p_holm": number(change.p_holm[index]),
            "n": synergy.n,
        }


def _keep_adaptive(folder: RunFolder, found: Adaptive) -> None:
    rank = {index: place for place, index in enumerate(found.ranking)}
    rows = [
        {
            "rank": rank[index] + 1,
            "unit": unit.name,
            "layer": unit.layer,
            "head": unit.head,
            "delta_loss": number(found.mean[index]),
            "low": number(found.low[index]),
            "high": number(found.high[index]),
            "images": int(found.images[index]),
            "settled": bool(found.settled[index]),
            "top": rank[index] < found.k,
        }
        for index, unit in enumerate(found.units)
    ]
    folder.table("adaptive", sorted(rows, key=lambda row: int(str(row["rank"]))))
    folder.metric("forward_equivalents/adaptive", Estimate(found.forward_equivalents, n=found.n, unit="forwards"))
    folder.metric("forward_equivalents/exact", Estimate(found.exact_cost, n=found.n, unit="forwards"))
