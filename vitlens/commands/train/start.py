"""The start of a training: the settings that decide its result, a preset with random weights or a trained model with a
head for the data's classes, and the teacher of a distillation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from vitlens.analysis.answers.classes import match_classes
from vitlens.commands.run.options import RunOptions, begun_with
from vitlens.commands.run.progress import progress
from vitlens.commands.train.options import TeacherOptions, TrainOptions, Tuning
from vitlens.data.catalogue import load_data
from vitlens.data.split import Split
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.files import CONFIG, read_run
from vitlens.models.assembly import Overrides
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.new_head import for_classes
from vitlens.models.support import require_supported
from vitlens.models.swin_config import SWIN_PRESETS
from vitlens.models.vit_config import VIT_PRESETS
from vitlens.names import PRESETS, Compile, Part, RecipeName
from vitlens.preprocessing import Preprocessing, Side
from vitlens.training.distill import (
    TEMPERATURE,
    WEIGHTS,
    CachedTeacher,
    Distillation,
    DistillationObjective,
    Student,
    Teacher,
    cacheable_views,
    has_distillation_token,
)
from vitlens.training.finetune import require_last, require_learned
from vitlens.training.head import require_cacheable
from vitlens.training.recipe import FINE_TUNING, FROZEN, Recipe, fitted, override, recipe_for
from vitlens.training.speed import choose
from vitlens.typed import Text, read_as

_PARTS: Final[tuple[Part, ...]] = ("train", "test")
_HINT: Final = "begin anew without --resume"
DEFAULT_DATA: Final = "digits"
OF_DIGITS: Final = ("digits", "mnist", "svhn")  # data sets of digits, which mirroring would change


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
        options.model, options.data or DEFAULT_DATA, options.recipe.numbers, options.shape.sides,
        options.shape.image_size, options.keep_every, options.recipe.named, options.compiling, options.recompute,
        options.tuning, options.teaching,
    )  # fmt: skip


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
    plan = read_as(TrainPlan, record.config.get("plan"), source=source, hint=_HINT)
    requested = plan_of(replace(options, model=options.model or plan.model, data=options.data or plan.data))
    unset = TrainPlan(plan.model, plan.data)
    for name in (entry.name for entry in fields(TrainPlan)):
        value, begun = getattr(requested, name), getattr(plan, name)
        if value not in (begun, getattr(unset, name)):
            raise InputError(f"expected to resume {resume} with its {name}, {begun}, found {value}; leave it out")
    return plan, begun_with(record.config, options.run, source, hint=_HINT)


def require_trainable(plan: TrainPlan) -> None:
    """Refuse options that exclude training a head on cached features. Raises InputError."""
    tuning = plan.tuning
    tuning.require_learned(plan.model)
    others = {"--keep-every": plan.keep_every, "--recompute": plan.recompute, "--compile on": plan.compiling == "on"}
    excluded = ["--distill-from"] * (plan.teaching.teacher is not None and (tuning.freeze or tuning.compare))
    excluded += [name for name, value in others.items() if value and tuning.freeze]
    if excluded:
        way = "--freeze-backbone" if tuning.freeze else "--compare-frozen"
        raise InputError(f"expected {way} without {excluded[0]}, found both; leave one out, or take --train-last 1")


@dataclass(frozen=True)
class Start:
    """A training before its first step. options: as typed, with the run options that it began with and that hold in
    this process; processes: how many; model: on its device; train, test: the data."""

    plan: TrainPlan
    options: TrainOptions
    processes: int
    model: Model
    train: Split
    test: Split
    recipe: Recipe

    @property
    def run(self) -> RunOptions:
        """The run options."""
        return self.options.run

    @property
    def fresh(self) -> bool:
        """Whether its weights are random."""
        return _from_scratch(self.plan)


def prepare(plan: TrainPlan, options: TrainOptions, processes: int) -> Start:
    """The model, data and recipe of a training. Raises InputError where they do not fit together."""
    run = options.run
    changes = dict(plan.recipe) if run.batch_size is None else {**plan.recipe, "batch_size": run.batch_size}
    recipe = override(base_recipe(plan), changes)
    if not _from_scratch(plan):
        model, train, test = _trained(plan, recipe, options)
        return Start(plan, options, processes, model, train, test, _for_images(recipe, changes, train, processes))
    # the classes follow from the data, and the size of its images from the model
    size = untrained(plan.model, classes=("0",), image_size=plan.image_size, overrides=plan.shape).preprocessing
    train, test = (part_of(plan.data, part, size, run) for part in _PARTS)
    recipe = _for_images(recipe, changes, train, processes)
    drops = recipe.drop_path and plan.model in (*VIT_PRESETS, *SWIN_PRESETS)
    shape: Overrides = {"drop_path": recipe.drop_path, **plan.shape} if drops else plan.shape
    # ViTs that read CLS have a distillation token unless --no-distill-token
    has_cls = plan.model in VIT_PRESETS and shape.get("pooling", "cls") == "cls"
    if plan.teaching.teacher is not None and plan.teaching.token is not False and has_cls:
        shape = {**shape, "distillation": True}
    model = untrained(plan.model, classes=train.classes, image_size=plan.image_size, seed=run.seed, overrides=shape)
    return Start(plan, options, processes, model.to(resolve_device(run.device)), train, test, recipe)


def _from_scratch(plan: TrainPlan) -> bool:
    """Whether a plan's model stands for a preset with random weights."""
    return plan.model in PRESETS and plan.tuning.weights is None


def base_recipe(plan: TrainPlan) -> Recipe:
    """The recipe before changes: the preset's, the named one, or that of fine-tuning."""
    if plan.named is not None or _from_scratch(plan):
        return recipe_for(plan.model, plan.data, named=plan.named)
    if plan.tuning.freeze:
        return FROZEN
    return replace(FINE_TUNING, flip=False) if plan.data in OF_DIGITS else FINE_TUNING


def _for_images(recipe: Recipe, changes: Mapping[str, object], split: Split, processes: int) -> Recipe:
    """The recipe with smaller batches for few images, unless an option sets their size."""
    if "batch_size" in changes:
        return recipe
    return fitted(recipe, len(split), processes=processes, rate_given="learning_rate" in changes)


def part_of(data: str, part: Part, preprocessing: Preprocessing, run: RunOptions) -> Split:
    """A part of the data, as many images as --limit says."""
    split = load_data(data, part=part, preprocessing=preprocessing, data_dir=run.data_dir, seed=run.seed)
    return split.limit(run.limit, seed=run.seed)


def _trained(plan: TrainPlan, recipe: Recipe, options: TrainOptions) -> tuple[Model, Split, Split]:
    """A trained model with a head for the data's classes, and both parts of the data preprocessed for it.

    Raises InputError for options of shape, for more blocks than it has, for freezing a model with random weights, and
    for a recipe whose images cannot be cached.
    """
    tuning, run = plan.tuning, options.run
    if plan.shape:
        raise InputError(
            f"expected a trained model as it is, found --{next(iter(plan.shape)).replace('_', '-')} for {plan.model}; "
            "leave it out, or train a preset from scratch"
        )
    if tuning.freeze:
        require_cacheable(recipe, views=tuning.views or 1)
    model = load(
        plan.model, device=resolve_device(run.device), seed=run.seed, weights=tuning.weights,
        image_size=plan.image_size, code_files=options.model_file,
    )  # fmt: skip
    require_supported(model, "train")
    require_last(model, tuning.trained)
    if tuning.trained is not None:
        require_learned(model, option="--freeze-backbone" if tuning.freeze else "--train-last")
    train, test = (part_of(plan.data, part, model.preprocessing, run) for part in _PARTS)
    return for_classes(model, train.classes), train, test


@dataclass(frozen=True)
class Teaching:
    """The teacher and the objective of a distillation.

    plain: a model to compare with, or None; forms: how many versions of each training image the teacher's outputs are
    computed on, once (0: computed on the student's images in every step).
    """

    teacher: Model
    objective: DistillationObjective
    plain: Model | None
    forms: int

    @property
    def models(self) -> tuple[Model, ...]:
        """The models of the run other than the student."""
        return (self.teacher,) if self.plain is None else (self.teacher, self.plain)

    def compute_outputs(self, train: Split, *, quiet: bool) -> None:
        """Compute the teacher's outputs on the training images, where they are computed once."""
        cached, device = self.objective.teacher, self.teacher.device
        if not isinstance(cached, CachedTeacher):
            return
        what = f"{self.teacher.alias}: outputs on each image, once"
        with progress(what, self.forms * len(train), quiet=quiet) as advance:
            cached.remember(train, mirrored=self.forms == 2, device=device, advance=advance)


def teaching_of(start: Start) -> Teaching | None:
    """The distillation of the options, or None without a teacher.

    Raises InputError where the teacher, or the model to compare with, has other classes than the student, and for a
    number out of range.
    """
    teaching, student, code_files = start.plan.teaching, start.model, start.options.model_file
    if teaching.teacher is None:
        return None
    kind = teaching.kind or "hard"
    how = Distillation(
        kind,
        WEIGHTS[kind] if teaching.weight is None else teaching.weight,
        TEMPERATURE if teaching.temperature is None else teaching.temperature,
        has_distillation_token(student) if teaching.token is None else teaching.token,
    )
    Student(student, token=how.token)  # refuses a token that the student does not have
    model = load(teaching.teacher, device=student.device, code_files=code_files)
    precision = choose(student.device, precision=start.run.precision, compiling="off", steps=1).precision
    teacher = Teacher(model, classes=student.classes, precision=precision)
    plain = None if teaching.beside is None else load(teaching.beside, device=student.device, code_files=code_files)
    if plain is not None:
        plain.require_classifier()
        match_classes(plain.classes, student.classes)
    identity = {**asdict(how), "teacher": teacher.identity()}
    forms = cacheable_views(start.recipe, start.train)
    objective = DistillationObjective(CachedTeacher(teacher) if forms else teacher, how, identity=identity)
    return Teaching(model, objective, plain, forms)
