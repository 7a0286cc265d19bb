"""torchvision's classification models, with its weights, weights from a file, or random ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants
from torch import Tensor, nn

from vitlens.errors import UnknownNameError
from vitlens.models.assembly import Architecture
from vitlens.models.sources.hub import pretrained_download
from vitlens.models.weights import load_strictly
from vitlens.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Interpolation, Preprocessing
from vitlens.references import import_without_compiler

import_without_compiler("torchvision")
import torchvision  # noqa: E402

ADDRESS = "https://download.pytorch.org"


def torchvision_names() -> list[str]:
    """torchvision's classification models."""
    return list(torchvision.models.list_models(module=torchvision.models))


def build(
    architecture: Architecture, *, state: Mapping[str, Tensor] | None = None, pretrained: bool = False
) -> tuple[nn.Module, Preprocessing]:
    """One of torchvision's models, with these weights, its hub's, or random; and the preprocessing of its training."""
    name = architecture.name
    if name not in torchvision_names():
        raise UnknownNameError("torchvision model", name, torchvision_names(), hint="vitlens models 'torchvision:*'")
    weights = torchvision.models.get_model_weights(name).DEFAULT
    options: dict[str, Any] = {}
    if architecture.classes is not None:
        options["num_classes"] = architecture.classes
    if architecture.image_size is not None and name.startswith("vit_"):
        options["image_size"] = architecture.image_size[0]
    if pretrained:
        with pretrained_download(f"torchvision:{name}", ADDRESS):
            _require_cached_offline(weights.url)
            model: nn.Module = torchvision.models.get_model(name, weights=weights)
    else:
        model = torchvision.models.get_model(name, weights=None, **options)
    if state is not None:
        load_strictly(model, state, where=f"torchvision:{name}")
    return model, _preprocessing(weights, architecture.image_size)


def _require_cached_offline(address: str) -> None:
    """Raise OSError offline, which torch.hub does not obey, for weights that are not in its cache."""
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(address).path).name
    if constants.HF_HUB_OFFLINE and not file.is_file():
        raise OSError(f"not in the cache: {file}")


def _preprocessing(weights: Any, image_size: tuple[int, int] | None) -> Preprocessing:
    transforms = weights.transforms()
    crop = transforms.crop_size[0]
    size = image_size or (crop, crop)
    resize = transforms.resize_size[0] if size == (crop, crop) else None
    interpolation: Interpolation = "bicubic" if transforms.interpolation.value == "bicubic" else "bilinear"
    mean, std = tuple(transforms.mean or IMAGENET_MEAN), tuple(transforms.std or IMAGENET_STD)
    return Preprocessing(size, resize, interpolation, mean, std)
