"""timm's models, with its hub's weights, weights from a file, or random ones."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitlens.errors import ModelError, UnknownNameError, VitlensError
from vitlens.models.assembly import Architecture
from vitlens.models.sources.hub import endpoint, pretrained_download
from vitlens.preprocessing import Interpolation, Preprocessing
from vitlens.references import import_without_compiler

import_without_compiler("timm")
import timm  # noqa: E402

_PLAIN = {"vision_transformer", "deit"}  # modules of timm whose models are plain ViTs
_IMAGENET = 1000  # classes, whose names are known


def timm_names(pattern: str = "*") -> list[str]:
    """timm's model names that match a shell pattern."""
    return list(timm.list_models(pattern))


def build(
    architecture: Architecture, *, state: Mapping[str, Tensor] | None = None, pretrained: bool = False
) -> tuple[nn.Module, Preprocessing]:
    """One of timm's models, with these weights, its hub's, or random; and the preprocessing of its training.

    Positions are resized by timm's own loader. Raises UnknownNameError, or ModelError for weights that do not fit.
    """
    name = architecture.name
    if not timm.is_model(name.partition(".")[0]):
        raise UnknownNameError("timm model", name, timm.list_models(), hint=f"vitlens models '{name.split('_')[0]}*'")
    if "." in name and name not in timm.list_pretrained(f"{name.partition('.')[0]}.*"):
        raise UnknownNameError(
            "timm model", name, timm.list_pretrained(), hint=f"vitlens models '{name.split('_')[0]}*'"
        )
    options: dict[str, Any] = {}
    if architecture.classes is not None:
        options["num_classes"] = architecture.classes
    if state is not None:
        classes = _classes_of(name, state)
        if None not in (classes, architecture.classes) and classes != architecture.classes:
            raise ModelError(
                f"expected a head of {architecture.classes} classes for timm:{name}, found one of {classes}; "
                "check the weights"
            )
        # timm silently drops a head of another size unless its configuration has the number of classes
        options["pretrained_cfg_overlay"] = {"state_dict": dict(state)} | (
            {} if classes is None else {"num_classes": classes}
        )
        if classes is not None:
            options.setdefault("num_classes", classes)
    logging.getLogger("timm").setLevel(logging.ERROR)
    if pretrained:
        with pretrained_download(f"timm:{name}", f"{endpoint()}/timm/{name}"):
            model = _create(name, architecture.image_size, pretrained=True, **options)
    else:
        model = _create(name, architecture.image_size, pretrained=state is not None, **options)
    return model, _preprocessing(model, architecture.image_size)


def _create(name: str, image_size: tuple[int, int] | None, **options: Any) -> nn.Module:
    model: nn.Module
    try:
        try:
            model = timm.create_model(name, **options, **({} if image_size is None else {"img_size": image_size}))
        except TypeError:  # a CNN accepts any size and has no such argument
            model = timm.create_model(name, **options)
        return model
    except Exception as error:  # timm's weight converters raise nearly anything for damaged weights
        overlay = options.get("pretrained_cfg_overlay")
        if overlay is None or isinstance(error, VitlensError | MemoryError):
            raise
        raise ModelError(_misfit(name, overlay["state_dict"], error)) from error


def _misfit(name: str, state: Mapping[str, Tensor], error: Exception) -> str:
    expected = timm.create_model(name).state_dict()
    missing = [key for key in expected if key not in state]
    unexpected = [key for key in state if key not in expected]
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing (first {missing[0]!r})")
    if unexpected:
        parts.append(f"{len(unexpected)} unexpected (first {unexpected[0]!r})")
    last = (str(error).splitlines() or [type(error).__name__])[-1]
    reason = "; ".join(parts) or last.strip()[:160]
    return f"weights do not fit timm:{name}: {reason}; check the name"


def _classes_of(name: str, state: Mapping[str, Tensor]) -> int | None:
    """The number of classes of the head in a state dict."""
    config = timm.models.get_pretrained_cfg(name)
    heads = config.classifier if config is not None else None
    for head in (heads,) if isinstance(heads, str) else heads or ():
        weight = state.get(f"{head}.weight")
        if weight is not None and weight.ndim and len(weight):
            return len(weight)
    return None


def _preprocessing(model: nn.Module, image_size: tuple[int, int] | None) -> Preprocessing:
    config: Mapping[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    height, width = image_size or config["input_size"][1:]
    resize = math.floor(min(height, width) / config["crop_pct"]) if height == width else None
    interpolation: Interpolation = "bilinear" if config["interpolation"] == "bilinear" else "bicubic"
    return Preprocessing((height, width), resize, interpolation, tuple(config["mean"]), tuple(config["std"]))


def is_vit_of_imagenet(name: str) -> bool:
    """Whether one of timm's names, with or without a tag, is that of a plain ViT with ImageNet's 1000 classes."""
    base, _, tag = name.partition(".")
    if not timm.is_model(base) or not timm.models.is_model_in_modules(base, _PLAIN):
        return False
    if tag and name not in timm.list_pretrained(f"{base}.*"):
        return False
    config = timm.models.get_pretrained_cfg(name)
    return config is not None and config.num_classes == _IMAGENET
