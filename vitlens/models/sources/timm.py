"""timm's models, with its hub's weights, weights from a file, or random ones."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitlens.errors import ModelError, UnknownNameError, VitlensError, first_line
from vitlens.models.fitting import require_fitting
from vitlens.models.rebuild import Architecture
from vitlens.models.sources.hub import endpoint, pretrained_download
from vitlens.preprocessing import Preprocessing
from vitlens.references import import_without_compiler

import_without_compiler("timm")
import timm  # noqa: E402

_PLAIN = {"vision_transformer", "deit"}  # modules of timm with plain ViTs
_IMAGENET = 1000  # the number of ImageNet's classes, whose names are known


def timm_names() -> list[str]:
    """Return timm's model names."""
    return list(timm.list_models())


def _is_known(name: str) -> bool:
    """Return True if timm has this architecture and, for a name with a tag, such weights."""
    base, _, tag = name.partition(".")
    return timm.is_model(base) and (not tag or name in timm.list_pretrained(f"{base}.*"))


def is_vit_of_imagenet(name: str) -> bool:
    """Return True for timm's name, with or without a tag, of a plain ViT of ImageNet's classes."""
    if not _is_known(name) or not timm.models.is_model_in_modules(name.partition(".")[0], _PLAIN):
        return False
    config = timm.models.get_pretrained_cfg(name)
    return config is not None and config.num_classes == _IMAGENET


def build(
    architecture: Architecture,
    *,
    state: Mapping[str, Tensor] | None = None,
    pretrained: bool = False,
) -> tuple[nn.Module, Preprocessing]:
    """Return one of timm's models and the preprocessing of its training.

    Its weights are those of the state dict, its hub's, or random. Positions are resized by timm's
    loader. Raises UnknownNameError, or ModelError for weights that do not fit.
    """
    name = architecture.name
    size = architecture.image_size
    # None: those of the weights' head, or timm's default; 0: no head
    requested_classes = architecture.classes
    if not _is_known(name):
        base, _, _ = name.partition(".")
        names = timm.list_pretrained() if timm.is_model(base) else timm.list_models()
        hint = f"vitlens models '{name.split('_')[0]}*'"
        raise UnknownNameError("timm model", name, names, hint=hint)
    options: dict[str, Any] = {}
    if size is not None:
        options["img_size"] = size
    if state is not None:
        stored_classes = _classes_of(name, state)
        # None for weights without a head
        are_both_known = stored_classes is not None and requested_classes is not None
        if are_both_known and stored_classes != requested_classes:
            raise ModelError(
                f"expected a head of {requested_classes} classes for timm:{name}, found one of "
                f"{stored_classes}; check the weights"
            )
        # timm takes the weights from its configuration of the model, which these entries replace
        overlay: dict[str, Any] = {"state_dict": dict(state)}
        # Timm silently drops a head with another number of classes than its configuration. So the
        # configuration gets the number in the weights, or 0 if no head is requested: such weights
        # have none, as others were refused above.
        configured_classes = 0 if requested_classes == 0 else stored_classes
        if configured_classes is not None:
            overlay["num_classes"] = configured_classes
        options["pretrained_cfg_overlay"] = overlay
        if requested_classes is None:
            requested_classes = stored_classes
    if requested_classes is not None:
        options["num_classes"] = requested_classes
    logging.getLogger("timm").setLevel(logging.ERROR)
    if pretrained:
        with pretrained_download(f"timm:{name}", f"{endpoint()}/timm/{name}"):
            model = _create(name, pretrained=True, **options)
    else:
        try:
            # "pretrained" also loads the weights of the overlay
            model = _create(name, pretrained=state is not None, **options)
        # timm's weight converters raise nearly anything for damaged weights
        except Exception as error:
            if state is None or isinstance(error, VitlensError | MemoryError):
                raise
            # raises an error that names the weights, if names or shapes do not fit
            require_fitting(timm.create_model(name), state, where=f"timm:{name}")
            raise ModelError(
                f"weights do not fit timm:{name}: {first_line(error)}; check the name"
            ) from error
    return model, preprocessing_of(model.pretrained_cfg, size)


def preprocessing_of(config: Mapping[str, Any], size: tuple[int, int] | None) -> Preprocessing:
    """Return the preprocessing of timm's evaluation (`create_transform`).

    size: (height, width), None for the model's.
    """
    evaluation = timm.data.resolve_data_config(pretrained_cfg=dict(config))
    _channels, default_height, default_width = evaluation["input_size"]
    height, width = size or (default_height, default_width)
    crop_fraction = evaluation["crop_pct"]  # the crop's share of the resized image
    scaled = (math.floor(height / crop_fraction), math.floor(width / crop_fraction))
    plain = Preprocessing(
        (height, width),
        interpolation=evaluation["interpolation"],
        mean=tuple(evaluation["mean"]),
        std=tuple(evaluation["std"]),
    )
    if evaluation["crop_mode"] == "squash":
        if scaled == plain.size:
            return plain
        return replace(plain, box=scaled, crop_mode="squash")
    if evaluation["crop_mode"] == "border":
        red, green, blue = (round(255 * channel) for channel in plain.mean)
        return replace(plain, box=scaled, crop_mode="border", fill=(red, green, blue))
    # a crop that is larger than the image gets a black border
    fill = (0, 0, 0) if crop_fraction > 1 else None
    if height == width:
        return replace(plain, resize=scaled[0], fill=fill)
    return replace(plain, box=scaled, fill=fill)


def _create(name: str, **options: Any) -> Any:
    try:
        return timm.create_model(name, **options)
    except TypeError:  # a CNN accepts any size and has no such argument
        options.pop("img_size", None)
        return timm.create_model(name, **options)


def _classes_of(name: str, state: Mapping[str, Tensor]) -> int | None:
    """Return the number of classes of the head in a state dict."""
    config = timm.models.get_pretrained_cfg(name)
    if config is None:
        return None
    heads = config.classifier or ()
    if isinstance(heads, str):
        heads = (heads,)
    for head in heads:
        weight = state.get(f"{head}.weight")
        if weight is not None and weight.ndim and len(weight):
            return len(weight)
    return None
