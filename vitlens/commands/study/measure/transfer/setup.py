"""The model, images, recipes and places of a transfer study, checked before anything is written."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from vitlens.commands.run.load import load_models
from vitlens.commands.run.options import RunOptions
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import POINTS_FOLDER
from vitlens.commands.study.transfer.regimes import (
    BY_SHARE,
    DISTILLED,
    EPOCHS,
    FEWEST_TESTED,
    FEWEST_TRAINED,
    FROZEN,
    LAST,
    LAST_PART,
    SCRATCH,
    SEEDS,
    SHARES,
    Regime,
)
from vitlens.commands.train.start import OF_DIGITS
from vitlens.data.catalogue import load_data
from vitlens.data.shares import images_in
from vitlens.data.split import Split
from vitlens.errors import DataError, InputError
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.naming import ModelName
from vitlens.models.new_head import for_classes
from vitlens.models.rebuilding.untrained import untrained_like
from vitlens.models.support import require
from vitlens.names import Part
from vitlens.training.finetune import require_learned
from vitlens.training.recipe import FINE_TUNING, NAMED, Recipe, fitted, override
from vitlens.training.recipe import FROZEN as FROZEN_RECIPE

PARTS: Final[tuple[Part, ...]] = ("train", "test")
_SHORT: Final = NAMED["short"]
# Fine-tuning's own rate hardly moves a new head of zeros within ten short epochs.
TUNED: Final = replace(
    FINE_TUNING, learning_rate=3e-4,
    source="fine-tuning's, with a rate from trials of five (5e-5 to 1e-3) on 100 images of other classes of CIFAR-10 "
    "(JPEG), DeiT-tiny at 112 px, 8 epochs, 1 seed: 2e-4 to 5e-4 differed by less than noise, 1e-3 was far worse",
)  # fmt: skip
FROM_SCRATCH: Final = replace(
    TUNED, optimiser=_SHORT.optimiser, learning_rate=_SHORT.learning_rate, warmup=_SHORT.warmup,
    source="as the regimes from pretrained weights, with optimiser, rate and warm-up of --recipe short, which two "
    "other rates and AdamW did not beat beyond noise in the same trials",
)  # fmt: skip


@dataclass(frozen=True)
class TransferSetup:
    """What all trainings share. model: as it was given, with its own classes; code_files: see `load`."""

    model: Model
    train: Split
    test: Split
    data: str
    epochs: int
    seeds: tuple[int, ...]
    options: RunOptions
    code_files: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        """The device of all models."""
        return self.model.device

    @property
    def last(self) -> int:
        """The number of blocks that LAST trains."""
        return max(1, len(self.model.anatomy.blocks) // LAST_PART)

    def start(self) -> Model:
        """A copy of the model with a head of zeros for the data's classes."""
        return for_classes(self.model, self.train.classes)

    def begin(self, regime: Regime, *, seed: int) -> Model:
        """The model with which a regime begins."""
        start = self.start()
        return untrained_like(start, seed=seed) if regime in (SCRATCH, DISTILLED) else start

    def trained_last(self, regime: Regime) -> int | None:
        """As `partly_trainable` takes it."""
        return {FROZEN: 0, LAST: self.last}.get(regime)

    def recipe(self, regime: Regime) -> Recipe:
        """A regime's recipe, with the study's epochs (but for the frozen one) and batches for few images."""
        if regime == FROZEN:
            recipe, changes = FROZEN_RECIPE, dict[str, object]()
        else:
            recipe = FROM_SCRATCH if regime in (SCRATCH, DISTILLED) else TUNED
            changes = {"epochs": self.epochs}
            changes |= {"flip": False} if self.data in OF_DIGITS else {}
        if self.options.batch_size is not None:
            changes["batch_size"] = self.options.batch_size
        recipe = override(recipe, changes)
        return recipe if "batch_size" in changes else fitted(recipe, len(self.train))

    def trained(self, path: Path, regime: Regime, *, seed: int) -> Model:
        """The model that a regime trained with a seed."""
        name = ModelName(str(place_of(path, regime, seed=seed)), f"{regime.label}-{seed}")
        return load(name, device=self.device, code_files=self.code_files)


def place_of(path: Path, regime: Regime, *, seed: int, share: float | None = None) -> Path:
    """The folder of one training."""
    label = regime.label if share is None else f"{regime.label}-{round(100 * share)}"
    return path / POINTS_FOLDER / label / f"seed-{seed}"


def prepare(options: StudyOptions) -> TransferSetup:
    """The setup of the options.

    Raises InputError for options that do not belong together and for random weights, UnsupportedError for a model that
    cannot be adapted or has no attention maps, DataError for data with one class or too few images.
    """
    name = _only_model(options)
    if options.data is None:
        raise InputError("expected --data FOLDER or NAME with --kind transfer, found none; see vitlens data")
    (model,) = load_models([name], model_options=options.model_options, options=options.run)
    require(model, "new head", "maps", "statistics", "features")
    require_learned(model, option="--kind transfer")
    if len(model.anatomy.blocks) < 2:
        raise InputError(f"expected a model of at least 2 blocks with --kind transfer, found {model.alias} with 1")
    run = options.run
    train, test = (
        load_data(
            options.data, part=part, preprocessing=model.preprocessing, data_dir=run.data_dir, seed=run.seed
        ).limit(run.limit, seed=run.seed)
        for part in PARTS
    )
    require_enough(train, test)
    count = SEEDS if options.seeds is None else options.seeds
    if count < 1:
        raise InputError(f"expected --seeds of at least 1, found {count}; try --seeds {SEEDS}")
    epochs = EPOCHS if options.epochs is None else options.epochs
    seeds = tuple(range(run.seed, run.seed + count))
    setup = TransferSetup(model, train, test, options.data, epochs, seeds, run, options.model_options.model_file)
    setup.begin(SCRATCH, seed=0)  # refuses what cannot be built anew
    return setup


def _only_model(options: StudyOptions) -> str:
    if len(options.models) != 1:
        found = ", ".join(options.models) or "none"
        raise InputError(
            f"expected one MODEL with --kind transfer, found {found}; try timm:deit_tiny_patch16_224 or a run folder"
        )
    return options.models[0]


def require_enough(train: Split, test: Split) -> None:
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


def trainings(setup: TransferSetup) -> tuple[tuple[Regime, float], ...]:
    """The trainings on fewer images: a share that leaves a class without an image is left out."""

    def fits(share: float) -> bool:
        try:
            return images_in(setup.train, share) >= 2 * len(setup.train.classes)
        except DataError:
            return False

    return tuple((regime, share) for share in SHARES if fits(share) for regime in BY_SHARE)
