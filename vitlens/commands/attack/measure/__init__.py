"""Accuracy of models under attack over epsilon, self-checked, and what changes inside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vitlens.analysis.failures.common_corruptions import Corrupted
from vitlens.commands.attack.measure.checks import write_checks
from vitlens.commands.attack.measure.corruptions import baseline_of, on_corruptions, write_corruptions
from vitlens.commands.attack.measure.curves import write_classes, write_curves, write_pairs
from vitlens.commands.attack.measure.expected import attack_parts
from vitlens.commands.attack.measure.inside import write_inside
from vitlens.commands.attack.measure.sample import attack_sample, write_sample, write_transfer
from vitlens.commands.attack.measure.start import identity_of, require_able
from vitlens.commands.attack.measure.sweep import ModelAttack, SweptAttack, sweep_all
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.scaffold.describe import settings
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
from vitlens.models.model import Model
from vitlens.processes import share_of

__all__ = ["measure"]


def measure(options: AttackOptions) -> Path | None:
    """Attack models on the same images and write the report; returns its path.

    All models are attacked at the size of the images as the first takes them. Of several processes each takes its share
    of the images; all but the first return None. Raises InputError (or one of its kind) before anything is written.
    """
    processes, run = join_run(options.run)
    with processes.main_process_first():
        models = load_models(options.models, command="attack", model_options=options.model_options, options=run)
        split = load_split(models[0], options=run, data=options.data, images=options.images, beside=models[1:])
    require_able(models, split, options)
    labels = [labels_of(model, split, predicted=options.predicted, doing="attack", options=run) for model in models]
    baseline = baseline_of(models, options.baseline)
    share_of(split, processes)
    identity = identity_of(models, split, options, processes, run)
    require_same(options.resume, "attack", identity)
    parts = tuple(attack_parts(options, len(split)))
    say_expected([(model, split, parts) for model in models], run, processes=processes.count)
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
    """All that the first process measures and writes once every image has been attacked."""
    seed = works[0].run.seed
    write_corruptions(folder, corrupted, baseline=baseline, seed=seed)
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
    """The run's folder: a new one, or the one to go on in."""
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
