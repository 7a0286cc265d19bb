"""The architectures of vitlens by name, untrained or with weights from a file."""

from collections.abc import Mapping
from dataclasses import asdict

from torch import Tensor, nn

from vitlens.errors import InputError, ModelError
from vitlens.models.configs import SWIN_PRESETS, VIT_PRESETS, SwinConfig, ViTConfig
from vitlens.models.cutting import UNCUT
from vitlens.models.fitting import load_strictly
from vitlens.models.rebuild import Architecture
from vitlens.models.resnet import build_resnet
from vitlens.models.swin import SwinTransformer, from_timm
from vitlens.models.vit import VisionTransformer
from vitlens.names import PRESETS
from vitlens.preprocessing import Preprocessing
from vitlens.typed import read_as

# settings of a ViT that a Swin lacks, and why
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
    """Return a preset, with these weights or random ones, and its preprocessing.

    The preprocessing is of the whole image, scaled to [-1, 1]. The default number of classes is
    that of the weights' head, else the preset's.
    """
    name = architecture.name
    if name not in PRESETS:
        raise ModelError(f"expected a preset, found {name!r}; see vitlens models")
    if state is not None and name in SWIN_PRESETS:
        state = from_timm(state)
    classes = architecture.classes
    if classes is None and state is not None:
        for head in ("fc.weight", "head.weight"):  # of a ResNet, and of a ViT or Swin
            if head in state and state[head].ndim:
                classes = len(state[head])
    config = VIT_PRESETS.get(name) or SWIN_PRESETS.get(name)
    module: nn.Module
    if config is None:
        _require_no_overrides(architecture)
        size = architecture.image_size or (32, 32)
        module = build_resnet(name, classes=classes or 10, image_size=size)
    else:
        config = _change_config(config, architecture, classes)
        size = config.image_size
        if isinstance(config, ViTConfig):
            module = VisionTransformer(config)
        else:
            module = SwinTransformer(config)
    if state is not None:
        load_strictly(module, state, where=name)
    return module, Preprocessing(size)


def _require_no_overrides(architecture: Architecture) -> None:
    """Raise InputError for settings of a ViT with a CNN."""
    overrides = sorted(architecture.overrides.items())
    if not overrides:
        return
    option, value = overrides[0]
    raise InputError(
        f"expected no --{option.replace('_', '-')} for {architecture.name}, a CNN without that "
        f"setting, found {value}; leave it out, or train a ViT such as vit-micro"
    )


def _change_config(
    config: ViTConfig | SwinConfig, architecture: Architecture, classes: int | None
) -> ViTConfig | SwinConfig:
    """Return a preset's shape with the settings of an architecture.

    Raises InputError for settings that the preset lacks, ModelError for a Swin with removed heads.
    """
    name = architecture.name
    changes: dict[str, object] = dict(architecture.overrides)
    if isinstance(config, SwinConfig):
        if architecture.pruned:
            raise ModelError(f"expected all heads of {name}, found some removed; {UNCUT}")
        for option, reason in _NOT_OF_SWIN.items():
            # a list has one value for each stage, which is a Swin's form of the setting
            if option not in changes or isinstance(changes[option], list):
                continue
            raise InputError(
                f"expected no --{option} for {name}, {reason}, found {changes[option]!r}; leave it "
                "out, or train a ViT"
            )
    if classes is not None:
        changes["classes"] = classes
    if architecture.image_size is not None:
        changes["image_size"] = architecture.image_size
    fields = asdict(config)
    unknown = sorted(set(changes) - set(fields))
    if unknown:
        family = "ViT" if isinstance(config, ViTConfig) else "Swin"
        raise InputError(
            f"expected fields of a {family}, found {unknown[0]!r}; known: {', '.join(fields)}"
        )
    return read_as(type(config), fields | changes, source=f"the shape of {name}")
