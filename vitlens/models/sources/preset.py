"""vitlens's own architectures by name, untrained or with weights from a file."""

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
    """Return a preset, with these weights or random ones, and its preprocessing: the whole image,
    scaled to [-1, 1].

    Without a number of classes, it is that of the weights' head, else the preset's.
    """
    name = architecture.name
    overrides = architecture.overrides
    if name not in PRESETS:
        raise ModelError(f"expected a preset, found {name!r}; see vitlens models")
    if state is not None and name in SWIN_PRESETS:
        state = from_timm(state)
    size = architecture.image_size
    classes = architecture.classes
    for head in ("head.weight", "fc.weight"):
        if classes is None and state is not None and head in state and state[head].ndim:
            classes = len(state[head])
    config = VIT_PRESETS.get(name) or SWIN_PRESETS.get(name)
    module: nn.Module
    if config is None:
        for option, value in sorted(overrides.items()):
            raise InputError(
                f"expected no --{option.replace('_', '-')} for {name}, a CNN without that setting, "
                f"found {value}; "
                "leave it out, or train a ViT such as vit-micro"
            )
        size = size or (32, 32)
        module = build_resnet(name, classes=classes or 10, image_size=size)
    else:
        if isinstance(config, SwinConfig):
            if architecture.pruned:
                raise ModelError(f"expected all heads of {name}, found some removed; {UNCUT}")
            for option, why in _NOT_OF_SWIN.items():
                if not isinstance(value := overrides.get(option, []), list):
                    raise InputError(
                        f"expected no --{option} for {name}, {why}, found {value!r}; leave it out, "
                        "or train a ViT"
                    )
        known = asdict(config)
        given = {"classes": classes, "image_size": size}
        changes = {**overrides, **{key: value for key, value in given.items() if value is not None}}
        if unknown := sorted(set(changes) - set(known)):
            family = "ViT" if isinstance(config, ViTConfig) else "Swin"
            raise InputError(
                f"expected fields of a {family}, found {unknown[0]!r}; known: {', '.join(known)}"
            )
        config = read_as(type(config), known | changes, source=f"the shape of {name}")
        module = (
            VisionTransformer(config) if isinstance(config, ViTConfig) else SwinTransformer(config)
        )
        size = config.image_size
    if state is not None:
        load_strictly(module, state, where=name)
    return module, Preprocessing(size)
