"""What `vitlens models` says: every name that can be loaded, and the commands that each supports."""

from collections.abc import Iterator
from fnmatch import fnmatch

import torch

from vitlens.errors import UnknownNameError
from vitlens.models.anatomy import read_anatomy
from vitlens.models.build import Architecture
from vitlens.models.open_clip_library import PREFIX, open_clip_names
from vitlens.models.specimen import Family
from vitlens.models.timm_zoo import build_timm, timm_names
from vitlens.models.torchvision_zoo import build_torchvision, torchvision_names
from vitlens.names import BUNDLED, PRESETS

_LOOK_AT_MOST = 40  # hub models whose anatomy is read; more take long
_SUPPORTED: dict[Family, str] = {
    "vit": "predict train evaluate attention rollout compare explain attack features profile study",
    "windowed": "predict train evaluate attention compare explain attack features profile",
    "cnn": "predict train evaluate compare explain attack features profile study",
    "other": "predict train evaluate compare explain attack features profile",
}


def model_table(pattern: str = "") -> Iterator[str]:
    """Lines: names that match a pattern (or contain it), with what they are and the commands that they support.

    Without a pattern the hubs' models are only counted. Raises UnknownNameError where nothing matches.
    """
    found = [*_own(pattern)]
    yield from found
    hubs = {
        "timm": [name for name in timm_names("*") if _matches(f"timm:{name}", pattern)],
        "torchvision": [name for name in torchvision_names() if _matches(f"torchvision:{name}", pattern)],
        "open-clip": [name for name in open_clip_names() if _matches(f"{PREFIX}{name}", pattern)],
    }
    if not pattern:
        for kind, names in hubs.items():
            if kind == "open-clip" and not names:
                yield _line("open-clip:ARCH/TAG", "not installed", "pip install 'vitlens[clip]'")
                continue
            what = "ARCH/TAG" if kind == "open-clip" else "NAME"
            yield _line(f"{kind}:{what}", f"{len(names)} models", f"vitlens models '{kind}:*' lists them")
        return
    few = sum(map(len, hubs.values())) <= _LOOK_AT_MOST
    for kind, names in hubs.items():
        for name in names:
            yield _line(f"{kind}:{name}", *_hub_model(kind, name)) if few else f"{kind}:{name}"
    if not few:
        yield f"more than {_LOOK_AT_MOST} models: a narrower pattern also says which commands each supports"
    if not found and not any(hubs.values()):
        raise UnknownNameError("model", pattern, (*BUNDLED, *PRESETS, *timm_names("*")), hint="vitlens models")


def _own(pattern: str) -> Iterator[str]:
    for name in BUNDLED:
        if _matches(name, pattern):
            family: Family = "vit" if name.startswith("vit") else "cnn"
            yield _line(name, f"{family}, bundled", _SUPPORTED[family])
    for name in PRESETS:
        if _matches(name, pattern):
            yield _line(name, f"{'vit' if name.startswith('vit') else 'cnn'}, untrained", "train profile study")


def _hub_model(kind: str, name: str) -> tuple[str, str]:
    """Family and commands, read from the model without giving it any weights."""
    if kind == "open-clip":
        return "image and text", "features explain rollout attention stats"
    build = build_timm if kind == "timm" else build_torchvision
    try:
        with torch.device("meta"):
            model, preprocessing = build(Architecture("timm" if kind == "timm" else "torchvision", name))
    except (NotImplementedError, RuntimeError):  # some look at their weights while they are made
        return "not looked at", "predict evaluate profile"
    family = read_anatomy(model, image_size=preprocessing.size).family
    return f"{family}, {sum(part.numel() for part in model.parameters()) / 1e6:.1f} M parameters", _SUPPORTED[family]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or fnmatch(name.partition(":")[2], pattern) or pattern in name


def _line(name: str, what: str, commands: str) -> str:
    return f"{name:<44} {what:<30} {commands}"
