"""`vitlens train MODEL --check`: whether data, model and recipe can be trained at all, in seconds."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from math import isfinite
from typing import Final

from vitlens.commands.run.conclusion import Conclusion, conclusion_of
from vitlens.commands.run.describe import settings
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import print_data
from vitlens.commands.run.processes import join_run
from vitlens.commands.run.publish import publish
from vitlens.commands.run.requirements import requirements_of
from vitlens.commands.train.measure.start import Start, prepare
from vitlens.commands.train.options import TrainOptions, require_checkable
from vitlens.commands.train.plan import plan_of
from vitlens.commands.train.record import (
    BATCH_LOSS,
    BATCH_LOSSES,
    CHECKS,
    CONSTANT_LOSS,
    FAILED_CHECKS,
    INITIAL_LOSS,
    LAYERS,
    TABLES,
)
from vitlens.training.check.rows import TrainingCheck
from vitlens.training.check.run import check_training
from vitlens.uncertainty import Estimate

FAILED: Final = 1  # exit code
_PRINTED: Final = 60  # layers


def check(options: TrainOptions) -> Conclusion | None:
    """Check, and write the folder of the check; None in all processes but the first of several.

    Raises InputError where model, data and options do not fit together.
    """
    require_checkable(options)
    plan = plan_of(options)
    plan.tuning.require_learned(plan.model)
    requirements = requirements_of(options.run.at_least, options.run.at_most)
    processes, run = join_run(options.run)
    if not processes.is_first:
        return None
    start = prepare(plan, run, code_files=options.model_file, processes=processes.count)
    print_data(start.train, run)
    recipe = {**start.recipe.numbers(), "source": start.recipe.source}
    with RunFolder.create(
        "train",
        name_parts=(start.model.alias, plan.data, "check"),
        title=f"Check of training {start.model.alias} on {start.train.title or start.train.name}",
        out=run.out,
        overwrite=run.overwrite,
        config={
            **settings(replace(options, run=run), run, models=[start.model], split=start.train),
            "plan": asdict(plan),
            "recipe": recipe,
        },
        formats=run.formats,
    ) as folder:
        found = check_training(
            start.model,
            start.train,
            start.test,
            recipe=start.recipe,
            seed=run.seed,
            train_last=plan.tuning.trained,
            fresh=start.fresh,
        )
        _write(folder, start, found)
        path = publish(folder)
    ended = conclusion_of(path, requirements)
    holds = ended.holds and not found.failed
    lines = () if run.quiet and holds else (*_norms(found), *ended.lines, *_advice(found))
    return replace(ended, lines=lines, holds=holds, code=FAILED if found.failed else ended.code)


def _norms(found: TrainingCheck) -> Iterator[str]:
    """The norms of every layer as they are printed; of many layers the report alone has them."""
    if len(found.layers) > _PRINTED:
        yield f"norms of {len(found.layers)} layers: see the report"
        return
    width = max((len(row.name) for row in found.layers), default=0)
    for row in found.layers:
        output, gradient = (_short(value) for value in (row.activation, row.gradient))
        yield f"{row.name:<{width}}  output {output:>8}  gradient {gradient:>8}  weights {_short(row.weight):>8}"


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.2g}"


def _advice(found: TrainingCheck) -> Iterator[str]:
    """What to try for each failed check."""
    yield from (f"{row.name}: {row.advice}" for row in found.failed)


def _write(folder: RunFolder, start: Start, found: TrainingCheck) -> None:
    """Write the checks, the norms by layer, and the losses on the one batch."""
    for table in TABLES:
        folder.write(table, [])
    folder.write(CHECKS, found.checks)
    folder.write(LAYERS, found.layers)
    folder.write(BATCH_LOSSES, found.losses)
    alias = start.model.alias
    folder.metric(FAILED_CHECKS(model=alias), Estimate(float(len(found.failed)), n=len(found.checks), unit="checks"))
    if found.constant is not None:
        folder.metric(CONSTANT_LOSS(model=alias), Estimate(found.constant, unit="nats"))
    for metric, name in ((INITIAL_LOSS, "initial loss"), (BATCH_LOSS, "one batch")):
        value = next(row.value for row in found.checks if row.name == name)
        if value is not None and isfinite(value):
            folder.metric(metric(model=alias), Estimate(value, n=found.images, unit="nats"))
