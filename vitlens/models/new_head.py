"""A trained model with a new classifier for other classes; its backbone is unchanged."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import nn

from vitlens.errors import UnsupportedError
from vitlens.models.assembly import Architecture, assemble, count_classes
from vitlens.models.language_image import LanguageImage
from vitlens.models.model import Model
from vitlens.models.vit import VisionTransformer, interpolate_positions


def for_classes(model: Model, classes: tuple[str, ...]) -> Model:
    """The model with a zero-initialised head for these classes (Dosovitskiy 2021, section 3.2), unless it has them.

    Our ViTs get position embeddings for the grid of the input size, which are trained like the others. The changes are
    recorded in the provenance's notes. The given model is not changed. Raises UnsupportedError for a model whose
    classifier cannot be identified.
    """
    module, notes = deepcopy(model.module), list(_resizing_notes(model))
    if notes:
        _resize_positions(module, model.input_size)
    if model.classes != classes:
        known = len(model.classes)
        module = _with_zeroed_head(module, len(classes), name=model.alias)
        outputs = count_classes(module, model.input_size)
        if outputs != len(classes):
            raise UnsupportedError(f"expected {len(classes)} logits of {model.alias} with a new head, found {outputs}")
        change = f"replaced the head of {known} classes by one of" if known else "added a head for"
        notes.append(f"{change} the data's {len(classes)}{'' if known else ' classes'}, all zeros")
    architecture = Architecture.from_json(model.architecture)
    architecture = replace(architecture, classes=len(classes), image_size=model.input_size)
    provenance = replace(model.provenance, notes=(*model.provenance.notes, *notes))
    adapted = assemble(module, architecture, model.preprocessing, classes, model.alias, provenance)
    return adapted.to(model.device).eval().requires_grad_(False)


def require_replaceable(model: Model) -> None:
    """Raise UnsupportedError for a model whose head cannot be replaced."""
    if isinstance(model.module, LanguageImage):
        raise UnsupportedError(f"expected a model that ends in a classifier, found the image tower {model.alias!r}")
    if not hasattr(model.module, "reset_classifier"):
        for path in classifiers(model.module):
            _require_linear(model.module, path, name=model.alias)


def classifiers(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that compute the logits: one, or two of a distilled model.

    For timm's models, those in pretrained_cfg; else head and head_dist, or the last linear layer. Raises
    UnsupportedError for a model without a linear layer.
    """
    config = getattr(model, "pretrained_cfg", None)
    named = config.get("classifier") if isinstance(config, dict) else None
    if named:
        return (named,) if isinstance(named, str) else tuple(named)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UnsupportedError("expected a model that ends in a linear layer, found none; choose another model")
    return ("head", "head_dist") if linear[-1] == "head_dist" else (linear[-1],)


def _with_zeroed_head(model: nn.Module, classes: int, *, name: str) -> nn.Module:
    """The model with a zero-initialised classifier for this number of classes."""
    reset: Any = getattr(model, "reset_classifier", None)  # timm's method: some heads are more than a linear layer
    if reset is not None:
        reset(classes)
    else:
        for path in classifiers(model):
            old = _require_linear(model, path, name=name)
            parent, _, last = path.rpartition(".")
            new = nn.Linear(old.in_features, classes, bias=old.bias is not None)
            setattr(model.get_submodule(parent), last, new)
    for path in classifiers(model):
        for parameter in model.get_submodule(path).parameters():
            nn.init.zeros_(parameter)
    if isinstance(model, VisionTransformer):
        model.config = replace(model.config, classes=classes)
    return model


def _require_linear(model: nn.Module, path: str, *, name: str) -> nn.Linear:
    module = model.get_submodule(path)
    if not isinstance(module, nn.Linear):
        raise UnsupportedError(f"expected a linear layer at {path!r} of {name}, found {type(module).__name__}")
    return module


def _resizing_notes(model: Model) -> Iterator[str]:
    """A note for the provenance where the position embeddings must be resized to the input size."""
    module = model.module
    if isinstance(module, VisionTransformer) and module.config.image_size != model.input_size:
        (height, width), (new_height, new_width) = module.config.image_size, model.input_size
        yield f"resized the position embeddings from {height}x{width} to {new_height}x{new_width} px"


def _resize_positions(model: nn.Module, image_size: tuple[int, int]) -> None:
    """Resize the position embeddings of our ViT to another image size."""
    assert isinstance(model, VisionTransformer)
    config = replace(model.config, image_size=image_size)
    if model.pos_embed is not None:
        prefix = len(config.layout.prefix) - config.registers
        grids = {"grid": model.layout.grid, "to": config.layout.grid}
        model.pos_embed = nn.Parameter(interpolate_positions(model.pos_embed.detach(), prefix=prefix, **grids))
    model.config = config
