"""The start of a training: a preset with random weights or a trained model with a head for the data's classes, the
images, the recipe, and the teacher of a distillation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

from vitlens.classes import match_classes
from vitlens.commands.needs import needs_of, require
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress import phase, progress
from vitlens.commands.train.options import TrainOptions
from vitlens.data.catalogue import load_data
from vitlens.data.registry import SETS
from vitlens.data.split import Split
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.models.configs import SWIN_PRESETS, VIT_PRESETS
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.rebuild import Overrides, for_classes
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

OF_DIGITS: Final = ("digits", "digits-shortcut", "mnist", "svhn")  # data sets of digits, which mirroring would change


@dataclass(frozen=True)
class Start:
    """A training before its first step. options: with the run options that hold in this process; processes: how
    many; model: on its device; train, test: the data; objective: of a distillation; pretraining: one without
    labels; others: its teacher, and a model trained without one to compare with, where it is given."""

    options: TrainOptions
    processes: int
    model: Model
    train: Split
    test: Split
    recipe: Recipe
    objective: StandardObjective | None = None
    pretraining: Pretraining | None = None
    others: tuple[Model, ...] = ()

    @property
    def run(self) -> RunOptions:
        """Return the run options."""
        return self.options.run


def prepare(options: TrainOptions, processes: int) -> Start:
    """Return the model, data and recipe of a training. Raises InputError where they do not fit together."""
    name = options.model
    data = str(options.data)
    run = options.run
    size = options.shape.image_size
    changes = options.changes | ({} if run.batch_size is None else {"batch_size": run.batch_size})
    recipe = override(base_recipe(options), changes)
    if not options.fresh:
        model, train, test = _trained(options, recipe)
        return Start(options, processes, model, train, test, _for_images(recipe, changes, train, processes))
    if options.objective != CLASSIFY and name not in VIT_PRESETS:
        raise InputError(
            f"expected a ViT with --objective {options.objective}, found {name}; try vit-micro, vit-mini or vit-tiny"
        )
    # the classes follow from the data, and the size of its images from the model
    shape: Overrides = options.shape.sides
    preprocessing = untrained(name, classes=("0",), image_size=size, overrides=shape).preprocessing
    train, test = both_parts(data, preprocessing, run)
    recipe = _for_images(recipe, changes, train, processes)
    if recipe.drop_path and name in (*VIT_PRESETS, *SWIN_PRESETS):
        shape = {"drop_path": recipe.drop_path, **shape}
    # ViTs that read CLS have a distillation token unless --no-distill-token
    has_cls = name in VIT_PRESETS and shape.get("pooling", "cls") == "cls"
    if options.teaching.teacher is not None and options.teaching.token is not False and has_cls:
        shape = {**shape, "distillation": True}
    pretraining = make_objective(options.objective, train, test, options.settings)
    classes = train.classes if pretraining is None else ()
    model = untrained(name, classes=classes, image_size=size, seed=run.seed, overrides=shape)
    model = model.to(resolve_device(run.device))
    return Start(options, processes, model, train, test, recipe, pretraining=pretraining)


def base_recipe(options: TrainOptions) -> Recipe:
    """Return the recipe before changes: the preset's, the named one, or that of fine-tuning."""
    data = str(options.data)
    named = options.recipe.named
    own = objective_named(options.objective).recipe
    if named is None and own is not None:
        return own
    if named is not None or options.fresh:
        return recipe_for(options.model, data, named=named)
    if options.tuning.freeze:
        return FROZEN
    return replace(FINE_TUNING, flip=False) if data in OF_DIGITS else FINE_TUNING


def _for_images(recipe: Recipe, changes: Mapping[str, object], split: Split, processes: int) -> Recipe:
    """Return the recipe with smaller batches for few images, unless an option sets their size."""
    if "batch_size" in changes:
        return recipe
    return fitted(recipe, len(split), processes=processes, rate_given="learning_rate" in changes)


def part_of(data: str, part: Part, preprocessing: Preprocessing, run: RunOptions) -> Split:
    """Return a part of the data, as many images as --limit says.

    Digits to test on are shown in one scene each, as they are tested after every epoch.
    """
    in_scenes = data in SETS and SETS[data].scenes
    with phase(f"Reading the {part} images"):
        split = load_data(
            data,
            part=part,
            preprocessing=preprocessing,
            data_dir=run.data_dir,
            seed=run.seed,
            labels=run.labels,
            scenes=1 if in_scenes and part == "test" else None,
        )
    return split.limit(run.limit, seed=run.seed)


def both_parts(data: str, preprocessing: Preprocessing, run: RunOptions) -> tuple[Split, Split]:
    """Return the images to train on, and those to test on."""
    return part_of(data, "train", preprocessing, run), part_of(data, "test", preprocessing, run)


def _trained(options: TrainOptions, recipe: Recipe) -> tuple[Model, Split, Split]:
    """Return a trained model with a head for the data's classes, and both parts of the data preprocessed for it.

    Raises InputError for options of shape, for more blocks than it has, for freezing a model with random weights, and
    for a recipe whose images cannot be cached.
    """
    tuning = options.tuning
    run = options.run
    for name in options.shape.sides:
        raise InputError(
            f"expected a trained model as it is, found --{name.replace('_', '-')} for {options.model}; leave it out, "
            "or train a preset from scratch"
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
        require_learned(model, option=tuning.way)
    train, test = both_parts(str(options.data), model.preprocessing, run)
    return for_classes(model, train.classes), train, test


def taught(start: Start) -> Start:
    """Return a training with its teacher, where the options name one.

    Raises InputError where the teacher, or the model to compare with, has other classes than the student, and for a
    number out of range.
    """
    teaching = start.options.teaching
    student = start.model
    code_files = start.options.model_file
    if teaching.teacher is None:
        return start
    kind = teaching.kind or "hard"
    how = Distillation(
        kind,
        WEIGHTS[kind] if teaching.weight is None else teaching.weight,
        TEMPERATURE if teaching.temperature is None else teaching.temperature,
        has_distillation_token(student) if teaching.token is None else teaching.token,
    )
    Student(student, token=how.token)  # refuses a token that the student does not have
    names = [name for name in (teaching.teacher, teaching.beside) if name is not None]
    others = tuple(load(name, device=student.device, code_files=code_files) for name in names)
    objective = objective_of(others[0], how, start.train.classes, start.run.precision)
    for plain in others[1:]:
        plain.require_classifier()
        match_classes(plain.classes, student.classes)
    return replace(start, objective=objective, others=others)


def objective_of(model: Model, how: Distillation, classes: tuple[str, ...], precision: Precision) -> StandardObjective:
    """Learning from the labels and from a trained model."""
    chosen, _ = choose_precision(model.device, precision)
    teacher = Teacher(model, classes=classes, precision=chosen)
    return StandardObjective(teacher, how, {"distillation": {**asdict(how), "teacher": teacher.identity()}})


def compute_outputs(objective: StandardObjective, images: Split, *, views: int, quiet: bool) -> None:
    """Let a teacher remember its outputs on so many views of each training image, where it is worth it."""
    teacher = objective.teacher
    if views and isinstance(teacher, Teacher):
        name = teacher.model.alias
        count = views * len(images)
        with progress(f"{name}: outputs on each image, once", count, quiet=quiet) as advance:
            teacher.remember(images, mirrored=views == 2, advance=advance)
