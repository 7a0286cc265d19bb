"""Accuracy of models under attack over epsilon, with self-checks, and the changes inside the models."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from vitlens.analysis.failures.common_corruptions import Corrupted
from vitlens.attacks.algorithm import Setting, algorithm_of
from vitlens.attacks.registry import members_of
from vitlens.commands.attack.measure.checks import write_checks
from vitlens.commands.attack.measure.corruptions import baseline_of, on_corruptions, write_corruptions
from vitlens.commands.attack.measure.curves import write_classes, write_curves, write_pairs
from vitlens.commands.attack.measure.inside import write_inside
from vitlens.commands.attack.measure.sample import attack_sample, write_sample, write_transfer
from vitlens.commands.attack.measure.sweep import ModelAttack, SweptAttack, sweep_all
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.digests import model_digest
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.progress.store import PROGRESS, ProgressStore
from vitlens.commands.scaffold.publish import publish
from vitlens.commands.scaffold.resume import require_same
from vitlens.commands.scaffold.targets import labels_of
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.processes import Processes, share_of

__all__ = ["measure"]


def measure(options: AttackOptions) -> Path | None:
    """Attack models on the same images and write the report; returns its path.

    All models are attacked at the input size of the first model. Of several processes each takes its share
    of the images; all but the first return None. Raises InputError (or one of its kind) before anything is written.
    """
    processes, run = join_run(options.run)
    with processes.main_process_first():
        models = load_models(options.models, command="attack", model_options=options.model_options, options=run)
        split = load_split(models[0], options=run, data=options.data, images=options.images, beside=models[1:])
    return measured(options, models, split, processes=processes, run=run)


def measured(
    options: AttackOptions, models: Sequence[Model], split: Split, *, processes: Processes, run: RunOptions
) -> Path | None:
    """Attack images that are loaded already; returns the report's path, None in all processes but the first.

    run: the run options as they hold in this process, with `processes` as join_run gives them.
    """
    _require_attackable(models, split, options)
    labels = [labels_of(model, split, predicted=options.predicted, doing="attack", options=run) for model in models]
    baseline = baseline_of(models, options.baseline)
    share_of(split, processes)
    identity = _identity(models, split, options, processes, run)
    require_same(options.resume, "attack", identity)
    with processes.main_process_first():
        folder = _folder(options, run, models, split, identity) if processes.is_first else None
    place = options.resume or run.out if folder is None else folder.path
    store = ProgressStore(None if place is None else place / PROGRESS, processes.index)
    works = [ModelAttack(model, split, own, options, run, processes, store) for model, own in zip(models, labels)]
    if folder is None:
        for work in works:
            sweep_all(work)
        on_corruptions(works)
        return None
    with folder:
        swept = [sweep_all(work) for work in works]
        _write(folder, works, swept, on_corruptions(works), baseline=baseline)
        report = publish(folder)
        store.forget()
        return report


def _write(
    folder: RunFolder,
    works: Sequence[ModelAttack],
    swept: Sequence[Sequence[SweptAttack]],
    corrupted: Sequence[Corrupted],
    *,
    baseline: str,
) -> None:
    """The measurements and tables of the first process, after all images have been attacked."""
    seed = works[0].run.seed
    clean = [of_model[0].outcome.clean for of_model in swept]
    write_corruptions(folder, corrupted, clean, baseline=baseline, seed=seed)
    write_curves(folder, works, swept)
    write_pairs(folder, swept, seed=seed)
    write_checks(folder, works, swept)
    sample = attack_sample(works, swept)
    write_sample(folder, sample, works)
    write_classes(folder, works, swept, attack=sample.attack, epsilon=sample.epsilon)
    write_transfer(folder, works, sample)
    write_inside(folder, works, sample)


def _folder(
    options: AttackOptions, run: RunOptions, models: Sequence[Model], split: Split, identity: Mapping[str, object]
) -> RunFolder:
    """The run's folder: a new one, or that of the resumed run."""
    config = settings(options, run, models=models, split=split, identity=dict(identity))
    if options.resume is not None:
        return RunFolder.reopen(options.resume, needs={"data": None}, config=config)
    aliases = [model.alias for model in models]
    return RunFolder.create(
        "attack",
        name_parts=(*aliases, split.name),
        title=f"Adversarial robustness of {' and '.join(aliases)} on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=config,
        formats=run.formats,
    )


def _require_attackable(models: Sequence[Model], split: Split, options: AttackOptions) -> None:
    """Raise UnsupportedError for a model with too few classes for an attack, InputError for too large a patch."""
    for model, name in product(models, options.attacks):
        for member in members_of(name):
            setting = Setting(1, len(model.classes), split.size, side=options.patch_side)
            algorithm_of(member, setting)


def _identity(
    models: Sequence[Model], split: Split, options: AttackOptions, processes: Processes, run: RunOptions
) -> dict[str, object]:
    """What must be equal when a run is resumed; the images themselves are compared part by part."""
    order = -1 if options.downwards else 1  # in the order in which epsilons are tried
    return {
        "models": [model_digest(model) for model in models],
        "aliases": [model.alias for model in models],
        "images": len(split),
        "attacks": list(options.attacks),
        "epsilons": list(options.linf)[::order],
        "single_epsilons": dict(options.single_epsilons or {}),
        "epsilons_l2": list(options.l2)[::order],
        "steps": dict(options.steps) if isinstance(options.steps, Mapping) else options.steps,
        "restarts": options.restarts,
        "patch": [options.patch_side, options.patch_anywhere],
        "seed": run.seed,
        "batch_size": run.batch_size,
        "precision": run.precision,
        "processes": processes.count,
    }
