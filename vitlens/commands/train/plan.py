"""The settings that decide the result of a training, from the options or from a resumed run's folder; torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from vitlens.commands.run.options import RunOptions, begun_with
from vitlens.commands.train.options import TeacherOptions, TrainOptions, Tuning
from vitlens.errors import InputError
from vitlens.files import CONFIG, read_run
from vitlens.names import Compile, RecipeName
from vitlens.preprocessing import Side
from vitlens.schema import Text, read_as

DEFAULT_DATA: Final = "digits"
_HINT: Final = "begin anew without --resume"


@dataclass(frozen=True)
class TrainPlan:
    """The settings that decide the result besides the run options; a resumed run continues with its own.

    recipe, shape: changes to the preset's; image_size: (height, width) in pixels, None for the preset's;
    keep_every: epochs between copies of the weights in kept/, None for none; named: a recipe for any model,
    None for the preset's own; compiling, recompute: see training.loop.fit; tuning: which part of a trained model is
    fine-tuned; teaching: the teacher of a distillation.
    """

    model: Text
    data: Text = DEFAULT_DATA
    recipe: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)
    image_size: tuple[Side, Side] | None = None
    keep_every: int | None = None
    named: RecipeName | None = None
    compiling: Compile = "auto"
    recompute: bool = False
    tuning: Tuning = field(default_factory=Tuning)
    teaching: TeacherOptions = field(default_factory=TeacherOptions)


def plan_of(options: TrainOptions) -> TrainPlan:
    """The plan of the options. Raises InputError without a model."""
    if options.model is None:
        raise InputError("expected a preset to train, found none; e.g. vitlens train vit-micro; see vitlens models")
    return TrainPlan(
        model=options.model,
        data=options.data or DEFAULT_DATA,
        recipe=options.recipe.numbers,
        shape=options.shape.sides,
        image_size=options.shape.image_size,
        keep_every=options.keep_every,
        named=options.recipe.named,
        compiling=options.compiling,
        recompute=options.recompute,
        tuning=options.tuning,
        teaching=options.teaching,
    )


def plan_of_folder(config: Mapping[str, object], source: str) -> TrainPlan:
    """The plan in a run's config.json. Raises InputError for a config.json of another form."""
    return read_as(TrainPlan, config.get("plan"), source=source, hint=_HINT)


def resumed(resume: Path, options: TrainOptions) -> tuple[TrainPlan, RunOptions]:
    """The plan and the run options that a run began with. Raises InputError when the options name another."""
    if options.run.out is not None:
        raise InputError(
            f"expected --resume {resume} or --out {options.run.out}, found both; a resumed run keeps its folder"
        )
    record = read_run(resume)
    if record.command != "train":
        raise InputError(f"expected the folder of vitlens train to resume, found one of vitlens {record.command}")
    source = str(resume / CONFIG)
    plan = plan_of_folder(record.config, source)
    requested = plan_of(replace(options, model=options.model or plan.model, data=options.data or plan.data))
    unset = TrainPlan(plan.model, plan.data)
    for name in (entry.name for entry in fields(TrainPlan)):
        value, begun = getattr(requested, name), getattr(plan, name)
        if value not in (begun, getattr(unset, name)):
            raise InputError(f"expected to resume {resume} with its {name}, {begun}, found {value}; leave it out")
    return plan, begun_with(record.config, options.run, source, hint=_HINT)
