"""What all trainings of a `study --kind` share: images, models, recipes, places; checked before anything is written."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch

from vitlens.commands.needs import require
from vitlens.commands.run.load import load_models
from vitlens.commands.run.options import RunOptions
from vitlens.commands.study.kinds.kinds import KINDS, Kind, Point
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.train.start import OF_DIGITS, both_parts
from vitlens.data.split import Split, images_in, share_of
from vitlens.devices import resolve_device
from vitlens.errors import DataError, InputError
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.naming import ModelName
from vitlens.models.rebuild import for_classes, untrained_like
from vitlens.training.finetune import require_learned
from vitlens.training.objectives.pretraining import Pretraining, make_objective
from vitlens.training.objectives.registry import CLASSIFY, objective_named
from vitlens.training.recipe import FINE_TUNING, FROZEN, NAMED, Recipe, fitted, override, recipe_for, with_batch_size

POINTS_FOLDER: Final = "points"
FEWEST_TRAINED: Final = 20  # training images, below which an adapted model has nothing to learn from
FEWEST_TESTED: Final = 10  # test images: 16 or fewer do not even separate 70 % from guessing among five classes
_LAST_PART: Final = 4  # one in so many blocks is trained where the last blocks are
_SHORT: Final = NAMED["short"]
# Fine-tuning's own rate hardly moves a new head of zeros within ten short epochs.
_TUNED: Final = replace(
    FINE_TUNING,
    learning_rate=3e-4,
    source="fine-tuning's, with a rate from trials of five (5e-5 to 1e-3) on 100 images of other classes of CIFAR-10 "
    "(JPEG), DeiT-tiny at 112 px, 8 epochs, 1 seed: 2e-4 to 5e-4 differed by less than noise, 1e-3 was far worse",
)
_FROM_SCRATCH: Final = replace(
    _TUNED,
    optimiser=_SHORT.optimiser,
    learning_rate=_SHORT.learning_rate,
    warmup=_SHORT.warmup,
    source="as the points from pretrained weights, with optimiser, rate and warm-up of --recipe short, which two "
    "other rates and AdamW did not beat beyond noise in the same trials",
)


@dataclass(frozen=True)
class Setup:
    """options: with their defaults filled in; points: those for which there are images; model: that is adapted, with
    its own classes; path: of the study's folder, once it is open."""

    options: StudyOptions
    points: tuple[Point, ...]
    train: Split
    test: Split
    device: torch.device
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
        """Passes over the training images."""
        return int(self.options.epochs or 0)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds of each point's trainings."""
        return tuple(range(self.run.seed, self.run.seed + int(self.options.seeds or 0)))

    @property
    def last(self) -> int:
        """Return the number of blocks that a point of the last blocks trains."""
        return max(1, len(self.model.anatomy.blocks) // _LAST_PART) if self.model else 0

    def trained_last(self, point: Point) -> int | None:
        """Return the blocks that a point trains, as `partly_trainable` takes them."""
        return {"head": 0, "last": self.last}.get(point.trained)

    def pretraining(self, point: Point) -> Pretraining | None:
        """Return the objective of a point that learns without labels."""
        return make_objective(point.objective, self.train, self.test)

    def begin(self, point: Point, *, seed: int) -> Model:
        """Return the model with which a point's training begins.

        Raises InputError, naming a point that cannot be built.
        """
        if self.model:
            start = self.start()
            return untrained_like(start, seed=seed) if point.start == "random" else start
        classes = self.train.classes if point.objective == CLASSIFY else ()
        try:
            return untrained(
                point.preset,
                classes=classes,
                image_size=self.options.model_options.image_size,
                seed=seed,
                alias=point.label,
                overrides=point.shape,
            )
        except InputError as error:
            raise InputError(f"the point {point.words!r} cannot be built: {error}") from error

    def start(self) -> Model:
        """Return a copy of the model that is adapted with a head of zeros for the data's classes."""
        assert self.model is not None
        return for_classes(self.model, self.train.classes)

    def images(self, point: Point, *, seed: int) -> Split:
        """Return the training images of a point."""
        return self.train if point.share is None else share_of(self.train, point.share, seed=seed)

    def images_of(self, point: Point) -> int:
        """Return how many distinct training images a point has. Raises DataError where a class is left without one."""
        return len(self.train) if point.share is None else images_in(self.train, point.share)

    def recipe(self, point: Point) -> Recipe:
        """Return a point's recipe, with the study's epochs.

        Without stochastic depth, which would confound the number of blocks. All points that begin from presets have the
        smallest batch size that any of their recipes has for so many images, so that all are trained for as many steps;
        --batch-size sets another.
        """
        own = self._own_recipe(point)
        if self.run.batch_size is not None:
            return override(own, {"batch_size": self.run.batch_size})
        if self.model:
            return fitted(own, len(self.train))
        return with_batch_size(
            own,
            min(fitted(self._own_recipe(each), len(self.train)).batch_size for each in self.points if each.is_trained),
        )

    def _own_recipe(self, point: Point) -> Recipe:
        if not self.model:
            changes = {"epochs": self.epochs, "evaluate_every": self.epochs, "drop_path": 0.0}
            return override(objective_named(point.objective).recipe or recipe_for(point.preset, self.data), changes)
        if point.trained == "head":
            return FROZEN
        recipe = _FROM_SCRATCH if point.start == "random" else _TUNED
        return override(recipe, {"epochs": self.epochs} | ({"flip": False} if self.data in OF_DIGITS else {}))

    def place(self, label: str, seed: int) -> Path:
        """Return the folder of one training."""
        return self.path / POINTS_FOLDER / label / f"seed-{seed}"

    def trained(self, label: str, *, seed: int | None = None) -> Model:
        """Return the model that a point trained with a seed, or with the first."""
        at = self.seeds[0] if seed is None else seed
        point = next(point for point in self.points if point.label == label)
        if not point.is_trained:
            return self.begin(point, seed=at).to(self.device)
        name = ModelName(str(self.place(label, at)), f"{label}-{at}")
        return load(name, device=self.device, code_files=self.options.model_options.model_file)


def prepare(options: StudyOptions) -> Setup:
    """Return the setup of the options.

    Raises InputError for options that do not belong together and for points that cannot be built or trained,
    UnsupportedError for a model that cannot be adapted, DataError for too few images.
    """
    kind = KINDS[str(options.kind)]
    run = options.run
    model = _adapted(options) if kind.adapts else None
    if model is None:
        _refuse_models(options)
        size = options.model_options.image_size  # the input's size decides how photographs are cropped, for all points
        preprocessing = untrained(kind.points[0].preset, classes=("0",), image_size=size).preprocessing
    else:
        preprocessing = model.preprocessing
    train, test = both_parts(str(options.data), preprocessing, run)
    if model is not None:
        _require_enough(train, test)
    device = resolve_device(run.device) if model is None else model.device
    whole = Setup(options, kind.points, train, test, device, model)
    setup = replace(whole, points=tuple(point for point in kind.points if point.candidate or _fits(whole, point)))
    if kind.also == "pretraining":
        _require_probed(train, test)
    for point in setup.points:
        begun = setup.begin(point, seed=0)
        recipe = setup.recipe(point)
        pretraining = setup.pretraining(point)
        if pretraining is not None:
            pretraining.require(begun, recipe, recipe.batch_size)
        setup.images_of(point)
    return setup


def _require_probed(train: Split, test: Split) -> None:
    """Raise DataError for images without labels, and for a class with too few for a linear probe."""
    if train.labels is None or test.labels is None:
        raise DataError(f"expected labelled images to probe features on, found none in {train.name}; try --data shapes")
    fewest = int(torch.bincount(train.labels, minlength=len(train.classes)).min())
    if fewest < 2:
        raise DataError(
            f"expected at least 2 training images of every class to probe, found {fewest}; give more images"
        )


def _fits(setup: Setup, point: Point) -> bool:
    """Return True if a share of the images leaves every class two of them."""
    try:
        return setup.images_of(point) >= 2 * len(setup.train.classes)
    except DataError:
        return False


def _adapted(options: StudyOptions) -> Model:
    """Return the one MODEL that is adapted."""
    if len(options.models) != 1:
        found = ", ".join(options.models) or "none"
        raise InputError(
            f"expected one MODEL with --kind transfer, found {found}; try timm:deit_tiny_patch16_224 or a run folder"
        )
    if not options.data:
        raise InputError("expected --data FOLDER or NAME with --kind transfer, found none; see vitlens data")
    (model,) = load_models(options.models, model_options=options.model_options, options=options.run)
    require(model, "new head", "maps", "statistics", "features")
    require_learned(model, option="--kind transfer")
    if len(model.anatomy.blocks) < 2:
        raise InputError(f"expected a model of at least 2 blocks with --kind transfer, found {model.alias} with 1")
    return model


def _refuse_models(options: StudyOptions) -> None:
    """Refuse MODEL arguments and options of weights, as the points are fixed."""
    option = f"--kind {options.kind}" if options.resume is None else "--resume"
    if options.models:
        found = ", ".join(options.models)
        raise InputError(f"expected no MODEL with {option}, which trains fixed models, found {found}")
    for name, value in asdict(options.model_options).items():
        if value and name != "image_size":
            raise InputError(f"expected no --{name.replace('_', '-')} with {option}, which trains its own models")


def _require_enough(train: Split, test: Split) -> None:
    """Raise DataError for data without labels, of one class, or with too few images to train or to test on."""
    if train.labels is None or test.labels is None:
        raise DataError(f"expected labelled images to transfer to, found none in {train.name}; give class folders")
    found = len(train.labels.unique())
    if found < 2:
        raise DataError(
            f"expected at least 2 classes to transfer to, found {found} in {train.name}; add another class folder"
        )
    if len(train) < FEWEST_TRAINED or len(test) < FEWEST_TESTED:
        raise DataError(
            f"expected at least {FEWEST_TRAINED} training and {FEWEST_TESTED} test images to compare ways of transfer, "
            f"found {len(train)} and {len(test)} in {train.name}; give more images"
        )
