"""The start of a training: a preset with random weights, or a trained model with a head for the data's classes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from vitlens.commands.run.options import RunOptions
from vitlens.commands.train.options import TeacherOptions, Tuning
from vitlens.commands.train.plan import TrainPlan
from vitlens.commands.train.record import FineTunedRow
from vitlens.data.catalogue import load_data
from vitlens.data.split import Split
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.models.assembly import Overrides
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.new_head import for_classes
from vitlens.models.support import require_supported
from vitlens.models.swin_config import SWIN_PRESETS
from vitlens.models.vit_config import VIT_PRESETS
from vitlens.names import PRESETS, Part
from vitlens.preprocessing import Preprocessing
from vitlens.training.finetune import require_last, require_learned, trained_share
from vitlens.training.head import require_cacheable
from vitlens.training.recipe import FINE_TUNING, FROZEN, Recipe, fitted, override, recipe_for

_PARTS: Final[tuple[Part, ...]] = ("train", "test")
OF_DIGITS: Final = ("digits", "mnist", "svhn")  # data sets of digits, which mirroring would change


@dataclass(frozen=True)
class Start:
    """The model before training, on its device; both parts of the data; the recipe.

    fresh: whether its weights are random.
    """

    model: Model
    train: Split
    test: Split
    recipe: Recipe
    fresh: bool


def prepare(plan: TrainPlan, run: RunOptions, *, code_files: tuple[str, ...], processes: int) -> Start:
    """The model, data and recipe of a training; code_files: see `load`.

    Raises InputError where they do not fit together.
    """
    device = resolve_device(run.device)
    changes = dict(plan.recipe) if run.batch_size is None else {**plan.recipe, "batch_size": run.batch_size}
    recipe = override(base_recipe(plan), changes)
    if not from_scratch(plan.model, plan.tuning):
        model, train, test = _trained(plan, recipe, device, run, code_files)
        return Start(model, train, test, _for_images(recipe, changes, train, processes), fresh=False)
    # the classes follow from the data, and the size of its images from the model
    size = untrained(plan.model, classes=("0",), image_size=plan.image_size, overrides=plan.shape).preprocessing
    train, test = (_part(plan.data, part, size, run) for part in _PARTS)
    recipe = _for_images(recipe, changes, train, processes)
    drops = recipe.drop_path and plan.model in (*VIT_PRESETS, *SWIN_PRESETS)
    shape = {"drop_path": recipe.drop_path, **plan.shape} if drops else plan.shape
    shape = shape_with_token(plan.model, shape, plan.teaching)
    model = untrained(plan.model, classes=train.classes, image_size=plan.image_size, seed=run.seed, overrides=shape)
    return Start(model.to(device), train, test, recipe, fresh=True)


def from_scratch(model: str, tuning: Tuning) -> bool:
    """Whether a name stands for a preset with random weights."""
    return model in PRESETS and tuning.weights is None


def base_recipe(plan: TrainPlan) -> Recipe:
    """The recipe before changes: the preset's, the named one, or that of fine-tuning."""
    if plan.named is not None or from_scratch(plan.model, plan.tuning):
        return recipe_for(plan.model, plan.data, named=plan.named)
    if plan.tuning.freeze:
        return FROZEN
    return replace(FINE_TUNING, flip=False) if plan.data in OF_DIGITS else FINE_TUNING


def shape_with_token(model: str, shape: Overrides, teaching: TeacherOptions) -> Overrides:
    """A preset's shape with a distillation token; ViTs that read CLS have one unless --no-distill-token."""
    has_cls = model in VIT_PRESETS and shape.get("pooling", "cls") == "cls"
    wanted = teaching.teacher is not None and teaching.token is not False and has_cls
    return {**shape, "distillation": True} if wanted else shape


def fine_tuned_row(model: Model, tuning: Tuning) -> FineTunedRow:
    """The model that is fine-tuned, and which part of it."""
    trained, whole = trained_share(model, last=tuning.trained)
    origin = model.provenance
    return FineTunedRow(
        Path(origin.name).name, Path(origin.weights).name, tuning.trained, trained, whole, "; ".join(origin.notes)
    )


def _for_images(recipe: Recipe, changes: Mapping[str, object], split: Split, processes: int) -> Recipe:
    """The recipe with smaller batches for few images, unless an option sets their size."""
    if "batch_size" in changes:
        return recipe
    return fitted(recipe, len(split), processes=processes, rate_given="learning_rate" in changes)


def _part(data: str, part: Part, preprocessing: Preprocessing, run: RunOptions) -> Split:
    split = load_data(data, part=part, preprocessing=preprocessing, data_dir=run.data_dir, seed=run.seed)
    return split.limit(run.limit, seed=run.seed)


def _trained(
    plan: TrainPlan, recipe: Recipe, device: torch.device, run: RunOptions, code_files: tuple[str, ...]
) -> tuple[Model, Split, Split]:
    """A trained model with a head for the data's classes, and both parts of the data preprocessed for it.

    Raises InputError for options of shape, for more blocks than it has, for freezing a model with random weights, and
    for a recipe whose images cannot be cached.
    """
    tuning = plan.tuning
    if plan.shape:
        raise InputError(
            f"expected a trained model as it is, found --{next(iter(plan.shape)).replace('_', '-')} for {plan.model}; "
            "leave it out, or train a preset from scratch"
        )
    if tuning.freeze:
        require_cacheable(recipe, views=tuning.views or 1)
    chosen: dict[str, Any] = {"weights": tuning.weights, "image_size": plan.image_size, "code_files": code_files}
    model = load(plan.model, device=device, seed=run.seed, **chosen)
    require_supported(model, "train")
    require_last(model, tuning.trained)
    if tuning.trained is not None:
        require_learned(model, option="--freeze-backbone" if tuning.freeze else "--train-last")
    train, test = (_part(plan.data, part, model.preprocessing, run) for part in _PARTS)
    return for_classes(model, train.classes), train, test
