"""Exact ablation of every head, MLP and block of a model, and of several heads at once."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.ablation.ablate import measure_effects, units_of
from vitlens.analysis.ablation.effects import Effects, Unit
from vitlens.analysis.ablation.first_order import first_order
from vitlens.analysis.ablation.greedy import Greedy, greedy_order
from vitlens.analysis.ablation.importance import Importance, mean_changes, spearman, summarise
from vitlens.analysis.ablation.pairs import Pairs, Redundancy, RedundancyStream, pairwise, synergy
from vitlens.analysis.ablation.removal import (
    AblationCurve,
    random_order,
    removal_curves,
    removal_matters,
    share_removable,
    steps,
)
from vitlens.analysis.ablation.replacements import replacement_for, replacement_note
from vitlens.analysis.answers.evaluate import accuracy
from vitlens.commands.ablate.bench import Bench, estimate_of, finite, name_of
from vitlens.commands.ablate.inside import head_labels, inside, pruned
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.record import (
    FIRST_ORDER,
    AblatedModelRow,
    AblateRecord,
    EffectArrays,
    HeadPairRow,
    RedundancyArrays,
    RemovalRow,
    UnitRow,
    fewest_images,
    judged,
    smallest_effect,
)
from vitlens.commands.run.digests import model_digest
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.run.progress.store import PROGRESS, ProgressStore
from vitlens.commands.run.resume import require_same
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import labels_of
from vitlens.devices import autocast
from vitlens.names import Replacement
from vitlens.processes import share_of
from vitlens.uncertainty import Estimate, bootstrap_mean

POINTS: Final = 9  # of a removal curve
REMOVAL_IMAGES: Final = 256  # images of curves and of pairs, at most: every point costs most of a forward pass
RANDOM_ORDERS: Final = 2
RERANKINGS: Final = 12  # of a greedy order
SIMILAR: Final = 0.5  # linear CKA of two heads' outputs, from which on they are removed together
_FEWEST: Final = 10  # images to rank on, and to test on; for fewer than twice as many images, both sets are all images


@dataclass(frozen=True)
class UnitEffects:
    """The effects of all units on all images, with one replacement. first_order: (units, n)."""

    effects: Effects
    first_order: Tensor
    importance: Importance


@dataclass(frozen=True)
class Removal:
    """Heads removed in order: the points of the curves; removable: the share of heads that can be removed at a cost of
    one point of accuracy, None where the accuracy without any head is not shown to be lower; greedy: the forward passes
    an image of --greedy."""

    curves: tuple[RemovalRow, ...] = ()
    removable: Estimate | None = None
    greedy: float | None = None


Measured = Mapping[Replacement, UnitEffects]  # the main replacement first


def measure(options: AblateOptions) -> Path | None:
    """Remove every head of a model in turn, exactly, and write the report; returns its path.

    Of several processes each takes its share of the images; all but the first return None. Raises DataError for images
    without labels, InputError for too few images, and for another model or other data than those of a run that
    is resumed.
    """
    run = Run("ablate", options, most=1)
    images = len(run.split)
    chosen = tuple(replacement_for(images, name) for name in options.replace or (None,))
    reason = "" if options.replace or chosen == ("mean",) else replacement_note(images, chosen[0])
    run.options = options = replace(options, replace=chosen)
    labels = labels_of(run.model, run.split, predicted=options.predicted, doing="ablate", options=run.run)
    if reason and not run.run.quiet:
        print(reason, file=sys.stderr)  # noqa: T201
    units = units_of(run.model, kinds=options.units)
    share_of(run.split, run.processes)
    identity = _identity(run)
    require_same(options.resume, "ablate", identity)
    with run.processes.main_process_first():
        opened = run.folder("Ablation of", resume=options.resume, identity=identity)
    with opened as writing:
        place = options.resume or run.run.out if writing.folder is None else writing.folder.path
        store = ProgressStore(None if place is None else place / PROGRESS, run.processes.index)
        bench = Bench(run.model, run.split, labels, units, options, run.processes, run.run, store)
        with autocast(run.model.device, run.run.precision):
            bench = bench.with_means()
            measured = {name: _unit_effects(bench, name) for name in options.replace}
            main, several = measured[bench.replacement], len(bench.heads) > 1
            ranked = several and main.importance.is_ranked("head")  # without a ranking there is no order of removal
            removal = _heads_in_order(bench, main) if options.curves and ranked else Removal()
            redundancy = _head_redundancy(bench) if options.pairs and several else None
            pairs, remark = _heads_in_pairs(bench, main.importance, redundancy) if redundancy else ([], "")
            known = head_labels(bench) if run.first and bench.heads else {}

        def record() -> AblateRecord:
            assert writing.folder is not None
            saved = options.save or writing.folder.place("pruned")
            cut, small = pruned(bench, main.importance, saved) if options.prune is not None else (None, ())
            parts, undone = inside(bench) if options.patch else ({}, ())
            notes = (*(each.importance.note for each in measured.values()), remark)
            rows = tuple(_unit_rows(bench, measured, known))
            row = replace(
                _model_row(bench, measured, removal, [row for row in rows if row.kind == "head"]),
                parameters_cut=cut,
                reason=reason,
                notes=tuple(dict.fromkeys(note for note in notes if note and note != reason)),
                undone=undone,
            )
            return AblateRecord(
                ablated=(row,),
                units=rows,
                curves=removal.curves,
                pairs=tuple(pairs),
                pruned=small,
                effects={name: _arrays(each) for name, each in measured.items()},
                redundancy=RedundancyArrays(np.array([*map(name_of, redundancy.units)]), redundancy.matrix.numpy())
                if redundancy
                else None,
                **parts,
            )

        report = writing.publish(record)
        if report is not None:
            store.forget()
        return report


def _identity(run: Run[AblateOptions]) -> dict[str, object]:
    """What must be equal when a run is resumed; the images themselves are compared batch by batch."""
    return {
        "model": model_digest(run.model),
        "images": len(run.split),
        "replace": list(run.options.replace),
        "predicted": run.options.predicted,
        "units": list(run.options.units),
        "seed": run.run.seed,
        "batch_size": run.run.batch_size,
        "precision": run.run.precision,
        "processes": run.processes.count,
    }


def _unit_effects(bench: Bench, replacement: Replacement) -> UnitEffects:
    """The effects of all units on all images, and the first-order estimates, gathered from all processes."""
    parts, estimates = [], []
    for batch, common in bench.rounds(f"Removing each unit ({replacement})", len(bench.units)):
        inputs = (bench.model, batch.images, batch.labels, bench.units)
        memory = bench.memory(replacement, batch)
        parts.append(measure_effects(*inputs, replace=replacement, memory=memory, **common))
        estimates.append(first_order(*inputs, replace=replacement, means=bench.means, donors=batch.donors))
    estimate = bench.processes.gathered(torch.cat(estimates, 1).T.contiguous()).T
    effects = Effects.join(parts).gathered(bench.processes)
    importance = summarise(effects, groups=bench.groups(), first=estimate, seed=bench.run.seed)
    return UnitEffects(effects, estimate, importance)


def _unit_rows(bench: Bench, measured: Measured, labels: Mapping[tuple[int, int], str]) -> Iterator[UnitRow]:
    """One row for each unit, with its effects and their tests."""
    main = measured[bench.replacement].importance
    smallest, hidden = smallest_effect(main.clean_loss), _hidden_by_mean(bench, measured)
    for index, unit in enumerate(main.units):
        looks = len(main.of_kind(unit.kind))
        losses = {name: estimate_of(each.importance.loss, index, main.n, "nats") for name, each in measured.items()}
        tests = {name: finite(each.importance.loss.p_holm[index]) for name, each in measured.items()}
        shown = {name: judged(losses[name], tests[name], smallest, looks) for name in measured}
        others = [name for name in measured if name != bench.replacement]
        change, p = hidden.get(index, (None, None))
        yield UnitRow(
            model=bench.model.alias,
            unit=name_of(unit),
            kind=unit.kind,
            layer=unit.layer,
            head=unit.head,
            part=unit.kind if unit.head is None else str(unit.head),
            label=None if unit.head is None else labels.get((unit.layer, unit.head)),
            replace=bench.replacement,
            loss=losses[bench.replacement],
            p=tests[bench.replacement],
            accuracy=estimate_of(main.accuracy, index, main.n, "points"),
            accuracy_p=finite(main.accuracy.p_holm[index]),
            effect=shown[bench.replacement],
            first_order=None if main.first_order is None else finite(main.first_order[index]),
            other_losses={name: losses[name] for name in others},
            other_p={name: p for name in others if (p := tests[name]) is not None},
            other_effects={name: shown[name] for name in others},
            hidden=change,
            hidden_p=p,
        )


def _hidden_by_mean(bench: Bench, measured: Measured) -> dict[int, tuple[Estimate, float | None]]:
    """The rise of the loss under resampling minus that under mean ablation, of each head, where both were measured."""
    heads = [index for index, unit in enumerate(bench.units) if unit.kind == "head"]
    if not heads or not {"mean", "resample"} <= measured.keys():
        return {}
    apart = measured["resample"].effects.delta_loss[heads] - measured["mean"].effects.delta_loss[heads]
    (change,) = mean_changes((apart,), families=["head"] * len(heads), groups=bench.groups(), seed=bench.run.seed)
    return {
        index: (estimate_of(change, row, len(bench.split), "nats"), finite(change.p_holm[row]))
        for row, index in enumerate(heads)
    }


def _model_row(bench: Bench, measured: Measured, removal: Removal, heads: Sequence[UnitRow]) -> AblatedModelRow:
    main, groups, seed, count = measured[bench.replacement], bench.groups(), bench.run.seed, len(heads)
    forwards: dict[str, Estimate] = {
        name: Estimate(each.importance.forward_equivalents, n=each.importance.n, unit="forwards")
        for name, each in measured.items()
    }
    if removal.greedy is not None:
        forwards["greedy"] = Estimate(removal.greedy, unit="forwards")
    own = main.importance.of_kind("head")
    rankings = {name: each.importance.loss.mean[own] for name, each in measured.items() if each is not main}
    rhos: dict[str, float] = {name: spearman(main.importance.loss.mean[own], each) for name, each in rankings.items()}
    rhos[FIRST_ORDER] = main.importance.rank_correlation
    return AblatedModelRow(
        model=bench.model.alias,
        replace=bench.replacement,
        accuracy=accuracy(main.effects.clean_correct, groups=groups, seed=seed),
        cross_entropy=bootstrap_mean(
            main.effects.clean_loss.numpy(), groups=None if groups is None else groups.numpy(), seed=seed, unit="nats"
        ),
        smallest=smallest_effect(main.importance.clean_loss),
        matter=Estimate(sum(row.matters for row in heads) / count, n=count) if heads else None,
        without_effect=Estimate(sum(row.effect == "no effect" for row in heads) / count, n=count)
        if heads and len(bench.split) > 1
        else None,
        rank_correlation={name: Estimate(rho, n=count, unit="") for name, rho in rhos.items() if np.isfinite(rho)},
        removable=removal.removable,
        forwards=forwards,
    )


def _arrays(measured: UnitEffects) -> EffectArrays:
    effects = measured.effects
    return EffectArrays(
        units=np.array([*map(name_of, effects.units)]),
        delta_loss=effects.delta_loss.float().numpy(),
        correct=effects.correct.numpy(),
        clean_loss=effects.clean_loss.float().numpy(),
        clean_correct=effects.clean_correct.numpy(),
        labels=effects.labels.numpy(),
        first_order=measured.first_order.float().numpy(),
    )


def _heads_in_order(bench: Bench, measured: UnitEffects) -> Removal:
    """Heads removed in the orders of the importance, ranked on one half of the images and measured on the other."""
    every = torch.arange(len(bench.split))
    ranked, tested = (every[0::2], every[1::2]) if len(every) >= 2 * _FEWEST else (every, every)
    tested = tested[:REMOVAL_IMAGES]
    orders = dict(_orders(bench, measured, ranked))
    greedy = _greedy(bench, ranked[:REMOVAL_IMAGES]) if bench.options.greedy else None
    if greedy is not None:
        orders["greedy"] = greedy.order
    removed = steps(len(bench.heads), points=POINTS)
    parts = [
        removal_curves(
            bench.model, batch.images, batch.labels, orders, removed=removed, replace=bench.replacement, **common
        )
        for batch, common in bench.rounds("Removing heads in order", len(orders) * len(removed), tested)
    ]
    joined = [AblationCurve.join([part[name] for part in parts]) for name in orders]
    curves = [replace(curve, outcomes=curve.outcomes.gathered(bench.processes)) for curve in joined]
    rows = tuple(
        RemovalRow(name, count, count / len(curve.order), right, loss)
        for name, curve in zip(orders, curves)
        for count, right, loss in zip(curve.removed, curve.accuracy(), curve.loss.tolist())
    )
    groups, least = bench.groups(tested), curves[0]
    matters = removal_matters(least, groups=groups)
    removable = share_removable(least, groups=groups, seed=bench.run.seed) if matters else None
    return Removal(rows, removable, None if greedy is None else greedy.forward_equivalents)


def _orders(bench: Bench, measured: UnitEffects, ranked: Tensor) -> Iterator[tuple[str, tuple[Unit, ...]]]:
    effects, estimates = (each[:, ranked].mean(1) for each in (measured.effects.delta_loss, measured.first_order))
    units = measured.effects.units
    heads = [index for index, unit in enumerate(units) if unit.kind == "head"]
    by_effect = sorted(heads, key=lambda index: float(effects[index]))
    yield "least first", tuple(units[index] for index in by_effect)
    yield "most first", tuple(units[index] for index in reversed(by_effect))
    if not estimates[heads].isnan().any():
        yield FIRST_ORDER, tuple(units[index] for index in sorted(heads, key=lambda index: float(estimates[index])))
    for number in range(RANDOM_ORDERS):
        yield f"random {number}", random_order(bench.heads, seed=bench.run.seed + number)


def _greedy(bench: Bench, chosen: Tensor) -> Greedy:
    heads, device = bench.heads, bench.model.device
    (batch,) = bench.split.pick(chosen).batches(len(chosen), device=device)
    labels, every = bench.labels[chosen].to(device), max(1, len(heads) // RERANKINGS)
    with progress("Ranking heads again", len(heads), unit="heads", quiet=bench.run.quiet) as advance:
        return greedy_order(
            bench.model, batch.images, labels, heads, every=every, replace=bench.replacement, means=bench.means,
            advance=advance,
        )  # fmt: skip


def _head_redundancy(bench: Bench) -> Redundancy:
    """The similarity of the outputs of each pair of heads."""
    stream = RedundancyStream(bench.model)
    for batch in bench.batches(torch.arange(len(bench.split))[:REMOVAL_IMAGES]):
        stream.add(batch.images)
    stream.join(bench.processes.total)
    return stream.result()


def _similar(redundancy: Redundancy, images: int, *, most: int) -> list[tuple[Unit, Unit]]:
    """The pairs of heads with the most similar outputs, which may each do the work of the other; none for so few images
    that no test of these pairs can be significant."""
    if images < fewest_images(max(most, 1)):
        return []
    above = redundancy.matrix.triu(1).nan_to_num(nan=0.0)
    order = above.flatten().argsort(descending=True, stable=True)[:most].tolist()
    places = [divmod(index, len(redundancy.units)) for index in order]
    return [(redundancy.units[one], redundancy.units[two]) for one, two in places if float(above[one, two]) >= SIMILAR]


def _heads_in_pairs(bench: Bench, importance: Importance, redundancy: Redundancy) -> tuple[list[HeadPairRow], str]:
    """The most important heads removed in pairs, where heads are ranked, and those of the most similar outputs; and a
    remark."""
    most = bench.options.pairs
    top = importance.ranking("head")[: max(2, most)] if importance.is_ranked("head") else ()
    alike = _similar(redundancy, len(bench.split), most=most)
    wanted = dict.fromkeys(tuple(sorted(pair, key=bench.heads.index)) for pair in (*combinations(top, 2), *alike))
    if not wanted:
        return [], ""
    units = tuple(dict.fromkeys(unit for pair in wanted for unit in pair))
    pairs = [(units.index(first), units.index(second)) for first, second in wanted]
    chosen = torch.arange(len(bench.split))[:REMOVAL_IMAGES]
    joined = Pairs.join([
        pairwise(bench.model, batch.images, batch.labels, units, pairs=pairs, replace=bench.replacement, **common)
        for batch, common in bench.rounds("Removing pairs of heads", len(units) + len(pairs), chosen)
    ])  # fmt: skip
    gathered = replace(joined, outcomes=joined.outcomes.gathered(bench.processes))
    found = synergy(gathered, groups=bench.groups(chosen), seed=bench.run.seed)
    places = {unit: place for place, unit in enumerate(redundancy.units)}
    rows = [
        HeadPairRow(
            first=name_of(units[one]),
            second=name_of(units[two]),
            pair=f"{name_of(units[one])} and {name_of(units[two])}",
            chosen="importance" if {units[one], units[two]} <= set(top) else "similarity",
            first_alone=float(found.alone[one]),
            second_alone=float(found.alone[two]),
            both=float(found.both[index]),
            synergy=estimate_of(found.change, index, found.n, "nats"),
            p=finite(found.change.p_holm[index]),
            similarity=finite(redundancy.matrix[places[units[one]], places[units[two]]]),
        )
        for index, (one, two) in enumerate(pairs)
    ]
    return rows, found.note
