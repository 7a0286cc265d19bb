"""What a training starts from that is no preset from scratch: a trained model, with a head for the data's classes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from vitlens.commands.scaffold.options import RunOptions
from vitlens.data.catalogue import load_data
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.new_head import for_classes
from vitlens.models.support import require_supported
from vitlens.names import PRESETS, Part
from vitlens.runs.train_options import Tuning
from vitlens.training.finetune import require_last, require_learned, trained_share
from vitlens.training.head import require_cacheable
from vitlens.training.recipe import FINE_TUNING, FROZEN, Recipe, recipe_for

_PARTS: tuple[Part, ...] = ("train", "test")
_WRITTEN = ("digits", "mnist", "svhn")  # a mirrored 2 is no 2


def from_scratch(model: str, tuning: Tuning) -> bool:
    """Whether a name stands for a preset with random weights."""
    return model in PRESETS and tuning.weights is None


def usual_recipe(model: str, data: str, tuning: Tuning, *, named: str | None) -> Recipe:
    """The recipe of a fine-tuning: the one that is named, else that of a head alone or of everything."""
    if named is not None:
        return recipe_for(model, data, named=named)
    if tuning.freeze:
        return FROZEN
    return replace(FINE_TUNING, flip=False) if data in _WRITTEN else FINE_TUNING


def trained_start(
    model: str,
    data: str,
    tuning: Tuning,
    recipe: Recipe,
    shape: Mapping[str, object],
    image_size: tuple[int, int] | None,
    device: torch.device,
    options: RunOptions,
) -> tuple[Model, tuple[Split, Split]]:
    """A trained model with a head for the data's classes, and both parts of the data as it takes them.

    Raises InputError for a shape, which a trained model has already, for more blocks than it has, where a model with
    random weights is to be frozen, and for a recipe whose images cannot be cached.
    """
    if shape:
        raise InputError(
            f"expected a trained model as it is, found --{next(iter(shape)).replace('_', '-')} for {model}; "
            "leave it out, or train a preset from scratch"
        )
    if tuning.freeze:
        require_cacheable(recipe, views=tuning.views or 1)
    loaded = load(model, weights=tuning.weights, image_size=image_size, device=device, seed=options.seed)
    require_supported(loaded, "train")
    require_last(loaded, tuning.trained)
    if tuning.trained is not None:
        require_learned(loaded, option="--freeze-backbone" if tuning.freeze else "--train-last")
    train, test = (
        load_data(
            data, part=part, preprocessing=loaded.preprocessing, data_dir=options.data_dir, seed=options.seed
        ).limit(options.limit, seed=options.seed)
        for part in _PARTS
    )
    return for_classes(loaded, train.classes), (train, test)


def started_from(model: Model, tuning: Tuning) -> str:
    """What was trained further, and what of it, in words for the report."""
    trained, whole = trained_share(model, last=tuning.trained)
    part = {None: "all of it", 0: "its head alone", 1: "its last block and its head"}.get(
        tuning.trained, f"its last {tuning.trained} blocks and its head"
    )
    weights = Path(model.provenance.weights).name
    notes = "".join(f"; {note}" for note in model.provenance.notes)
    name = Path(model.provenance.name).name
    return f"`{name}` (weights: {weights}) was trained further, {part}: {trained:,} of {whole:,} parameters{notes}."
