"""`vitlens ablate`: what every head, MLP and block is good for, exactly, and what follows from it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from dataclasses import replace as changed
from pathlib import Path

from vitlens.analysis.ablation.ablate import units_of
from vitlens.analysis.ablation.replacements import replacement_for, replacement_note
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.processes import Processes, share_of
from vitlens.runs.ablate_choices import AblateChoices
from vitlens.runs.ablate_draw import draw
from vitlens.runs.ablate_inside import keep_inside
from vitlens.runs.ablate_keep import keep
from vitlens.runs.ablate_look import look
from vitlens.runs.ablate_progress import FOLDER, Store
from vitlens.runs.ablate_prune import keep_pruned
from vitlens.runs.ablate_tell import tell
from vitlens.runs.ablate_work import Work
from vitlens.runs.describe import described
from vitlens.runs.digests import model_digest
from vitlens.runs.expected import say_expected
from vitlens.runs.folder import RunFolder
from vitlens.runs.load import load_models, load_split
from vitlens.runs.options import ModelOptions, RunOptions
from vitlens.runs.planned import ablate_parts
from vitlens.runs.processes import join_run
from vitlens.runs.report import publish
from vitlens.runs.resume import require_same
from vitlens.runs.targets import labels_of

__all__ = ["ablate", "draw", "tell"]


def ablate(
    model: str,
    *,
    data: str | None = None,
    images: Sequence[str] | None = None,
    choices: AblateChoices | None = None,
    resume: Path | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path | None:
    """Remove every head of a model in turn, exactly, and write the report; returns its path.

    images, data: labelled, or with choices.predicted any; choices: what stands in a head's place, and what is looked at
    beyond the importance; resume: the folder of a run of the same model, data and choices that was stopped. Of several
    processes each takes its share of the images; all but the first return None. Raises DataError for images without
    labels, InputError for too few images, and for another model or other data than those the run began with.
    """
    choices = choices or AblateChoices()
    processes, options = join_run(options)
    with processes.first_ahead():
        (loaded,) = load_models((model,), command="ablate", model_options=model_options, options=options)
        split = load_split(loaded, options=options, data=data, images=images)
    choices = _settled(choices, len(split))
    labels = labels_of(loaded, split, predicted=choices.predicted, doing="ablate", options=options)
    if choices.because and not options.quiet:
        print(choices.because, file=sys.stderr)  # noqa: T201
    units = units_of(loaded, kinds=choices.units)
    share_of(split, processes)
    identity = _identity(loaded, split, choices, processes, options)
    require_same(resume, "ablate", identity)
    parts = tuple(ablate_parts(units, len(split), choices))
    say_expected([(loaded, split, parts)], options, processes=processes.count)
    with processes.first_ahead():
        folder = _folder(resume, loaded, split, choices, identity, options) if processes.is_first else None
    place = resume or options.out if folder is None else folder.path
    store = Store(None if place is None else place / FOLDER, processes.index)
    work = Work(loaded, split, labels, units, choices, processes, options, store)
    if folder is None:
        look(work)
        return None
    with folder:
        found = look(work)
        keep(folder, work, found)
        if choices.patch and choices.top is None:
            keep_inside(folder, work)
        if choices.prune is not None:
            keep_pruned(folder, work, found)
        written = publish(folder, draw, tell)
        store.forget()
        return written


def _settled(choices: AblateChoices, images: int) -> AblateChoices:
    """With replacements that so many images allow. Raises InputError for one that was asked for on too few."""
    if choices.replace:
        return changed(choices, replace=tuple(replacement_for(images, name) for name in choices.replace))
    taken = replacement_for(images, None)
    return changed(choices, replace=(taken,), because="" if taken == "mean" else replacement_note(images, taken))


def _identity(
    model: Model, split: Split, choices: AblateChoices, processes: Processes, options: RunOptions
) -> dict[str, object]:
    """What must be the same for a stopped run to go on; the images themselves are compared batch by batch."""
    return {
        "model": model_digest(model),
        "images": len(split),
        "replace": list(choices.replace),
        "predicted": choices.predicted,
        "units": list(choices.units),
        "seed": options.seed,
        "batch_size": options.batch_size,
        "precision": options.precision,
        "processes": processes.count,
    }


def _folder(
    resume: Path | None,
    model: Model,
    split: Split,
    choices: AblateChoices,
    identity: Mapping[str, object],
    options: RunOptions,
) -> RunFolder:
    """The run's folder: a new one, or the one to go on in."""
    config = {
        **described(options, models=(model,), split=split, choices=asdict(choices)),
        "identity": dict(identity),
    }
    if resume is not None:
        return RunFolder.reopen(resume, needs={"data": None}, config=config)
    return RunFolder.create(
        "ablate",
        name_parts=(model.alias, split.name),
        title=f"What the heads of {model.alias} are good for, on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=config,
        formats=options.formats,
    )
