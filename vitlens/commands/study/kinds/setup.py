"""Settings that all trainings of a `study --kind` share: images, models, recipes, folders; checked
before the first.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch

from vitlens.commands.needs import require
from vitlens.commands.run.load import load_models
from vitlens.commands.run.options import RunOptions
from vitlens.commands.study.kinds.catalogue import KINDS
from vitlens.commands.study.kinds.kinds import Kind, Variant
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.train.start import OF_DIGITS, both_parts
from vitlens.data.split import Split, hold_out_groups, images_in, share_of
from vitlens.devices import resolve_device
from vitlens.errors import DataError, InputError
from vitlens.models.derived import for_classes, untrained_like
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.model_names import ModelName
from vitlens.preprocessing import Preprocessing
from vitlens.training.finetune import require_learned
from vitlens.training.objectives.pretraining import Pretraining, make_objective
from vitlens.training.objectives.registry import CLASSIFY, objective_named
from vitlens.training.recipe import (
    FINE_TUNING,
    FROZEN,
    NAMED,
    Recipe,
    fitted,
    override,
    recipe_for,
    with_batch_size,
)

POINTS_FOLDER: Final = "points"
# training images, below which an adapted model has nothing to learn from
FEWEST_TRAINED: Final = 20
# test images: 16 or fewer do not even separate 70 % from guessing among five classes
FEWEST_TESTED: Final = 10
# share of the training images, and of each class, that is held out to follow training
_VALIDATION: Final = 0.1
_LAST_PART: Final = 4  # "last blocks" are the last quarter of all blocks
_SHORT: Final = NAMED["short"]
# Fine-tuning's usual rate hardly moves a new head of zeros within ten short epochs.
_TUNED: Final = replace(
    FINE_TUNING,
    learning_rate=3e-4,
    source="fine-tuning's, with a rate from trials of five (5e-5 to 1e-3) on 100 images of other "
    "classes of CIFAR-10 (JPEG), DeiT-tiny at 112 px, 8 epochs, 1 seed: 2e-4 to 5e-4 differed by "
    "less than noise, 1e-3 was far worse",
)
_FROM_SCRATCH: Final = replace(
    _TUNED,
    optimiser=_SHORT.optimiser,
    learning_rate=_SHORT.learning_rate,
    warmup=_SHORT.warmup,
    source="as the variants with pretrained weights, with optimiser, rate and warm-up of --recipe "
    "short, which two other rates and AdamW did not beat beyond noise in the same trials",
)


@dataclass(frozen=True)
class Setup:
    """The shared settings of a study.

    options: with their defaults filled in.
    variants: those for which there are enough images.
    validation: images held out of the training images, by which training is followed; None if they
        are too few, and for a model that is adapted.
    model: the model that is adapted, with its original classes.
    path: the study's folder, once it exists.
    """

    options: StudyOptions
    variants: tuple[Variant, ...]
    train: Split
    test: Split
    device: torch.device
    validation: Split | None = None
    model: Model | None = None
    path: Path = Path()

    @property
    def kind(self) -> Kind:
        """Return the kind of study."""
        return KINDS[str(self.options.kind)]

    @property
    def run(self) -> RunOptions:
        """Return the run options."""
        return self.options.run

    @property
    def data(self) -> str:
        """Return the name or folder of the images."""
        return str(self.options.data)

    @property
    def epochs(self) -> int:
        """Return the passes over the training images."""
        return int(self.options.epochs or 0)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds of each variant's trainings."""
        return tuple(range(self.run.seed, self.run.seed + int(self.options.seeds or 0)))

    @property
    def last(self) -> int:
        """Return the number of blocks that are trained where only the last ones are."""
        if self.model is None:
            return 0
        return max(1, len(self.model.anatomy.blocks) // _LAST_PART)

    def count_trained_blocks(self, variant: Variant) -> int | None:
        """Return how many of the last blocks a variant trains; None: the whole model."""
        if variant.trained == "head":
            return 0
        if variant.trained == "last":
            return self.last
        return None

    def pretraining(self, variant: Variant) -> Pretraining | None:
        """Return the objective of a variant that learns without labels."""
        return make_objective(variant.objective, self.train, self.test)

    def initial_model(self, variant: Variant, *, seed: int) -> Model:
        """Return the model with which the training of a variant begins.

        Raises InputError, with its name, for a variant that cannot be built.
        """
        if self.model is not None:
            model = self.model_with_new_head()
            if variant.start == "random":
                return untrained_like(model, seed=seed)
            return model
        # an objective without labels trains a model without a classifier
        classes = self.train.classes if variant.objective == CLASSIFY else ()
        try:
            return untrained(
                variant.preset,
                classes=classes,
                image_size=self.options.model_options.image_size,
                seed=seed,
                alias=variant.label,
                overrides=variant.shape,
            )
        except InputError as error:
            raise InputError(f"the variant {variant.words!r} cannot be built: {error}") from error

    def model_with_new_head(self) -> Model:
        """Return the model that is adapted, a copy with a head of zeros for the data's classes."""
        assert self.model is not None
        return for_classes(self.model, self.train.classes)

    def images(self, variant: Variant, *, seed: int) -> Split:
        """Return the training images of a variant."""
        if variant.share is None:
            return self.train
        return share_of(self.train, variant.share, seed=seed, repeated=variant.repeated)

    def count_images(self, variant: Variant) -> int:
        """Return how many distinct training images a variant has. Raises DataError if a class has
        none.
        """
        if variant.share is None:
            return len(self.train)
        return images_in(self.train, variant.share)

    def recipe(self, variant: Variant) -> Recipe:
        """Return the recipe of a variant, with the study's epochs.

        Stochastic depth is off, as it would confound the number of blocks. All variants of presets
        have one batch size, so that all are trained for as many steps: the smallest that any of
        their recipes has for this number of images, or that of --batch-size.
        """
        recipe = self._plain_recipe(variant)
        if self.run.batch_size is not None:
            recipe = override(recipe, {"batch_size": self.run.batch_size})
        elif self.model is not None:
            recipe = fitted(recipe, len(self.train))
        else:
            sizes = []
            for other in self.variants:
                if other.is_trained:
                    sizes.append(fitted(self._plain_recipe(other), len(self.train)).batch_size)
            recipe = with_batch_size(recipe, min(sizes))
        return override(recipe, variant.recipe)

    def _plain_recipe(self, variant: Variant) -> Recipe:
        """Return the recipe of a variant before its batch size is set."""
        if self.model is not None:
            return self._adapting_recipe(variant)
        recipe = objective_named(variant.objective).recipe
        if recipe is None:
            recipe = recipe_for(variant.preset, self.data)
        evaluate_every = 1
        if self.validation is None:  # only at the end
            evaluate_every = self.epochs
        changes = {"epochs": self.epochs, "evaluate_every": evaluate_every, "drop_path": 0.0}
        return override(recipe, changes)

    def _adapting_recipe(self, variant: Variant) -> Recipe:
        """Return the recipe of a variant of a model that is adapted."""
        if variant.trained == "head":
            return FROZEN  # with its own epochs: features are computed once
        changes: dict[str, object] = {"epochs": self.epochs}
        if self.data in OF_DIGITS:
            changes["flip"] = False  # a mirrored digit is not a digit
        recipe = _FROM_SCRATCH if variant.start == "random" else _TUNED
        return override(recipe, changes)

    def folder(self, label: str, seed: int) -> Path:
        """Return the folder of one training."""
        return self.path / POINTS_FOLDER / label / f"seed-{seed}"

    def load_trained(self, label: str, *, seed: int | None = None) -> Model:
        """Return the model that a variant trained with a seed, by default the first."""
        if seed is None:
            seed = self.seeds[0]
        (variant,) = [variant for variant in self.variants if variant.label == label]
        if not variant.is_trained:
            return self.initial_model(variant, seed=seed).to(self.device)
        name = ModelName(str(self.folder(label, seed)), f"{label}-{seed}")
        return load(name, device=self.device, code_files=self.options.model_options.model_file)

    def load_all_trained(self, label: str) -> list[Model]:
        """Return the models that a variant trained, one for each seed."""
        return [self.load_trained(label, seed=seed) for seed in self.seeds]


def prepare(options: StudyOptions) -> Setup:
    """Return the setup of the options.

    Raises InputError for options that do not belong together and for variants that cannot be built
    or trained, UnsupportedError for a model that cannot be adapted, DataError for too few images.
    """
    kind = KINDS[str(options.kind)]
    model = None
    if kind.adapts:
        model = _load_model_to_adapt(options)
    else:
        _refuse_models(options)
    preprocessing = _preprocessing(kind, model, options)
    train, test = both_parts(str(options.data), preprocessing, options.run)
    if model is not None:
        _require_enough(train, test)
    device = resolve_device(options.run.device) if model is None else model.device
    validation = None
    # frozen features are probed on all training images
    if model is None and kind.extra != "pretraining":
        train, validation = hold_out_groups(train, _VALIDATION)
    setup = Setup(
        options, kind.variants, train, test, device=device, validation=validation, model=model
    )
    teachers = {variant.teacher for variant in kind.variants}
    feasible = []
    for variant in kind.variants:
        # too few images for one of these is an error, which _require_trainable raises
        is_needed = variant.candidate or variant.label in teachers
        if is_needed or _has_images(setup, variant):
            feasible.append(variant)
    setup = replace(setup, variants=tuple(feasible))
    if kind.extra == "pretraining":
        _require_probed(train, test)
    for variant in setup.variants:
        _require_trainable(setup, variant)
    return setup


def _preprocessing(kind: Kind, model: Model | None, options: StudyOptions) -> Preprocessing:
    """Return the preprocessing of all variants: that of the model, or of presets of this size."""
    if model is not None:
        return model.preprocessing
    size = options.model_options.image_size
    # presets of one size have one preprocessing, whatever their classes
    return untrained(kind.variants[0].preset, classes=("0",), image_size=size).preprocessing


def _require_trainable(setup: Setup, variant: Variant) -> None:
    """Raise InputError for a variant that cannot be built or trained, DataError for one without
    enough images.
    """
    model = setup.initial_model(variant, seed=0)  # InputError for one that cannot be built
    recipe = setup.recipe(variant)
    pretraining = setup.pretraining(variant)
    if pretraining is not None:
        pretraining.require(model, recipe, recipe.batch_size)
    setup.count_images(variant)  # DataError if a class has none


def _require_probed(train: Split, test: Split) -> None:
    """Raise DataError for images without labels, and for a class with too few images for a linear
    probe.
    """
    if train.labels is None or test.labels is None:
        raise DataError(
            f"expected labelled images to probe features on, found none in {train.name}; try "
            "--data shapes"
        )
    fewest = int(torch.bincount(train.labels, minlength=len(train.classes)).min())
    if fewest < 2:
        raise DataError(
            f"expected at least 2 training images of every class to probe, found {fewest}; give "
            "more images"
        )


def _has_images(setup: Setup, variant: Variant) -> bool:
    """Return True if the variant's share of the images has on average two of every class."""
    try:
        return setup.count_images(variant) >= 2 * len(setup.train.classes)
    except DataError:
        return False


def _load_model_to_adapt(options: StudyOptions) -> Model:
    """Return the one MODEL that is adapted. Raises InputError and UnsupportedError."""
    if len(options.models) != 1:
        names = ", ".join(options.models) or "none"
        raise InputError(
            f"expected one MODEL with --kind transfer, found {names}; try "
            "timm:deit_tiny_patch16_224 or a run folder"
        )
    if not options.data:
        raise InputError(
            "expected --data FOLDER or NAME with --kind transfer, found none; see vitlens data"
        )
    (model,) = load_models(options.models, model_options=options.model_options, options=options.run)
    require(model, "new head", "maps", "statistics", "features")
    require_learned(model, option="--kind transfer")
    if len(model.anatomy.blocks) < 2:
        raise InputError(
            f"expected a model of at least 2 blocks with --kind transfer, found {model.alias} with "
            "1"
        )
    return model


def _refuse_models(options: StudyOptions) -> None:
    """Raise InputError for MODEL arguments and options of weights, as the variants are fixed."""
    option = f"--kind {options.kind}" if options.resume is None else "--resume"
    if options.models:
        names = ", ".join(options.models)
        raise InputError(
            f"expected no MODEL with {option}, which trains fixed models, found {names}"
        )
    for name, value in asdict(options.model_options).items():
        if value and name != "image_size":
            flag = name.replace("_", "-")
            raise InputError(f"expected no --{flag} with {option}, which trains fixed models")


def _require_enough(train: Split, test: Split) -> None:
    """Raise DataError for data without labels, of one class, or with too few images to train or to
    test on.
    """
    if train.labels is None or test.labels is None:
        raise DataError(
            f"expected labelled images to transfer to, found none in {train.name}; give class "
            "folders"
        )
    classes = len(train.labels.unique())
    if classes < 2:
        raise DataError(
            f"expected at least 2 classes to transfer to, found {classes} in {train.name}; add "
            "another class folder"
        )
    if len(train) < FEWEST_TRAINED or len(test) < FEWEST_TESTED:
        raise DataError(
            f"expected at least {FEWEST_TRAINED} training and {FEWEST_TESTED} test images to "
            f"compare ways of transfer, found {len(train)} and {len(test)} in {train.name}; give "
            "more images"
        )
