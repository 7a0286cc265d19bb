"""The start of a training: model, images, recipe, and the teacher of a distillation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

from vitlens.classes import match_classes
from vitlens.commands.needs import needs_of, require
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress import phase, progress
from vitlens.commands.train.options import TeacherOptions, TrainOptions
from vitlens.data.catalogue import load_data
from vitlens.data.registry import SETS
from vitlens.data.split import Split
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.models.configs import SWIN_PRESETS, VIT_PRESETS
from vitlens.models.derived import for_classes
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.rebuild import Overrides
from vitlens.names import Part, Precision
from vitlens.preprocessing import Preprocessing
from vitlens.training.distill import (
    TEMPERATURE,
    WEIGHTS,
    Distillation,
    StandardObjective,
    Student,
    Teacher,
    has_distillation_token,
)
from vitlens.training.finetune import require_last, require_learned
from vitlens.training.head import require_cacheable
from vitlens.training.objectives.pretraining import Pretraining, make_objective
from vitlens.training.objectives.registry import CLASSIFY, objective_named
from vitlens.training.recipe import FINE_TUNING, FROZEN, Recipe, fitted, override, recipe_for
from vitlens.training.speed import choose_precision

# data sets of digits, which mirroring would change
OF_DIGITS: Final = ("digits", "digits-shortcut", "digits-clear", "mnist", "svhn")


@dataclass(frozen=True)
class Start:
    """A training before its first step.

    options: with the run options of this process.
    processes: the number of processes.
    model: on its device.
    recipe: with all changes.
    objective: of a distillation, else None.
    pretraining: the objective of a training without labels, else None.
    compared: with a distillation, the teacher, then the model of --beside, if any.
    """

    options: TrainOptions
    processes: int
    model: Model
    train: Split
    test: Split
    recipe: Recipe
    objective: StandardObjective | None = None
    pretraining: Pretraining | None = None
    compared: tuple[Model, ...] = ()

    @property
    def run(self) -> RunOptions:
        """Return the run options."""
        return self.options.run


def prepare(options: TrainOptions, processes: int) -> Start:
    """Return the model, data and recipe of a training, without the teacher (see `with_teacher`).

    processes: the number of processes. Raises InputError if options do not fit together.
    """
    if options.fresh:
        return _start_from_scratch(options, processes)
    return _start_from_trained(options, processes)


def _recipe_changes(options: TrainOptions) -> Mapping[str, object]:
    """Return the changed settings of the recipe, --batch-size included."""
    changes = options.changes
    if options.run.batch_size is not None:
        changes["batch_size"] = options.run.batch_size
    return changes


def _start_from_scratch(options: TrainOptions, processes: int) -> Start:
    """Return a preset with random weights, the data and the recipe."""
    changes = _recipe_changes(options)
    planned = override(base_recipe(options), changes)
    name = options.model
    run = options.run
    size = options.shape.image_size
    if options.objective != CLASSIFY and name not in VIT_PRESETS:
        raise InputError(
            f"expected a ViT with --objective {options.objective}, found {name}; try vit-micro, "
            "vit-mini or vit-tiny"
        )
    # The classes follow from the data, and the size of its images from the model. So the
    # preprocessing is that of a first model with any classes.
    shape: Overrides = options.shape.changes
    preprocessing = untrained(name, classes=("0",), image_size=size, overrides=shape).preprocessing
    train, test = both_parts(str(options.data), preprocessing, run)
    recipe = _for_images(planned, changes, train, processes)
    # stochastic depth is a setting of the recipe, but belongs to the model
    if recipe.drop_path and name in (*VIT_PRESETS, *SWIN_PRESETS):
        shape = {"drop_path": recipe.drop_path, **shape}
    if _gets_distillation_token(options, shape):
        shape = {**shape, "distillation": True}
    pretraining = make_objective(options.objective, train, test, options.settings)
    classes = train.classes if pretraining is None else ()
    model = untrained(name, classes=classes, image_size=size, seed=run.seed, overrides=shape)
    model = model.to(resolve_device(run.device))
    return Start(options, processes, model, train, test, recipe, pretraining=pretraining)


def _gets_distillation_token(options: TrainOptions, shape: Overrides) -> bool:
    """Return True for a student that reads CLS, unless --no-distill-token is set."""
    teaching = options.teaching
    reads_cls = options.model in VIT_PRESETS and shape.get("pooling", "cls") == "cls"
    return reads_cls and teaching.teacher is not None and teaching.token is not False


def base_recipe(options: TrainOptions) -> Recipe:
    """Return the recipe before changes: that of --recipe, or the default of the objective, the
    preset or fine-tuning.
    """
    data = str(options.data)
    name = options.recipe.named
    if name is not None:
        return recipe_for(options.model, data, named=name)
    recipe = objective_named(options.objective).recipe
    if recipe is not None:
        return recipe
    if options.fresh:
        return recipe_for(options.model, data, named=None)
    if options.tuning.freeze:
        return FROZEN
    if data in OF_DIGITS:
        return replace(FINE_TUNING, flip=False)
    return FINE_TUNING


def _for_images(
    recipe: Recipe, changes: Mapping[str, object], split: Split, processes: int
) -> Recipe:
    """Return the recipe with smaller batches for few images, unless an option sets their size."""
    if "batch_size" in changes:
        return recipe
    return fitted(recipe, len(split), processes=processes, rate_given="learning_rate" in changes)


def part_of(data: str, part: Part, preprocessing: Preprocessing, run: RunOptions) -> Split:
    """Return a part of the data, limited by --limit.

    Test digits are drawn in one scene each, the same scenes after every epoch.
    """
    scenes = None
    if part == "test" and data in SETS and SETS[data].scenes:
        scenes = 1
    with phase(f"Reading the {part} images"):
        split = load_data(
            data,
            part=part,
            preprocessing=preprocessing,
            data_dir=run.data_dir,
            seed=run.seed,
            labels=run.labels,
            scenes=scenes,
        )
    return split.limit(run.limit, seed=run.seed)


def both_parts(data: str, preprocessing: Preprocessing, run: RunOptions) -> tuple[Split, Split]:
    """Return the training images and the test images."""
    return part_of(data, "train", preprocessing, run), part_of(data, "test", preprocessing, run)


def _start_from_trained(options: TrainOptions, processes: int) -> Start:
    """Return a trained model with a new head for the data's classes, the data and the recipe.

    Raises InputError for options of shape, for more blocks than the model has, for freezing random
    weights, and for a recipe whose images cannot be cached.
    """
    changes = _recipe_changes(options)
    recipe = override(base_recipe(options), changes)
    tuning = options.tuning
    run = options.run
    changes_of_shape = list(options.shape.changes)
    if changes_of_shape:
        option = changes_of_shape[0].replace("_", "-")
        raise InputError(
            f"expected no change of shape for the trained model {options.model}, found --{option}; "
            "leave it out, or train a preset from scratch"
        )
    if tuning.freeze:
        require_cacheable(recipe, views=tuning.views or 1)
    with phase(f"Loading {options.model}"):
        model = load(
            options.model,
            device=resolve_device(run.device),
            seed=run.seed,
            weights=tuning.weights,
            image_size=options.shape.image_size,
            code_files=options.model_file,
        )
        require(model, *needs_of("train"))
    require_last(model, tuning.trained)
    if tuning.trained is not None:
        require_learned(model, option=tuning.freezing_option)
    train, test = both_parts(str(options.data), model.preprocessing, run)
    recipe = _for_images(recipe, changes, train, processes)
    return Start(options, processes, for_classes(model, train.classes), train, test, recipe)


def with_teacher(start: Start) -> Start:
    """Return a training with the teacher that the options name, if any.

    Raises InputError if the teacher, or the model to compare with, has other classes than the
    student, and for a setting out of range.
    """
    teaching = start.options.teaching
    if teaching.teacher is None:
        return start
    student = start.model
    distillation = _distillation(teaching, student)
    # only to check: raises an error for a token that the student does not have
    Student(student, token=distillation.token)
    code_files = start.options.model_file
    teacher = load(teaching.teacher, device=student.device, code_files=code_files)
    compared = [teacher]
    if teaching.beside is not None:
        compared.append(load(teaching.beside, device=student.device, code_files=code_files))
    # checks the teacher's classes
    objective = objective_of(teacher, distillation, start.train.classes, start.run.precision)
    for plain in compared[1:]:
        plain.require_classifier()
        match_classes(plain.classes, student.classes)
    return replace(start, objective=objective, compared=tuple(compared))


def _distillation(teaching: TeacherOptions, student: Model) -> Distillation:
    """Return the settings of a distillation, with the defaults of those that are not set."""
    kind = teaching.kind or "hard"
    weight = teaching.weight
    if weight is None:
        weight = WEIGHTS[kind]
    temperature = teaching.temperature
    if temperature is None:
        temperature = TEMPERATURE
    token = teaching.token
    if token is None:
        token = has_distillation_token(student)
    return Distillation(kind, weight, temperature, token)


def objective_of(
    model: Model, how: Distillation, classes: tuple[str, ...], precision: Precision
) -> StandardObjective:
    """Return the objective that learns from the labels and from a trained model, the teacher.

    classes: of the data. Raises InputError if the teacher has others.
    """
    teacher_precision, _note = choose_precision(model.device, precision)
    teacher = Teacher(model, classes=classes, precision=teacher_precision)
    # a run can only be resumed with the same teacher and settings
    identity = {**asdict(how), "teacher": teacher.identity()}
    return StandardObjective(teacher, how, {"distillation": identity})


def compute_outputs(
    objective: StandardObjective, images: Split, *, views: int, quiet: bool
) -> None:
    """Cache a teacher's outputs on the views of each training image.

    views: 1 for the image, 2 for the image and its mirror image, 0 to cache nothing.
    """
    teacher = objective.teacher
    if not views or not isinstance(teacher, Teacher):
        return
    label = f"{teacher.model.alias}: outputs on each image, once"
    with progress(label, views * len(images), quiet=quiet) as advance:
        teacher.remember(images, mirrored=views == 2, advance=advance)
