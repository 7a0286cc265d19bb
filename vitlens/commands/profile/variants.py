"""Load the models of `vitlens profile`, of which presets may be built in several patch sizes.

Such a model is a variant of the preset.
"""

from collections.abc import Mapping
from dataclasses import replace

from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.profile.record import Size
from vitlens.commands.run.load import load_models
from vitlens.commands.run.options import RunOptions
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.models.configs import VIT_PRESETS
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.models.model_names import ModelName, parse_models, require_rule
from vitlens.models.rebuild import default_classes
from vitlens.models.sources.registry import source_of

# alias of a preset -> alias of a variant -> patch size
Variants = Mapping[str, Mapping[str, Size]]


def variants_by_preset(options: ProfileOptions) -> Variants:
    """Return the variants of each ViT preset that --patch-size asks for, such as "vit-tiny-p4".

    Raises InputError if no model is a ViT preset, and for --weights, which fit one patch size.
    """
    require_rule(options.models)
    models = parse_models(options.models)
    if not options.patch_sizes:
        return {}
    if options.model_options.weights is not None:
        raise InputError(
            "expected --patch-size without --weights, found both: weights fit one patch size; "
            "leave one out"
        )
    variants = {}
    for model in models:
        if model.name in VIT_PRESETS and not model.weights:
            variants[model.alias] = _variants_of(model.alias, options.patch_sizes)
    if not variants:
        names = ", ".join(model.name for model in models)
        example, *_ = VIT_PRESETS
        raise InputError(
            f"expected a ViT preset with --patch-size, found {names}; try {example}, or --sizes "
            "for any model"
        )
    return variants


def _variants_of(alias: str, patch_sizes: tuple[Size, ...]) -> dict[str, Size]:
    variants = {}
    for height, width in patch_sizes:
        suffix = f"{height}" if height == width else f"{height}x{width}"
        variants[f"{alias}-p{suffix}"] = (height, width)
    return variants


def load_for_profile(
    options: ProfileOptions, run_options: RunOptions, variants: Variants
) -> tuple[Model, ...]:
    """Return the models, and variants in place of their presets.

    Models for which no weights are given, presets and names of a hub, get random ones.
    """
    model_options = options.model_options
    if model_options.weights is not None:
        return load_models(options.models, model_options=model_options, options=run_options)
    loaded: list[Model] = []
    for model in parse_models(options.models):
        if model.alias in variants:
            for alias, patch_size in variants[model.alias].items():
                loaded.append(
                    _untrained_variant(options, run_options, model.name, alias, patch_size)
                )
            continue
        source_options = model_options
        if _has_no_weights(model):
            source_options = replace(model_options, random_weights=True)
        loaded += load_models([model], model_options=source_options, options=run_options)
    return tuple(loaded)


def _untrained_variant(
    options: ProfileOptions, run_options: RunOptions, preset: str, alias: str, patch_size: Size
) -> Model:
    """Return a preset with another patch size and random weights."""
    variant = untrained(
        preset,
        classes=default_classes(VIT_PRESETS[preset].classes),
        image_size=options.model_options.image_size,
        seed=run_options.seed,
        alias=alias,
        overrides={"patch_size": [*patch_size]},
    )
    variant.provenance = replace(variant.provenance, weights="random")
    device = resolve_device(run_options.device)
    return variant.to(device).eval().requires_grad_(False)


def _has_no_weights(model: ModelName) -> bool:
    """Return True if a model's name gives no weights, and its source does not hold them itself."""
    if model.weights:
        return False
    source = source_of(model.name)
    return source is None or source.weights != "own"
