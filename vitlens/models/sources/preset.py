"""vitlens's own architectures by name, untrained or with weights from a file."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TypeVar

from torch import Tensor, nn

from vitlens.errors import InputError, ModelError
from vitlens.models.assembly import Architecture
from vitlens.models.cutting import UNCUT
from vitlens.models.resnet import build_resnet
from vitlens.models.swin import SWIN_PRESETS, SwinTransformer, from_timm
from vitlens.models.swin_config import SwinConfig
from vitlens.models.vit import VIT_PRESETS, VisionTransformer
from vitlens.models.vit_config import ViTConfig
from vitlens.models.weights import load_strictly
from vitlens.names import PRESETS
from vitlens.preprocessing import Preprocessing
from vitlens.typed import read_as

Config = TypeVar("Config", ViTConfig, SwinConfig)


def build(
    architecture: Architecture,
    *,
    state: Mapping[str, Tensor] | None = None,
    pretrained: bool = False,  # noqa: ARG001  presets have no hub
) -> tuple[nn.Module, Preprocessing]:
    """A preset, with these weights or random ones, and its preprocessing: the whole image, scaled to [-1, 1].

    Without a number of classes, it is that of the weights' head, else the preset's.
    """
    name = architecture.name
    if name not in PRESETS:
        raise ModelError(f"expected a preset, found {name!r}; see vitlens models")
    if state is not None and name in SWIN_PRESETS:
        state = from_timm(state)
    classes = _classes_of(state) if architecture.classes is None and state is not None else architecture.classes
    make = _vit if name in VIT_PRESETS else _swin if name in SWIN_PRESETS else _resnet
    module, preprocessing = make(architecture, classes)
    if state is not None:
        load_strictly(module, state, where=name)
    return module, preprocessing


def _classes_of(state: Mapping[str, Tensor]) -> int | None:
    heads = (value for key, value in state.items() if key in ("head.weight", "fc.weight") and value.ndim)
    return next((len(head) for head in heads), None)


def _vit(architecture: Architecture, classes: int | None) -> tuple[nn.Module, Preprocessing]:
    config = _configured(VIT_PRESETS[architecture.name], architecture, classes, family="ViT")
    return VisionTransformer(config), Preprocessing(config.image_size)


def _swin(architecture: Architecture, classes: int | None) -> tuple[nn.Module, Preprocessing]:
    if architecture.pruned:
        raise ModelError(f"expected all heads of {architecture.name}, found some removed; {UNCUT}")
    for name in ("depth", "heads"):
        if isinstance(architecture.overrides.get(name), int):
            raise InputError(
                f"expected no --{name} for {architecture.name}, whose stages have their own, found "
                f"{architecture.overrides[name]}; leave it out, or train a ViT"
            )
    if "pooling" in architecture.overrides:
        raise InputError(
            f"expected no --pooling for {architecture.name}, which classifies by the mean of its patches, found "
            f"{architecture.overrides['pooling']!r}; leave it out, or train a ViT"
        )
    config = _configured(SWIN_PRESETS[architecture.name], architecture, classes, family="Swin")
    return SwinTransformer(config), Preprocessing(config.image_size)


def _configured(config: Config, architecture: Architecture, classes: int | None, *, family: str) -> Config:
    """The preset's shape with the architecture's changes. Raises InputError for a field that it does not have."""
    changes: dict[str, object] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in architecture.overrides.items()
    }
    if classes is not None:
        changes["classes"] = classes
    if architecture.image_size is not None:
        changes["image_size"] = architecture.image_size
    unknown = sorted(set(changes) - set(config.__dataclass_fields__))
    if unknown:
        raise InputError(
            f"expected fields of a {family}, found {unknown[0]!r}; known: {', '.join(config.__dataclass_fields__)}"
        )
    return read_as(type(config), asdict(config) | changes, source=f"the shape of {architecture.name}")


def _resnet(architecture: Architecture, classes: int | None) -> tuple[nn.Module, Preprocessing]:
    for name, value in sorted(architecture.overrides.items()):
        option = "--" + name.replace("_", "-")
        raise InputError(
            f"expected no {option} for {architecture.name}, a CNN without that setting, found {value}; leave it out, "
            "or train a ViT such as vit-micro"
        )
    size = architecture.image_size or (32, 32)
    return build_resnet(architecture.name, classes=classes or 10, image_size=size), Preprocessing(size)
