"""Models for tests of the lens, and copies that are cut by hand where the lens changes a place."""

import copy
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

import vitlens
from tests.kit.models.handwritten import (
    EinsumViT,
    EncoderViT,
    InlineViT,
    MultiheadViT,
    SoftmaxViT,
    wrapped,
)
from tests.kit.select import values_of
from tests.kit.tiny import images, ours, shaken, shared_model, small_cnn
from vitlens import AttentionCall, Model
from vitlens.errors import UnknownNameError, UnsupportedError
from vitlens.lens.attention import projection_of
from vitlens.lens.intervene import Change
from vitlens.lens.trace import layers

SAME = {"atol": 1e-5, "rtol": 1e-4}


# one sequence, by CLS
PLAIN = (
    "ours",
    "ours-unfused",
    "vit",
    "dinov2-registers",
    "torchvision-vit",
    "registers",
)
ATTENTIVE = (*PLAIN, "siglip", "cait", "swin", "torchvision-swin")
MODELS: dict[str, Callable[[], Model]] = {
    **{name: partial(shared_model, name) for name in ATTENTIVE},
    "registers": cache(lambda: ours(registers=2)),
    "cnn": cache(lambda: small_cnn((16, 24))),
}
HANDWRITTEN: dict[str, Callable[[], Model]] = {
    name: cache(partial(wrapped, partial(shaken, module)))
    for name, module in {
        "softmax": SoftmaxViT,
        "einsum": EinsumViT,  # attention that stands in no block
        "multihead": MultiheadViT,
        "encoder": EncoderViT,  # (tokens, batch, dim)
        "inline": InlineViT,  # attention and MLP in one module
    }.items()
}
EVERY = {**MODELS, **HANDWRITTEN}


def of(model: Model, *, batch: int = 3, seed: int = 0) -> Tensor:
    """Draw images of the model's size."""
    return images(model.input_size, batch=batch, seed=seed)


def calls_of(model: Model, batch: Tensor, **how: bool) -> list[AttentionCall]:
    """Return the calls of attention in the order of the forward pass."""
    calls: list[AttentionCall] = []
    vitlens.observe(model, batch, calls.append, **how)
    return calls


def changed(model: Model, batch: Tensor, changes: dict[str, Change], **options: object) -> Tensor:
    """Return the logits under changes."""
    with torch.no_grad(), vitlens.intervene(model, changes, **options):
        return model(batch)


def changeable(model: Model) -> list[str]:
    """Return the names of the places that can be changed."""
    return [place.name for place in vitlens.places(model) if place.changeable]


def heads_by_layer(model: Model) -> list[int]:
    """Return the number of heads of each layer."""
    return values_of(layers(model), "heads")


def removable(model: Model, layer: int) -> bool:
    """Return True if the block of a layer may be removed."""
    try:
        with vitlens.intervene(model, {f"blocks.{layer}": "remove"}):
            return True
    except (UnknownNameError, UnsupportedError):
        return False


def without_head(model: Model, layer: int, head: int, constant: Tensor | None = None) -> Model:
    """Return a copy whose output projection reads a constant (its bias) in place of a head."""
    cut = copy.deepcopy(model)
    block = layers(model)[layer]
    projection = projection_of(cut, block.attention)
    assert projection is not None
    columns = slice(head * block.head_dim, (head + 1) * block.head_dim)
    with torch.no_grad():
        if constant is not None:
            added = projection.weight[:, columns] @ constant
            projection.bias = nn.Parameter(
                added if projection.bias is None else projection.bias + added, False
            )
        projection.weight[:, columns] = 0
    return cut


def entering(model: Model, layer: int, batch: Tensor, *, projection: bool = False) -> Tensor:
    """Return the input of a layer's block, or of its output projection, by a plain hook."""
    block = layers(model)[layer]
    module = (
        projection_of(model, block.attention)
        if projection
        else model.module.get_submodule(block.unit)
    )
    which = 0 if projection else block.stream
    seen = []
    handle = module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[which]))
    with torch.no_grad():
        model(batch)
    handle.remove()
    return seen[0]


def hooked(
    model: Model, batch: Tensor, path: str, write: Callable[[Tensor], Tensor], *, before: bool
) -> Tensor:
    """Return the logits with a plain hook that rewrites the output of a module, or its input."""
    module = model.module.get_submodule(path)
    if before:
        handle = module.register_forward_pre_hook(
            lambda _module, inputs: (write(inputs[0]), *inputs[1:])
        )
    else:
        handle = module.register_forward_hook(lambda _module, _inputs, output: write(output))
    with torch.no_grad():
        logits = model(batch)
    handle.remove()
    return logits


def module_paths(model: Model, layer: int) -> tuple[str, str | None, str | None]:
    """Return the names of a layer's block, its output projection and its MLP."""
    block = layers(model)[layer]
    paths = {module: path for path, module in model.module.named_modules()}
    projection = projection_of(model, block.attention)
    return block.unit, None if projection is None else paths[projection], block.mlp
