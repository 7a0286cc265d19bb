"""Exact ablation of every head, MLP and block of a model, and of several heads at once."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.ablation.bench import Outcomes, Unit, replacement_for, replacement_note, units_of
from vitlens.analysis.ablation.importance import Importance, first_order, mean_changes, summarise
from vitlens.analysis.ablation.several import (
    greedy_order,
    head_similarity,
    pairwise,
    removal_curves,
    share_removable,
)
from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.evaluation.intervals import spearman
from vitlens.commands.ablate import record as rows
from vitlens.commands.ablate.bench import Bench, head_labels, inside, name_of, pruned
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.run.progress import phase
from vitlens.commands.run.resume import resumable, with_its_settings
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import labels_of, require_label_source
from vitlens.devices import autocast
from vitlens.names import Replacement
from vitlens.uncertainty import Estimate, bootstrap_mean, fewest_images, finite

POINTS: Final = 9  # of a removal curve
REMOVAL_IMAGES: Final = 256  # images of curves and of pairs, at most: every point costs most of a forward pass
RANDOM_ORDERS: Final = 2
RERANKINGS: Final = 12  # of a greedy order
SIMILAR: Final = 0.5  # linear CKA of two heads' outputs, from which on they are removed together
_FEWEST: Final = 10  # images to rank on, and to test on; for fewer than twice as many images, both sets are all images


@dataclass(frozen=True)
class UnitEffects:
    """The effects of all units on all images, with one replacement. first_order: (units, n)."""

    effects: Outcomes
    first_order: Tensor
    importance: Importance

    @property
    def ranking(self) -> Tensor:
        """Return the change by which units are ranked (units, images)."""
        return self.effects.delta_loss if self.importance.log_odds is None else self.effects.delta_log_odds


Measured = Mapping[Replacement, UnitEffects]  # the main replacement first


def measure(options: AblateOptions) -> Path | None:
    """Remove every head of a model in turn, exactly, and write the report; returns its path.

    Of several processes each takes its share of the images; all but the first return None. Raises DataError for images
    without labels, InputError for too few images, and for another model or other data than those of a run that
    is resumed.
    """
    typed = options
    options = with_its_settings(options, "ablate")
    if not options.predicted and options.run.labels is None:
        require_label_source(options.data, options.images, doing="ablate")
    run = Run("ablate", options, scenes=1, most=1)
    images = len(run.split)
    chosen = tuple(replacement_for(images, name) for name in options.replace or (None,))
    # the settings of a run that is resumed name what was chosen for it
    named = typed.replace or (options.replace and chosen != (replacement_for(images, None),))
    reason = "" if named or chosen == ("mean",) else replacement_note(images, chosen[0])
    run.options = options = replace(options, replace=chosen)
    labels = labels_of(run.model, run.split, predicted=options.predicted, doing="ablate", options=run.run)
    if reason and not run.run.quiet:
        print(reason, file=sys.stderr)  # noqa: T201
    units = units_of(run.model, kinds=options.units)
    _ = run.shares  # fewer images than processes are refused before anything is written
    settings = {"replace": list(chosen), "predicted": options.predicted, "units": list(options.units)}
    with resumable(run, "Ablation of", options.resume, **settings) as (writing, store):
        bench = Bench(run, labels, units, store)
        with autocast(run.model.device, run.run.precision):
            bench = replace(bench, means=bench.measured_means())
            measured = {name: _unit_effects(bench, name) for name in options.replace}
            main = measured[bench.replacement]
            several = len(bench.heads) > 1
            ranked = several and main.importance.is_ranked("head")  # without a ranking there is no order of removal
            removal = _heads_in_order(bench, main) if options.curves and ranked else {}
            by = bench.by(bench.replacement)
            first = torch.arange(images)[:REMOVAL_IMAGES]
            with phase("How similar the outputs of heads are"):
                similar = head_similarity(by, bench.heads, first) if options.pairs and several else None
            pairs, remark = _heads_in_pairs(bench, main.importance, similar) if similar is not None else ((), "")
            known = head_labels(bench) if run.first and bench.heads else {}

        def record() -> rows.AblateRecord:
            assert writing.folder is not None
            saved = options.save or writing.folder.place("pruned")
            cut, small = pruned(bench, main.importance, saved) if options.prune is not None else (None, ())
            parts, undone = inside(bench) if options.patch else ({}, ())
            notes = [note for each in measured.values() for note in each.importance.note.split("; ")]
            notes.append(remark)
            units = tuple(_unit_rows(bench, measured, known))
            row = replace(
                _model_row(bench, measured, removal, units),
                parameters_cut=cut,
                reason=reason,
                undone=undone,
                notes=tuple(dict.fromkeys(note for note in notes if note and note != reason)),
            )
            return rows.AblateRecord(
                ablated=(row,),
                units=units,
                curves=removal.get("curves", ()),
                pairs=pairs,
                pruned=small,
                effects={name: _arrays(each) for name, each in measured.items()},
                **parts,
            )

        return writing.publish(record)


def _unit_effects(bench: Bench, replacement: Replacement) -> UnitEffects:
    """Return the effects of all units on all images, and the first-order estimates, gathered from all processes."""
    by = bench.by(replacement)
    sets = [(unit,) for unit in bench.units]
    effects = by.without(sets, what=f"Removing each unit ({replacement})")
    estimate = first_order(by, bench.units)
    return UnitEffects(
        effects, estimate, summarise(effects, groups=bench.groups(), first=estimate, seed=bench.run.run.seed)
    )


def _unit_rows(bench: Bench, measured: Measured, labels: Mapping[tuple[int, int], str]) -> Iterator[rows.UnitRow]:
    """Yield one row for each unit, with its effects and their tests."""
    main = measured[bench.replacement].importance
    smallest = rows.smallest_effect(main.clean_loss)
    hidden = _hidden_by_mean(bench, measured)
    for index, unit in enumerate(main.units):
        losses = {name: each.importance.loss.estimate(index, main.n, "nats") for name, each in measured.items()}
        tests = {name: finite(each.importance.loss.p_holm[index]) for name, each in measured.items()}
        looks = len(main.of_kind(unit.kind))
        shown = {name: rows.judged(losses[name], tests[name], smallest, looks) for name in measured}
        others = [name for name in measured if name != bench.replacement]
        change, hidden_p = hidden.get(index, (None, None))
        yield rows.UnitRow(
            model=bench.run.model.alias,
            unit=name_of(unit),
            kind=unit.kind,
            layer=unit.layer,
            head=unit.head,
            part=unit.kind if unit.head is None else str(unit.head),
            label=None if unit.head is None else labels.get((unit.layer, unit.head)),
            replace=bench.replacement,
            loss=losses[bench.replacement],
            p=tests[bench.replacement],
            log_odds=None if main.log_odds is None else main.log_odds.estimate(index, main.n, "nats"),
            log_odds_p=None if main.log_odds is None else finite(main.log_odds.p_holm[index]),
            accuracy=main.accuracy.estimate(index, main.n, "points"),
            effect=shown[bench.replacement],
            first_order=None if main.first_order is None else finite(main.first_order[index]),
            other_losses={name: losses[name] for name in others},
            other_p={name: p for name in others if (p := tests[name]) is not None},
            other_effects={name: shown[name] for name in others},
            hidden=change,
            hidden_p=hidden_p,
        )


def _hidden_by_mean(bench: Bench, measured: Measured) -> dict[int, tuple[Estimate, float | None]]:
    """Return the rise of the loss under resampling minus that under mean ablation, of each head, where both were
    measured."""
    heads = [index for index, unit in enumerate(bench.units) if unit.kind == "head"]
    if not heads or not {"mean", "resample"} <= measured.keys():
        return {}
    apart = measured["resample"].effects.delta_loss[heads] - measured["mean"].effects.delta_loss[heads]
    (change,) = mean_changes((apart,), families=["head"] * len(heads), groups=bench.groups(), seed=bench.run.run.seed)
    return {
        index: (change.estimate(row, len(bench.run.split), "nats"), finite(change.p_holm[row]))
        for row, index in enumerate(heads)
    }


def _model_row(
    bench: Bench, measured: Measured, removal: Mapping[str, Any], units: Sequence[rows.UnitRow]
) -> rows.AblatedModelRow:
    main = measured[bench.replacement]
    groups = bench.groups()
    heads = [row for row in units if row.kind == "head"]
    own = main.importance.of_kind("head")
    count = len(heads)
    forwards = {
        str(name): Estimate(each.importance.forward_equivalents, n=each.importance.n, unit="forwards")
        for name, each in measured.items()
    }
    if removal.get("greedy") is not None:
        forwards["greedy"] = Estimate(removal["greedy"], unit="forwards")
    rhos = {
        str(name): spearman(main.importance.loss.mean[own][None], each.importance.loss.mean[own][None]).item()
        for name, each in measured.items()
        if each is not main
    } | {rows.FIRST_ORDER: main.importance.rank_correlation}

    def share(found: list[bool]) -> Estimate:
        return Estimate(sum(found) / count, n=count)

    losses = main.effects.clean_loss.numpy()
    clusters = None if groups is None else groups.numpy()
    dead = [row.effect == "no effect" for row in heads] if len(bench.run.split) > 1 else []
    return rows.AblatedModelRow(
        model=bench.run.model.alias,
        replace=bench.replacement,
        accuracy=accuracy(main.effects.clean_correct, groups=groups),
        cross_entropy=bootstrap_mean(losses, groups=clusters, seed=bench.run.run.seed, unit="nats", least=0.0),
        smallest=rows.smallest_effect(main.importance.clean_loss),
        matter=share([row.matters for row in heads]) if heads else None,
        without_effect=share(dead) if dead else None,
        rank_correlation={name: Estimate(rho, n=count, unit="") for name, rho in rhos.items() if np.isfinite(rho)},
        removable=removal.get("removable"),
        forwards=forwards,
    )


def _arrays(measured: UnitEffects) -> rows.EffectArrays:
    effects = measured.effects
    losses = (each.float().numpy() for each in (effects.delta_loss, effects.clean_loss, measured.first_order))
    delta, clean, estimate = losses
    return rows.EffectArrays(
        np.array([*map(name_of, effects.units)]),
        delta,
        effects.correct.numpy(),
        clean,
        effects.clean_correct.numpy(),
        effects.labels.numpy(),
        estimate,
    )


def _heads_in_order(bench: Bench, measured: UnitEffects) -> dict[str, Any]:
    """Heads removed in the orders of the importance, ranked on one half of the images and measured on the other: the
    points of the curves; removable, the share of heads that can be removed at a cost of one point of accuracy, None
    where the accuracy without any head is not shown to be lower; greedy, the forward passes an image of --greedy."""
    images = torch.arange(len(bench.run.split))
    ranked, tested = (images[0::2], images[1::2]) if len(images) >= 2 * _FEWEST else (images, images)
    tested = tested[:REMOVAL_IMAGES]
    by = bench.by(bench.replacement)
    orders = dict(_orders(bench, measured, ranked))
    spent = None
    if bench.run.options.greedy:
        some = ranked[:REMOVAL_IMAGES]
        chosen = replace(by, images=by.images[some], labels=by.labels[some], groups=None)
        with bench.run.progress("Ranking heads again", len(bench.heads), "heads") as advance:
            every = max(1, len(bench.heads) // RERANKINGS)
            orders["greedy"], spent = greedy_order(chosen, bench.heads, every=every, advance=advance)
    curves = removal_curves(by, orders, points=POINTS, images=tested, what="Removing heads in order")
    points = tuple(
        rows.RemovalRow(
            name,
            len(removed),
            len(removed) / len(bench.heads),
            accuracy(right, groups=bench.groups(tested)),
            float(loss.mean()),
        )
        for name, curve in curves.items()
        for removed, right, loss in zip(curve.sets, curve.correct, curve.loss)
    )
    least = next(iter(curves.values()))
    seed = bench.run.run.seed
    return {
        "curves": points,
        "removable": share_removable(least, groups=bench.groups(tested), seed=seed),
        "greedy": spent,
    }


def _orders(bench: Bench, measured: UnitEffects, ranked: Tensor) -> Iterator[tuple[str, tuple[Unit, ...]]]:
    effects, estimates = (each[:, ranked].mean(1) for each in (measured.ranking, measured.first_order))
    heads = [index for index, unit in enumerate(measured.effects.units) if unit.kind == "head"]

    def order(values: Tensor) -> tuple[Unit, ...]:
        return tuple(measured.effects.units[index] for index in sorted(heads, key=lambda index: float(values[index])))

    yield "least first", order(effects)
    yield "most first", order(effects)[::-1]
    if not estimates[heads].isnan().any():
        yield rows.FIRST_ORDER, order(estimates)
    for number in range(RANDOM_ORDERS):
        generator = torch.Generator().manual_seed(bench.run.run.seed + number)
        yield (
            f"random {number}",
            tuple(bench.heads[at] for at in torch.randperm(len(heads), generator=generator).tolist()),
        )


def _heads_in_pairs(bench: Bench, importance: Importance, similar: Tensor) -> tuple[tuple[rows.HeadPairRow, ...], str]:
    """Return the most important heads removed in pairs, where heads are ranked, and those of the most similar outputs,
    which may each do the work of the other, where there are enough images for a test of these to be significant; and a
    remark. similar: (heads, others), as head_similarity gives it."""
    most = bench.run.options.pairs
    heads = bench.heads
    top = importance.ranking("head")[: max(2, most)] if importance.is_ranked("head") else ()
    above = similar.triu(1).nan_to_num(nan=0.0)
    order = above.flatten().argsort(descending=True, stable=True)[:most].tolist()
    known = [divmod(index, len(heads)) for index in order]
    alike = [
        (heads[one], heads[two])
        for one, two in known
        if float(above[one, two]) >= SIMILAR and len(bench.run.split) >= fewest_images(max(most, 1))
    ]
    wanted = dict.fromkeys(tuple(sorted(pair, key=heads.index)) for pair in (*combinations(top, 2), *alike))
    if not wanted:
        return (), ""
    units = tuple(dict.fromkeys(unit for pair in wanted for unit in pair))
    pairs = [(units.index(first), units.index(second)) for first, second in wanted]
    chosen = torch.arange(len(bench.run.split))[:REMOVAL_IMAGES]
    change, both, alone, note = pairwise(
        bench.by(bench.replacement), units, pairs, chosen, what="Removing pairs of heads"
    )
    places = [*map(heads.index, units)]
    names = [*map(name_of, units)]
    return tuple(
        rows.HeadPairRow(
            names[one],
            names[two],
            f"{names[one]} and {names[two]}",
            "importance" if {units[one], units[two]} <= set(top) else "similarity",
            float(alone[one]),
            float(alone[two]),
            float(both[index]),
            change.estimate(index, len(chosen), "nats"),
            finite(change.p_holm[index]),
            finite(similar[places[one], places[two]]),
        )
        for index, (one, two) in enumerate(pairs)
    ), note
