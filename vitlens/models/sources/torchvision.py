"""torchvision's classification models, with its weights, weights from a file, or random ones."""

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants
from torch import Tensor, nn

from vitlens.errors import ModelError, UnknownNameError
from vitlens.models.fitting import load_strictly
from vitlens.models.rebuild import Architecture
from vitlens.models.sources.hub import pretrained_download
from vitlens.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Interpolation, Preprocessing
from vitlens.references import import_without_compiler

import_without_compiler("torchvision")
import torchvision  # noqa: E402

_ONLY_TENSORS: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # read by torch.load


def torchvision_names() -> list[str]:
    """Return the names of torchvision's classification models."""
    return list(torchvision.models.list_models(module=torchvision.models))


def build(
    architecture: Architecture,
    *,
    state: Mapping[str, Tensor] | None = None,
    pretrained: bool = False,
) -> tuple[nn.Module, Preprocessing]:
    """Return one of torchvision's models and the preprocessing of its training.

    Its weights are those of the state dict, its hub's, or random.
    """
    name = architecture.name
    size = architecture.image_size
    if name not in torchvision_names():
        raise UnknownNameError(
            "torchvision model", name, torchvision_names(), hint="vitlens models 'torchvision:*'"
        )
    weights: Any = torchvision.models.get_model_weights(name).DEFAULT
    if pretrained:
        with pretrained_download(f"torchvision:{name}", "https://download.pytorch.org"):
            file_name = Path(urlsplit(weights.url).path).name
            file = Path(torch.hub.get_dir()) / "checkpoints" / file_name
            # torch.hub does not obey the setting of the other hub, and would download
            # pretrained_download sets it without a network
            if constants.HF_HUB_OFFLINE and not file.is_file():
                raise OSError(f"not in the cache: {file}")
            with _only_tensors_read(file):
                model: nn.Module = torchvision.models.get_model(name, weights=weights)
    else:
        options: dict[str, Any] = {}
        if architecture.classes is not None:
            options["num_classes"] = architecture.classes
        if size is not None and name.startswith("vit_"):  # its images are square
            options["image_size"] = size[0]
        model = torchvision.models.get_model(name, weights=None, **options)
    if state is not None:
        load_strictly(model, state, where=f"torchvision:{name}")
    transforms = weights.transforms()
    crop_side = transforms.crop_size[0]
    crop = (crop_side, crop_side)
    resize = None  # at another size, the whole image is resized
    if size in (None, crop):
        resize = transforms.resize_size[0]
    interpolation: Interpolation = "bilinear"
    if transforms.interpolation.value == "bicubic":
        interpolation = "bicubic"
    mean = tuple(transforms.mean or IMAGENET_MEAN)
    std = tuple(transforms.std or IMAGENET_STD)
    preprocessing = Preprocessing(
        size=size or crop, resize=resize, interpolation=interpolation, mean=mean, std=std
    )
    return model, preprocessing


@contextmanager
def _only_tensors_read(file: Path) -> Iterator[None]:
    """Keep torch.hub, which unpickles what it finds in its cache, to plain tensors inside.

    Raises ModelError for a file that would run code.
    """
    previous = os.environ.get(_ONLY_TENSORS)
    os.environ[_ONLY_TENSORS] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"expected a plain state dict in {file}, found a pickle that would run code: refused; "
            "remove the file, so that it is downloaded again"
        ) from error
    finally:
        if previous is None:
            del os.environ[_ONLY_TENSORS]
        else:
            os.environ[_ONLY_TENSORS] = previous
