"""vitlens's own architectures by name, untrained or with weights from a file."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TypeVar

from torch import Tensor, nn

from vitlens.errors import InputError, ModelError
from vitlens.models.configs import SwinConfig, ViTConfig
from vitlens.models.cutting import UNCUT
from vitlens.models.rebuild import Architecture
from vitlens.models.resnet import build_resnet
from vitlens.models.swin import SWIN_PRESETS, SwinTransformer, from_timm
from vitlens.models.vit import VIT_PRESETS, VisionTransformer
from vitlens.models.weights import load_strictly
from vitlens.names import PRESETS
from vitlens.preprocessing import Preprocessing
from vitlens.typed import read_as

Config = TypeVar("Config", ViTConfig, SwinConfig)
_NOT_OF_SWIN = {
    "depth": "whose stages have their own",
    "heads": "whose stages have their own",
    "pooling": "which classifies by the mean of its patches",
}


def build(
    architecture: Architecture,
    *,
    state: Mapping[str, Tensor] | None = None,
    pretrained: bool = False,  # noqa: ARG001  presets have no hub
) -> tuple[nn.Module, Preprocessing]:
    """A preset, with these weights or random ones, and its preprocessing: the whole image, scaled to [-1, 1].

    Without a number of classes, it is that of the weights' head, else the preset's.
    """
    name, overrides = architecture.name, architecture.overrides
    size, classes = architecture.image_size, architecture.classes
    if name not in PRESETS:
        raise ModelError(f"expected a preset, found {name!r}; see vitlens models")
    if state is not None and name in SWIN_PRESETS:
        state = from_timm(state)
    for head in ("head.weight", "fc.weight"):
        if classes is None and state is not None and head in state and state[head].ndim:
            classes = len(state[head])
    module: nn.Module
    if name in VIT_PRESETS:
        config = _configured(VIT_PRESETS[name], architecture, classes, family="ViT")
        module, size = VisionTransformer(config), config.image_size
    elif name in SWIN_PRESETS:
        if architecture.pruned:
            raise ModelError(f"expected all heads of {name}, found some removed; {UNCUT}")
        for option, why in _NOT_OF_SWIN.items():
            value = overrides.get(option, [])
            if not isinstance(value, list):
                raise InputError(
                    f"expected no --{option} for {name}, {why}, found {value!r}; leave it out, or train a ViT"
                )
        swin = _configured(SWIN_PRESETS[name], architecture, classes, family="Swin")
        module, size = SwinTransformer(swin), swin.image_size
    else:
        for option, value in sorted(overrides.items()):
            raise InputError(
                f"expected no --{option.replace('_', '-')} for {name}, a CNN without that setting, found {value}; "
                "leave it out, or train a ViT such as vit-micro"
            )
        size = size or (32, 32)
        module = build_resnet(name, classes=classes or 10, image_size=size)
    if state is not None:
        load_strictly(module, state, where=name)
    return module, Preprocessing(size)


def _configured(config: Config, architecture: Architecture, classes: int | None, *, family: str) -> Config:
    """The preset's shape with the architecture's changes. Raises InputError for a field that it does not have."""
    given = {"classes": classes, "image_size": architecture.image_size}
    changes = {**architecture.overrides, **{key: value for key, value in given.items() if value is not None}}
    unknown = sorted(set(changes) - set(config.__dataclass_fields__))
    if unknown:
        raise InputError(
            f"expected fields of a {family}, found {unknown[0]!r}; known: {', '.join(config.__dataclass_fields__)}"
        )
    return read_as(type(config), asdict(config) | changes, source=f"the shape of {architecture.name}")
