"""Exact ablation of every head, MLP and block of a model, and of several heads at once."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from vitlens.analysis.ablation.ablate import measure_effects, units_of
from vitlens.analysis.ablation.effects import Effects
from vitlens.analysis.ablation.first_order import first_order
from vitlens.analysis.ablation.importance import Importance, mean_changes, summarise
from vitlens.analysis.ablation.pairs import Redundancy, Synergy
from vitlens.analysis.ablation.replacements import MeanOutputs, means_of, replacement_for, replacement_note
from vitlens.analysis.answers.evaluate import accuracy
from vitlens.commands.ablate.bench import Bench, estimate_of, finite, name_of
from vitlens.commands.ablate.inside import head_labels, inside, pruned
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.record import (
    FIRST_ORDER,
    AblatedModelRow,
    AblateRecord,
    AgreementRow,
    BrokenClassRow,
    ClassHeadRow,
    EffectArrays,
    HiddenRow,
    UnitRow,
    judged,
    smallest_effect,
)
from vitlens.commands.ablate.several import (
    RemovalCurves,
    UnitEffects,
    curve_rows,
    head_redundancy,
    head_synergy,
    heads_removed_in_order,
    pair_rows,
    redundancy_arrays,
)
from vitlens.commands.scaffold.digests import model_digest
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.commands.scaffold.progress.store import PROGRESS, ProgressStore
from vitlens.commands.scaffold.resume import require_same
from vitlens.commands.scaffold.run import Run
from vitlens.commands.scaffold.targets import labels_of
from vitlens.devices import autocast
from vitlens.names import Replacement
from vitlens.processes import share_of
from vitlens.uncertainty import Estimate, bootstrap_mean

OF_A_CLASS: Final = 20  # images from which on a class is compared
_IMPORTANT: Final = 5  # heads whose most affected class is recorded


def measure(options: AblateOptions) -> Path | None:
    """Remove every head of a model in turn, exactly, and write the report; returns its path.

    Of several processes each takes its share of the images; all but the first return None. Raises DataError for images
    without labels, InputError for too few images, and for another model or other data than those of a run that
    is resumed.
    """
    run = Run("ablate", options, most=1)
    options, reason = _with_replacements(options, len(run.split))
    run.options = options
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
            results = _results(bench)

        def record() -> AblateRecord:
            assert writing.folder is not None
            saved = options.save or writing.folder.place("pruned")
            return _record(bench, results, reason, saved)

        report = writing.publish(record)
        if report is not None:
            store.forget()
        return report


def _with_replacements(options: AblateOptions, images: int) -> tuple[AblateOptions, str]:
    """The options with their default replacement chosen, and the reason for another one than the mean, or "".

    Raises InputError for too few images for a replacement of the options.
    """
    if options.replace:
        return replace(options, replace=tuple(replacement_for(images, name) for name in options.replace)), ""
    default = replacement_for(images, None)
    return replace(options, replace=(default,)), "" if default == "mean" else replacement_note(images, default)


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


@dataclass(frozen=True)
class AblationResults:
    """What all processes contribute to. effects: by replacement; the others: None where they were not measured."""

    effects: Mapping[Replacement, UnitEffects]
    removal: RemovalCurves | None
    redundancy: Redundancy | None
    pairs: Synergy | None


def _results(bench: Bench) -> AblationResults:
    options, means = bench.options, mean_outputs(bench)
    effects = {name: unit_effects(bench, name, means) for name in options.replace}
    main = effects[bench.replacement]
    several = len(bench.heads) > 1
    ranked = several and main.importance.is_ranked("head")  # without a ranking there is no order of removal
    removal = heads_removed_in_order(bench, main, means) if options.curves and ranked else None
    redundancy = head_redundancy(bench) if options.pairs and several else None
    pairs = head_synergy(bench, main.importance, redundancy, means) if redundancy is not None else None
    return AblationResults(effects, removal, redundancy, pairs)


def _record(bench: Bench, results: AblationResults, reason: str, saved: Path) -> AblateRecord:
    """The record; labels, activation patching and pruning are measured here, by the first process alone."""
    main = results.effects[bench.replacement]
    smallest = smallest_effect(main.importance.clean_loss)
    units = tuple(unit_rows(bench, results.effects, smallest))
    heads = [row for row in units if row.kind == "head"]
    with autocast(bench.model.device, bench.run.precision):
        labels = tuple(head_labels(bench)) if heads else ()
    parts = inside(bench) if bench.options.patch else {}
    undone = parts.pop("undone", ())
    cut, small = pruned(bench, main.importance, saved) if bench.options.prune is not None else (None, {})
    row = _model_row(bench, results, smallest, heads)
    notes = (*(each.importance.note for each in results.effects.values()), results.pairs.note if results.pairs else "")
    return AblateRecord(
        ablated=(
            replace(
                row,
                parameters_cut=cut,
                reason=reason,
                notes=tuple(dict.fromkeys(note for note in notes if note and note != reason)),
                undone=undone,
            ),
        ),
        units=units,
        labels=labels,
        agreement=tuple(_agreement_rows(results.effects)),
        hidden=tuple(hidden_by_mean(bench, results.effects)),
        curves=tuple(curve_rows(results.removal)) if results.removal else (),
        pairs=tuple(pair_rows(bench, main.importance, results.pairs, results.redundancy)),
        classes=tuple(_class_rows(bench, main.importance)),
        broken=tuple(_broken_classes(bench, main.importance)),
        effects={name: _arrays(each) for name, each in results.effects.items()},
        redundancy=redundancy_arrays(results.redundancy) if results.redundancy else None,
        **parts,
        **small,
    )


def mean_outputs(bench: Bench) -> MeanOutputs | None:
    """The mean outputs over the data; None where they are not needed, or where one batch holds all images, whose clean
    pass gives them."""
    options, split = bench.options, bench.split
    alone = bench.processes.count == 1 and len(split) <= bench.batch_size
    if "mean" not in options.replace or (alone and not options.curves and not options.pairs):
        return None
    with progress("Mean outputs", len(split), quiet=bench.run.quiet) as advance:
        means = means_of(bench.model, _images(bench, advance))
    means.join(bench.processes.total)
    return means


def _images(bench: Bench, advance: Callable[[int], None]) -> Iterator[Tensor]:
    for batch in bench.batches():
        yield batch.images
        advance(len(batch.images) * bench.processes.count)


def unit_effects(bench: Bench, replacement: Replacement, means: MeanOutputs | None) -> UnitEffects:
    """The effects of all units on all images, and the first-order estimates, gathered from all processes."""
    parts: list[Effects] = []
    estimates: list[Tensor] = []
    total = len(share_of(bench.split, bench.processes)) * len(bench.units)
    title, seed = f"Removing each unit ({replacement})", bench.run.seed
    with progress(title, total, unit="removals", quiet=bench.run.quiet) as advance:
        for batch in bench.batches():
            inputs = (bench.model, batch.images, batch.labels, bench.units)
            parts.append(
                measure_effects(
                    *inputs, replace=replacement, means=means, donors=batch.donors, seed=seed, offset=batch.offset,
                    advance=lambda units: advance(units * len(batch.images)),  # noqa: B023
                    memory=bench.memory(replacement, batch),
                )
            )  # fmt: skip
            estimates.append(first_order(*inputs, replace=replacement, means=means, donors=batch.donors))
    estimate = bench.processes.gathered(torch.cat(estimates, 1).T.contiguous()).T
    effects = Effects.join(parts).gathered(bench.processes)
    importance = summarise(
        effects,
        groups=bench.groups(),
        first=estimate,
        classes=len(bench.model.classes) if bench.split.classes else 0,  # labels are columns of the logits
        seed=seed,
    )
    return UnitEffects(effects, estimate, importance)


def unit_rows(bench: Bench, measured: Mapping[Replacement, UnitEffects], smallest: Estimate) -> Iterator[UnitRow]:
    """One row for each unit, with its effects and their tests."""
    main = measured[bench.replacement].importance
    for index, unit in enumerate(main.units):
        looks = len(main.of_kind(unit.kind))
        losses = {name: estimate_of(each.importance.loss, index, main.n, "nats") for name, each in measured.items()}
        tests = {name: finite(each.importance.loss.p_holm[index]) for name, each in measured.items()}
        shown = {name: judged(losses[name], tests[name], smallest, looks) for name in measured}
        others = [name for name in measured if name != bench.replacement]
        yield UnitRow(
            model=bench.model.alias,
            unit=name_of(unit),
            kind=unit.kind,
            layer=unit.layer,
            head=unit.head,
            part=unit.kind if unit.head is None else str(unit.head),
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
        )


def _model_row(bench: Bench, results: AblationResults, smallest: Estimate, heads: Sequence[UnitRow]) -> AblatedModelRow:
    main, groups, seed = results.effects[bench.replacement], bench.groups(), bench.run.seed
    rho = main.importance.rank_correlation
    forwards = {
        name: Estimate(each.importance.forward_equivalents, n=each.importance.n, unit="forwards")
        for name, each in results.effects.items()
    }
    removal, count = results.removal, len(heads)
    if removal is not None and removal.greedy is not None:
        forwards["greedy"] = Estimate(removal.greedy.forward_equivalents, unit="forwards")  # type: ignore[index]
    without = sum(row.effect == "no effect" for row in heads)
    return AblatedModelRow(
        model=bench.model.alias,
        replace=bench.replacement,
        accuracy=accuracy(main.effects.clean_correct, groups=groups, seed=seed),
        cross_entropy=bootstrap_mean(
            main.effects.clean_loss.numpy(), groups=None if groups is None else groups.numpy(), seed=seed, unit="nats"
        ),
        smallest=smallest,
        matter=Estimate(sum(row.matters for row in heads) / count, n=count) if heads else None,
        without_effect=Estimate(without / count, n=count) if heads and len(bench.split) > 1 else None,
        rank_correlation=Estimate(rho, n=count, unit="") if np.isfinite(rho) else None,
        removable=None if removal is None else removal.removable,
        forwards=forwards,  # type: ignore[arg-type]
    )


def _agreement_rows(measured: Mapping[Replacement, UnitEffects]) -> Iterator[AgreementRow]:
    """Spearman's correlation of the rankings of heads by each replacement and by the first-order estimate."""
    main = next(iter(measured.values())).importance
    heads = main.of_kind("head")
    if not heads:
        return
    rankings: dict[str, Any] = {name: each.importance.loss.mean[heads].numpy() for name, each in measured.items()}
    if main.first_order is not None and not main.first_order[heads].isnan().any():
        rankings[FIRST_ORDER] = main.first_order[heads].numpy()
    for one, two in combinations(rankings, 2):
        constant = len(heads) < 2 or np.ptp(rankings[one]) == 0 or np.ptp(rankings[two]) == 0
        rho = None if constant else finite(spearmanr(rankings[one], rankings[two]).statistic)
        yield AgreementRow(one, two, len(heads), rho)


def hidden_by_mean(bench: Bench, measured: Mapping[Replacement, UnitEffects]) -> Iterator[HiddenRow]:
    """The rise of the loss under resampling minus that under mean ablation, where both were measured."""
    if not {"mean", "resample"} <= measured.keys():
        return
    one, two = measured["resample"].effects, measured["mean"].effects
    heads = [index for index, unit in enumerate(one.units) if unit.kind == "head"]
    if not heads:
        return
    apart = (one.delta_loss - two.delta_loss)[heads]
    (change,) = mean_changes(
        (apart,), families=["head"] * len(heads), groups=bench.groups(), seed=bench.run.seed
    )  # fmt: skip
    for row, index in enumerate(heads):
        hidden = estimate_of(change, row, len(bench.split), "nats")
        yield HiddenRow(name_of(one.units[index]), hidden, finite(change.p_holm[row]))


def _class_rows(bench: Bench, importance: Importance) -> Iterator[ClassHeadRow]:
    """For each class the head whose removal raises the loss most; no rows where heads are not ranked."""
    by_class = importance.by_class
    if by_class is None or not importance.is_ranked("head"):
        return
    heads = importance.of_kind("head")
    for index in by_class.images.nonzero().flatten().tolist():
        if by_class.loss[heads, index].isnan().all():
            continue
        worst = heads[int(by_class.loss[heads, index].nan_to_num(nan=-1e9).argmax())]
        yield ClassHeadRow(
            bench.model.classes[index], int(by_class.images[index]), name_of(importance.units[worst]),
            float(by_class.loss[worst, index]), float(by_class.accuracy[worst, index]),
        )  # fmt: skip


def _broken_classes(bench: Bench, importance: Importance) -> Iterator[BrokenClassRow]:
    """For each of the most important heads the class whose loss rises most, among classes of enough images."""
    by_class = importance.by_class
    if by_class is None or not importance.is_ranked("head"):
        return
    known = (by_class.images >= OF_A_CLASS).nonzero().flatten()
    if len(known) < 2:
        return
    for unit in importance.ranking("head")[:_IMPORTANT]:
        index = importance.units.index(unit)
        worst = int(known[by_class.loss[index, known].argmax()])
        yield BrokenClassRow(
            name_of(unit), bench.model.classes[worst], int(by_class.images[worst]), len(known),
            float(by_class.loss[index, worst]), float(by_class.accuracy[index, worst]),
        )  # fmt: skip


def _arrays(measured: UnitEffects) -> EffectArrays:
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
