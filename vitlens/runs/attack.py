"""`vitlens attack`: how models break, how soon, and what changes inside them while they do."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.expected import say_expected
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.resume import require_same
from vitlens.commands.scaffold.targets import labels_of
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.processes import share_of
from vitlens.runs.attack_begin import identity_of, require_able, require_attacks
from vitlens.runs.attack_checks import checked
from vitlens.runs.attack_choices import AttackChoices
from vitlens.runs.attack_corruptions import baseline_of, keep_corruptions, on_all_corruptions
from vitlens.runs.attack_draw import draw
from vitlens.runs.attack_inside import looked_into
from vitlens.runs.attack_keep import (
    keep_checks,
    keep_classes,
    keep_curves,
    keep_pairs,
    keep_sample,
    keep_transfer,
)
from vitlens.runs.attack_keep_inside import keep_inside
from vitlens.runs.attack_progress import FOLDER, Store
from vitlens.runs.attack_sample import sampled, transferred
from vitlens.runs.attack_sweep import Swept, Work, swept
from vitlens.runs.attack_tell import tell
from vitlens.runs.planned import attack_parts
from vitlens.runs.report import publish

__all__ = ["attack", "draw", "tell"]


def attack(
    models: Sequence[str],
    *,
    data: str | None = None,
    images: Sequence[str] | None = None,
    choices: AttackChoices | None = None,
    resume: Path | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path | None:
    """Attack models on the same images and write the report; returns its path.

    All models are attacked at the size of the images as the first takes them. choices: which attacks, how strong, and
    what is looked at beside them; resume: the folder of a run of the same models, data and choices that was stopped. Of
    several processes each takes its share of the images; all but the first return None. Raises InputError (or one of
    its kind) before anything is written.
    """
    choices = choices or AttackChoices()
    require_attacks(choices)
    processes, options = join_run(options)
    with processes.first_ahead():
        loaded = load_models(models, command="attack", model_options=model_options, options=options)
        split = load_split(loaded[0], options=options, data=data, images=images, beside=loaded[1:])
    require_able(loaded, split, choices)
    labels = [labels_of(model, split, predicted=choices.predicted, doing="attack", options=options) for model in loaded]
    baseline = baseline_of(loaded, choices.baseline)
    share_of(split, processes)
    identity = identity_of(loaded, split, choices, processes, options)
    require_same(resume, "attack", identity)
    parts = tuple(attack_parts(choices, len(split)))
    say_expected([(model, split, parts) for model in loaded], options, processes=processes.count)
    with processes.first_ahead():
        folder = _folder(resume, loaded, split, choices, identity, options) if processes.is_first else None
    place = resume or options.out if folder is None else folder.path
    store = Store(None if place is None else place / FOLDER, processes.index)
    works = [Work(model, split, own, choices, processes, options, store) for model, own in zip(loaded, labels)]
    if folder is None:
        for work in works:
            swept(work)
        _corruptions(None, works, baseline)
        return None
    with folder:
        found = [swept(work) for work in works]
        _corruptions(folder, works, baseline)
        _keep(folder, works, found)
        written = publish(folder, draw, tell)
        store.forget()
        return written


def _keep(folder: RunFolder, works: Sequence[Work], found: Sequence[Sequence[Swept]]) -> None:
    """All that the first process finds out and writes once every image has been attacked."""
    choices, seed = works[0].choices, works[0].options.seed
    keep_curves(folder, works, found)
    keep_pairs(folder, found, seed=seed)
    keep_checks(folder, works, [checked(work, one) for work, one in zip(works, found)])
    sample = sampled(works, found)
    keep_sample(folder, sample, works)
    keep_classes(folder, works, sample, found)
    if choices.transfer and len(works) > 1:
        keep_transfer(folder, transferred(works, sample), seed=seed)
    if choices.inside:
        inside = [looked_into(work, sample, index) for index, work in enumerate(works)]
        keep_inside(folder, works, sample, inside)


def _corruptions(folder: RunFolder | None, works: Sequence[Work], baseline: str) -> None:
    """Everyday damage, where it was asked for and images have labels; folder: None in all processes but the first."""
    if not works[0].choices.corruptions or works[0].choices.predicted:
        return
    found = on_all_corruptions(works)
    if folder is not None:
        keep_corruptions(folder, found, baseline=baseline, seed=works[0].options.seed)


def _folder(
    resume: Path | None,
    models: Sequence[Model],
    split: Split,
    choices: AttackChoices,
    identity: Mapping[str, object],
    options: RunOptions,
) -> RunFolder:
    """The run's folder: a new one, or the one to go on in."""
    config = {
        **described(options, models=models, split=split, choices=asdict(choices)),
        "identity": dict(identity),
    }
    if resume is not None:
        return RunFolder.reopen(resume, needs={"data": None}, config=config)
    aliases = [model.alias for model in models]
    return RunFolder.create(
        "attack",
        name_parts=(*aliases, split.name),
        title=f"How {' and '.join(aliases)} break{'s' if len(aliases) == 1 else ''}, on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=config,
        formats=options.formats,
    )
