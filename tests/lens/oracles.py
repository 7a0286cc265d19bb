"""What the lens is compared with: windows put back, libraries' own partitions, cut projections, modules of users."""

import copy
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from tests.attribution.models import cnn
from tests.kit.tiny import ours, shaken, shared_model
from tests.kit.windows import SHAPES, timm_tokens, torchvision_tokens, unwindow  # noqa: F401 - for who imports them here
from tests.models.handwritten import EinsumViT, EncoderViT, InlineViT, MultiheadViT, SoftmaxViT
from vitlens.lens.attention import projection_of
from vitlens.lens.intervene import Change, intervene
from vitlens.lens.trace import Layer
from vitlens.models.model import Model
from vitlens.models.wrap import wrap


def handwritten(module: Callable[[], nn.Module]) -> Model:
    """A wrapped module, as a user would write it."""
    return wrap(shaken(module), image_size=(24, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


PLAIN = ("ours", "ours-unfused", "vit", "dinov2-registers", "torchvision-vit", "registers")  # one sequence, by CLS
ATTENTIVE = (*PLAIN, "siglip", "cait", "swin", "torchvision-swin")
MODELS: dict[str, Callable[[], Model]] = {
    **{name: partial(shared_model, name) for name in ATTENTIVE},
    "registers": cache(lambda: ours(registers=2)),
    "cnn": cache(lambda: cnn((16, 24))),
}
HANDWRITTEN: dict[str, Callable[[], Model]] = {
    "softmax": cache(partial(handwritten, SoftmaxViT)),
    "einsum": cache(partial(handwritten, EinsumViT)),  # attention that stands in no block
    "multihead": cache(partial(handwritten, MultiheadViT)),
    "encoder": cache(partial(handwritten, EncoderViT)),  # (tokens, batch, dim)
    "inline": cache(partial(handwritten, InlineViT)),  # attention and MLP in one module
}
EVERY = {**MODELS, **HANDWRITTEN}


def changed(model: Model, batch: Tensor, changes: dict[str, Change], **options: object) -> Tensor:
    """The logits under changes."""
    with torch.no_grad(), intervene(model, changes, **options):
        return model(batch)


def with_columns(model: Model, layer: Layer, head: int, constant: Tensor | None = None) -> Model:
    """A copy whose output projection does not read the head, but (its bias) a constant instead."""
    cut = copy.deepcopy(model)
    projection = projection_of(cut, layer.attention)
    columns = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
    with torch.no_grad():
        if constant is not None:
            added = projection.weight[:, columns] @ constant
            projection.bias = nn.Parameter(added if projection.bias is None else projection.bias + added, False)
        projection.weight[:, columns] = 0
    return cut


def projection_input(model: Model, layer: Layer, batch: Tensor) -> Tensor:
    """What a hook on the output projection sees."""
    seen: list[Tensor] = []
    projection = projection_of(model, layer.attention)
    handle = projection.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(batch)
    handle.remove()
    return seen[0]
