"""What a model loses without each head, MLP and block, exactly, and what follows from it."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vitlens.analysis.ablation.ablate import units_of
from vitlens.analysis.ablation.adaptive import Adaptive
from vitlens.analysis.ablation.pairs import Redundancy, Synergy
from vitlens.analysis.ablation.replacements import replacement_for, replacement_note
from vitlens.commands.ablate.measure.effects import UnitEffects, mean_outputs, unit_effects, write_effects
from vitlens.commands.ablate.measure.elimination import top_heads, write_top
from vitlens.commands.ablate.measure.expected import ablate_parts
from vitlens.commands.ablate.measure.inside import write_inside
from vitlens.commands.ablate.measure.pairs import head_redundancy, head_synergy, write_pairs
from vitlens.commands.ablate.measure.prune import write_pruned
from vitlens.commands.ablate.measure.removal import RemovalCurves, heads_removed_in_order, write_curves
from vitlens.commands.ablate.measure.work import AblationRun
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.record import NOTES
from vitlens.commands.ablate.record.rows import AblateNoteRow
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.digests import model_digest
from vitlens.commands.scaffold.expected import say_expected
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.progress_store import PROGRESS, ProgressStore
from vitlens.commands.scaffold.publish import publish
from vitlens.commands.scaffold.resume import require_same
from vitlens.commands.scaffold.targets import labels_of
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.processes import Processes, share_of


@dataclass(frozen=True)
class AblationResults:
    """What was measured. effects: by replacement, empty with --top; the others: None where not asked for or not
    defined."""

    effects: Mapping[Replacement, UnitEffects]
    removal: RemovalCurves | None = None
    redundancy: Redundancy | None = None
    pairs: Synergy | None = None
    elimination: Adaptive | None = None

    def notes(self) -> Iterator[str]:
        """What the parts say that a report must hold."""
        yield from (one.importance.note for one in self.effects.values())
        yield from (part.note for part in (self.pairs, self.elimination) if part is not None)


def measure(options: AblateOptions) -> Path | None:
    """Remove every head of a model in turn, exactly, and write the report; returns its path.

    Of several processes each takes its share of the images; all but the first return None. Raises DataError for images
    without labels, InputError for too few images, and for another model or other data than those a run to be resumed
    began with.
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
    say_expected([(model, split, tuple(ablate_parts(units, len(split), options)))], run, processes=processes.count)
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
    """The options with replacements that so many images allow, and why another one than the mean was taken, or "".

    Raises InputError for a replacement that was asked for with too few images.
    """
    if options.replace:
        return replace(options, replace=tuple(replacement_for(images, name) for name in options.replace)), ""
    taken = replacement_for(images, None)
    return replace(options, replace=(taken,)), "" if taken == "mean" else replacement_note(images, taken)


def _identity(
    model: Model, split: Split, options: AblateOptions, processes: Processes, run: RunOptions
) -> dict[str, object]:
    """What must be the same for a stopped run to go on; the images themselves are compared batch by batch."""
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
    """The run's folder: a new one, or the one to go on in."""
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
    """Everything that was asked for, but for what one process measures alone."""
    options = ablation.options
    with autocast(ablation.model.device, ablation.run.precision):
        if options.top is not None:
            return AblationResults({}, elimination=top_heads(ablation))
        means = mean_outputs(ablation)
        effects = {name: unit_effects(ablation, name, means) for name in options.replace}
        main = effects[ablation.replacement]
        several = len(ablation.heads) > 1
        ranked = several and main.importance.is_ranked("head")  # else there is no order to remove heads in
        removal = heads_removed_in_order(ablation, main, means) if options.curves and ranked else None
        redundancy = head_redundancy(ablation) if options.pairs and several else None
        pairs = head_synergy(ablation, main.importance, means) if options.pairs and ranked else None
    return AblationResults(effects, removal, redundancy, pairs)


def _write(folder: RunFolder, ablation: AblationRun, results: AblationResults, reason: str) -> None:
    """Write all results; activation patching and pruning are measured here, by the first process alone."""
    alias = ablation.model.alias
    notes = [AblateNoteRow(reason, "replacement")] if reason else []
    said = dict.fromkeys(note for note in results.notes() if note and note != reason)
    folder.write(NOTES, [*notes, *(AblateNoteRow(note, "measurement") for note in said)])
    write_effects(folder, ablation, results.effects)
    write_curves(folder, alias, results.removal)
    write_pairs(folder, results.redundancy, results.pairs)
    write_top(folder, alias, results.elimination)
    write_inside(folder, ablation)
    if results.effects:
        write_pruned(folder, ablation, results.effects[ablation.replacement].importance)
    else:
        write_pruned(folder, ablation, None)
