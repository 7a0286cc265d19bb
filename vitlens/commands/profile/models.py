"""The models whose cost is measured: with or without weights, presets at several patch sizes, other image sizes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.profile.record import Size
from vitlens.commands.scaffold.load import load_models
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.models.assembly import default_classes
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.models.naming import ModelName, parse_models, require_rule
from vitlens.models.resizing import untrained_at
from vitlens.models.sources.registry import source_of
from vitlens.models.vit_config import VIT_PRESETS

FACTORS: Final = (0.5, 0.75, 1.0, 1.5, 2.0)  # of the model's own image side


def load_for_cost(options: ProfileOptions, run: RunOptions) -> tuple[tuple[Model, ...], dict[str, list[str]]]:
    """The models, and by alias of each preset with several patch sizes the aliases of its variants.

    A model without weights of its own (a preset, a name of a hub) stays untrained. Each ViT preset is built with each
    of the patch sizes, as alias-p4 and so on. Raises InputError for patch sizes without a ViT preset.
    """
    model_options, patch_sizes = options.model_options, options.patch_sizes
    require_rule(options.models)
    named = parse_models(options.models)
    repatched = [model for model in named if patch_sizes and model.name in VIT_PRESETS and not model.weights]
    if patch_sizes and not repatched:
        raise InputError(
            f"expected a preset of a ViT with --patch-size, found {', '.join(model.name for model in named)}; "
            f"try {next(iter(VIT_PRESETS))}, or --sizes for any model"
        )
    if model_options.weights is not None:
        return load_models(options.models, model_options=model_options, options=run), {}
    loaded: list[Model] = []
    variants: dict[str, list[str]] = {}
    for model in named:
        variants_of_model = [*_patched(model, patch_sizes, model_options, run)] if model in repatched else []
        if variants_of_model:
            variants[model.alias] = [variant.alias for variant in variants_of_model]
        loaded += variants_of_model or [_loaded(model, model_options, run)]
    return tuple(loaded), variants


def _loaded(model: ModelName, model_options: ModelOptions, options: RunOptions) -> Model:
    source = source_of(model.name)
    if not model.weights and (source is None or source.weights != "own"):
        model_options = replace(model_options, random_weights=True)
    (loaded,) = load_models([model], model_options=model_options, options=options)
    return loaded


def _patched(
    model: ModelName, patch_sizes: Sequence[Size], model_options: ModelOptions, options: RunOptions
) -> Iterator[Model]:
    for height, width in patch_sizes:
        word = f"{height}" if height == width else f"{height}x{width}"
        loaded = untrained(
            model.name,
            classes=default_classes(VIT_PRESETS[model.name].classes),
            image_size=model_options.image_size,
            seed=options.seed,
            alias=f"{model.alias}-p{word}",
            overrides={"patch_size": [height, width]},
        )
        loaded.provenance = replace(loaded.provenance, weights="random")
        yield loaded.to(resolve_device(options.device)).eval().requires_grad_(False)


def sized(model: Model, sizes: Sequence[Size] = ()) -> Iterator[tuple[Size, Model | str]]:
    """The model at several image sizes, one at a time; by default from half to double its own side.

    A default size at which it does not run gives the reason in words; for a size of --sizes it is raised (InputError).
    """
    for size in sizes or default_sizes(model):
        try:
            yield size, untrained_at(model, size)
        except InputError as error:
            if sizes:
                raise
            yield size, str(error)


def default_sizes(model: Model) -> list[Size]:
    """FACTORS times the model's own size, in whole patches (without patches, in steps of 8 px or less)."""
    sides = model.input_size
    layout = model.anatomy.layout
    units = layout.patch_size if layout is not None else (_step(sides[0]), _step(sides[1]))
    height, width = (
        [max(1, round(side / unit * factor)) * unit for factor in FACTORS] for side, unit in zip(sides, units)
    )
    return list(dict.fromkeys(zip(height, width)))


def _step(side: int) -> int:
    return next((unit for unit in (8, 4, 2) if side % unit == 0 and side // unit >= 4), 1)
