"""A trained model with a new classifier for other classes; its backbone is unchanged."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.assembly import Architecture, count_classes
from vitlens.models.language_image import LanguageImage
from vitlens.models.memo import per_model
from vitlens.models.model import Model
from vitlens.models.outputs import first_output
from vitlens.models.rebuilding import with_module
from vitlens.models.vit import VisionTransformer


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
        module = _with_zeroed_head(model, module, len(classes))
        change = f"replaced the head of {known} classes by one of" if known else "added a head for"
        notes.append(f"{change} the data's {len(classes)}{'' if known else ' classes'}, all zeros")
    architecture = Architecture.from_json(model.architecture)
    architecture = replace(architecture, classes=len(classes), image_size=model.input_size)
    provenance = replace(model.provenance, notes=(*model.provenance.notes, *notes))
    try:
        adapted = with_module(model, module, architecture, classes, provenance)
    except InputError as error:  # of a traced module that has another number of logits
        raise UnsupportedError(f"expected {len(classes)} logits of {model.alias} with a new head: {error}") from error
    outputs = count_classes(adapted, model.input_size)
    if outputs != len(classes):
        raise UnsupportedError(f"expected {len(classes)} logits of {model.alias} with a new head, found {outputs}")
    return adapted.eval().requires_grad_(False)


def require_replaceable(model: Model) -> None:
    """Raise UnsupportedError for a model whose head cannot be replaced."""
    if isinstance(model.module, LanguageImage):
        raise UnsupportedError(f"expected a model that ends in a classifier, found the image tower {model.alias!r}")
    if not _resets_its_classifier(model.module):
        for path in classifiers(model):
            _require_linear(model.module, path, name=model.alias)


def classifiers(model: Model) -> tuple[str, ...]:
    """Names of the modules that compute the logits: one, or two of a distilled model.

    For a module whose structure was read from forward passes, the linear layer whose outputs are the logits; else as
    its library or the names of its layers say. Raises UnsupportedError for a model without such a layer.
    """
    return named_classifiers(model.module) if model.told is None else _observed(model)


@per_model
def _observed(model: Model) -> tuple[str, ...]:
    """The linear layer whose outputs are what the module returns as logits, in a forward pass of noise."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _, __, output: outputs.update({name: output})

    linear = [(name, layer) for name, layer in model.module.named_modules() if isinstance(layer, nn.Linear)]
    with ExitStack() as stack, evaluating(model), torch.no_grad():
        for name, layer in linear:
            stack.callback(layer.register_forward_hook(keep(name)).remove)
        noise = torch.rand(2, 3, *model.input_size, generator=torch.Generator().manual_seed(0)).to(model.device)
        logits = first_output(model.module(model.prepare(noise)))
    last = [name for name, output in outputs.items() if torch.equal(output, logits)]
    if not last:
        raise UnsupportedError(
            f"expected the logits of {model.alias} to be the output of a linear layer, found none whose outputs they "
            f"are (of {len(linear)}); end forward in an nn.Linear"
        )
    return (last[-1],)


def named_classifiers(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that compute the logits, by timm's pretrained_cfg or by their names and order."""
    config = getattr(model, "pretrained_cfg", None)
    named = config.get("classifier") if isinstance(config, dict) else None
    if named:
        return (named,) if isinstance(named, str) else tuple(named)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UnsupportedError("expected a model that ends in a linear layer, found none; choose another model")
    return ("head", "head_dist") if linear[-1] == "head_dist" else (linear[-1],)


def _resets_its_classifier(module: Any) -> bool:
    """Whether it has timm's method, as some heads are more than a linear layer; a user's may mean something else."""
    ours = type(module).__module__.startswith("vitlens.") or getattr(module, "pretrained_cfg", None) is not None
    return ours and hasattr(module, "reset_classifier")


def _with_zeroed_head(model: Model, module: Any, classes: int) -> nn.Module:
    """A copy of the model's module with a zero-initialised classifier for this number of classes."""
    if _resets_its_classifier(module):
        module.reset_classifier(classes)
        paths = named_classifiers(module)
    else:
        paths = classifiers(model)
        for path in paths:
            old = _require_linear(module, path, name=model.alias)
            parent, _, last = path.rpartition(".")
            new = nn.Linear(old.in_features, classes, bias=old.bias is not None)
            setattr(module.get_submodule(parent), last, new.to(old.weight.device, old.weight.dtype))
    for path in paths:
        for parameter in module.get_submodule(path).parameters():
            nn.init.zeros_(parameter)
    if isinstance(module, VisionTransformer):
        module.config = replace(module.config, classes=classes)
    return module  # type: ignore[no-any-return]


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
        done = {"learned": "resized the position embeddings", "none": "changed the image size"}
        change = done.get(str(module.config.positions), "computed the position embeddings again")
        yield f"{change} from {height}x{width} to {new_height}x{new_width} px"


def _resize_positions(model: nn.Module, image_size: tuple[int, int]) -> None:
    """Resize the position embeddings of our ViT to another image size."""
    assert isinstance(model, VisionTransformer)
    config = replace(model.config, image_size=image_size)
    if model.pos_embed is not None:
        resized = model.positions(config.layout.grid).detach()
        model.pos_embed = nn.Parameter(resized) if isinstance(model.pos_embed, nn.Parameter) else resized
    model.config = config
