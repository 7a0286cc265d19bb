"""Exact ablation of every head, MLP and block of a model, and the analyses based on it."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vitlens.analysis.ablation.ablate import units_of
from vitlens.analysis.ablation.adaptive import Adaptive, most_important
from vitlens.analysis.ablation.pairs import Redundancy, Synergy
from vitlens.analysis.ablation.replacements import replacement_for, replacement_note
from vitlens.commands.ablate.measure.effects import UnitEffects, mean_outputs, unit_effects, write_effects
from vitlens.commands.ablate.measure.heads import write_heads
from vitlens.commands.ablate.measure.inside import write_inside
from vitlens.commands.ablate.measure.prune import write_pruned
from vitlens.commands.ablate.measure.removal import (
    RemovalCurves,
    head_redundancy,
    head_synergy,
    heads_removed_in_order,
    important_heads,
    write_curves,
    write_pairs,
)
from vitlens.commands.ablate.measure.work import AblationRun, finite
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.record import ELIMINATION, FORWARDS, NOTES
from vitlens.commands.ablate.record.rows import AblateNoteRow, EliminationRow
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.digests import model_digest
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.commands.scaffold.progress.store import PROGRESS, ProgressStore
from vitlens.commands.scaffold.publish import publish
from vitlens.commands.scaffold.resume import require_same
from vitlens.commands.scaffold.targets import labels_of
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.processes import Processes, share_of
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class AblationResults:
    """effects: by replacement, empty with --top; the others: None where they were not measured."""

    effects: Mapping[Replacement, UnitEffects]
    removal: RemovalCurves | None = None
    redundancy: Redundancy | None = None
    pairs: Synergy | None = None
    elimination: Adaptive | None = None

    def notes(self) -> Iterator[str]:
        """The remarks of the measurements for the report."""
        yield from (effects.importance.note for effects in self.effects.values())
        yield from (part.note for part in (self.pairs, self.elimination) if part is not None)


def measure(options: AblateOptions) -> Path | None:
    """Remove every head of a model in turn, exactly, and write the report; returns its path.

    Of several processes each takes its share of the images; all but the first return None. Raises DataError for images
    without labels, InputError for too few images, and for another model or other data than those of a run that
    is resumed.
    """
    processes, run = join_run(options.run)
    with processes.main_process_first():
        (model,) = load_models((options.model,), command="ablate", model_options=options.model_options, options=run)
        split = load_split(model, options=run, data=options.data, images=options.images)
    options, reason = _with_replacements(options, len(split))
    labels = labels_of(model, split, predicted=options.predicted, doing="ablate", options=run)
    if reason and not run.quiet:
        print(reason, file=sys.stderr)  # noqa: T201
    units = units_of(model, kinds=options.units)
    share_of(split, processes)
    identity = _identity(model, split, options, processes, run)
    require_same(options.resume, "ablate", identity)
    with processes.main_process_first():
        folder = _folder(options, run, model, split, identity) if processes.is_first else None
    place = options.resume or run.out if folder is None else folder.path
    store = ProgressStore(None if place is None else place / PROGRESS, processes.index)
    ablation = AblationRun(model, split, labels, units, options, processes, run, store)
    if folder is None:
        _results(ablation)
        return None
    with folder:
        _write(folder, ablation, _results(ablation), reason)
        report = publish(folder)
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


def _identity(
    model: Model, split: Split, options: AblateOptions, processes: Processes, run: RunOptions
) -> dict[str, object]:
    """What must be equal when a run is resumed; the images themselves are compared batch by batch."""
    return {
        "model": model_digest(model),
        "images": len(split),
        "replace": list(options.replace),
        "predicted": options.predicted,
        "units": list(options.units),
        "seed": run.seed,
        "batch_size": run.batch_size,
        "precision": run.precision,
        "processes": processes.count,
    }


def _folder(
    options: AblateOptions, run: RunOptions, model: Model, split: Split, identity: Mapping[str, object]
) -> RunFolder:
    """The run's folder: a new one, or that of the resumed run."""
    config = settings(options, run, models=(model,), split=split, identity=dict(identity))
    if options.resume is not None:
        return RunFolder.reopen(options.resume, needs={"data": None}, config=config)
    return RunFolder.create(
        "ablate",
        name_parts=(model.alias, split.name),
        title=f"Ablation of {model.alias} on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=config,
        formats=run.formats,
    )


def _results(ablation: AblationRun) -> AblationResults:
    """The results to which all processes contribute."""
    options = ablation.options
    with autocast(ablation.model.device, ablation.run.precision):
        if options.top is not None:
            return AblationResults({}, elimination=_top_heads(ablation))
        means = mean_outputs(ablation)
        effects = {name: unit_effects(ablation, name, means) for name in options.replace}
        main = effects[ablation.replacement]
        several = len(ablation.heads) > 1
        ranked = several and main.importance.is_ranked("head")  # without a ranking there is no order of removal
        removal = heads_removed_in_order(ablation, main, means) if options.curves and ranked else None
        redundancy = head_redundancy(ablation) if options.pairs and several else None
        pairs = head_synergy(ablation, main.importance, redundancy, means) if redundancy is not None else None
    return AblationResults(effects, removal, redundancy, pairs)


def _write(folder: RunFolder, ablation: AblationRun, results: AblationResults, reason: str) -> None:
    """Write all results; activation patching and pruning are measured here, by the first process alone."""
    alias = ablation.model.alias
    notes = [AblateNoteRow(reason, "replacement")] if reason else []
    measured = dict.fromkeys(note for note in results.notes() if note and note != reason)
    folder.write(NOTES, [*notes, *(AblateNoteRow(note, "measurement") for note in measured)])
    write_effects(folder, ablation, results.effects)
    write_curves(folder, alias, results.removal)
    main = results.effects.get(ablation.replacement)
    important = () if main is None else important_heads(main.importance, ablation.options.pairs)
    write_pairs(folder, results.redundancy, results.pairs, important)
    with autocast(ablation.model.device, ablation.run.precision):
        write_heads(folder, ablation, results.effects)
    _write_top(folder, alias, results.elimination)
    write_inside(folder, ablation)
    write_pruned(folder, ablation, None if main is None else main.importance)


def _top_heads(ablation: AblationRun) -> Adaptive:
    """The most important heads by sequential elimination; every process does all of the work, as it is little."""
    (batch,) = ablation.split.batches(len(ablation.split), device="cpu")
    total = len(ablation.split) * len(ablation.heads)
    with progress("Finding the most important heads", total, unit="removals", quiet=ablation.run.quiet) as advance:
        return most_important(
            ablation.model, batch.images, ablation.labels, k=ablation.options.top or 1, replace=ablation.replacement,
            units=ablation.heads, batch_size=ablation.run.batch_size, seed=ablation.run.seed, advance=advance,
        )  # fmt: skip


def _write_top(folder: RunFolder, alias: str, elimination: Adaptive | None) -> None:
    """Write every head as far as it was measured, and the cost beside exact measurement; no rows without --top."""
    folder.write(ELIMINATION, [] if elimination is None else _elimination_rows(elimination))
    if elimination is not None:
        for what, cost in (("adaptive", elimination.forward_equivalents), ("exact", elimination.exact_cost)):
            folder.metric(FORWARDS(model=alias, what=what), Estimate(cost, n=elimination.n, unit="forwards"))


def _elimination_rows(elimination: Adaptive) -> Iterator[EliminationRow]:
    for rank, index in enumerate(elimination.ranking):
        unit = elimination.units[index]
        yield EliminationRow(
            rank=rank + 1,
            unit=unit.name,
            layer=unit.layer,
            head=unit.head,
            delta_loss=float(elimination.mean[index]),
            low=finite(elimination.low[index]),
            high=finite(elimination.high[index]),
            images=int(elimination.images[index]),
            settled=bool(elimination.settled[index]),
            top=rank < elimination.k,
        )
