"""What `vitlens models` says: every name that can be loaded, and the commands that each supports."""

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Final, Literal

import torch

from vitlens.devices import evaluating
from vitlens.errors import ModelError, UnknownNameError
from vitlens.models.anatomy import is_headless
from vitlens.models.assembly import assemble, default_classes
from vitlens.models.build import Architecture, build_preset
from vitlens.models.model import Model, Provenance
from vitlens.models.open_clip_library import PREFIX, open_clip_names
from vitlens.models.open_clip_zoo import load_open_clip
from vitlens.models.support import supported
from vitlens.models.timm_zoo import build_timm, timm_names
from vitlens.models.torchvision_zoo import build_torchvision, torchvision_names
from vitlens.models.zoo import load
from vitlens.names import BUNDLED, PRESETS, CommandName

Hub = Literal["timm", "torchvision", "open-clip"]

_LOOK_AT_MOST = 40  # hub models whose anatomy is read; more take long
_OF_PRESETS: Final[tuple[CommandName, ...]] = ("study", "train", "profile")  # the commands that need no weights


def model_table(pattern: str = "") -> Iterator[str]:
    """Lines: names that match a pattern (or contain it), with what they are and the commands that they support.

    Without a pattern the hubs' models are only counted. Raises UnknownNameError where nothing matches.
    """
    found = [*_own(pattern)]
    yield from found
    hubs: dict[Hub, list[str]] = {
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
            model = load(name)
            yield _line(name, f"{model.anatomy.family}, bundled", " ".join(supported(model)))
    for name in PRESETS:
        if _matches(name, pattern):
            model = _sketched(Architecture("preset", name))
            able = [command for command in supported(model) if command in _OF_PRESETS]
            yield _line(name, f"{model.anatomy.family}, untrained", " ".join(able))


def _hub_model(kind: Hub, name: str) -> tuple[str, str]:
    """Family and commands, read from the model without giving it any weights."""
    try:
        model = _image_tower(name) if kind == "open-clip" else _sketched(Architecture(kind, name))
        family = "image and text" if kind == "open-clip" else model.anatomy.family
        what = f"{family}, {model.parameter_count() / 1e6:.1f} M parameters"
        return what, " ".join(supported(model))
    except (ModelError, NotImplementedError, RuntimeError):  # some look at their weights, or need another library
        return "not looked at", "a command says whether it is supported"


def _sketched(architecture: Architecture) -> Model:
    """A model without weights, on the meta device: what it supports is seen from shapes alone."""
    name = architecture.name
    with torch.device("meta"):
        build = {"preset": build_preset, "timm": build_timm, "torchvision": build_torchvision}[architecture.kind]
        model, preprocessing = build(architecture)
        with evaluating(model), torch.no_grad():
            outputs = model(torch.empty(1, 3, *preprocessing.size)).shape[-1]
    classes = () if is_headless(model) else default_classes(int(outputs))
    loaded = assemble(model, architecture, preprocessing, classes, name, Provenance(name, "random"))
    return loaded.to("meta").eval().requires_grad_(False)


def _image_tower(name: str) -> Model:
    with torch.device("meta"):
        model = load_open_clip(PREFIX + name.partition("/")[0], alias=name, random=True)
    return model.to("meta")


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or fnmatch(name.partition(":")[2], pattern) or pattern in name


def _line(name: str, what: str, commands: str) -> str:
    return f"{name:<44} {what:<30} {commands}"
