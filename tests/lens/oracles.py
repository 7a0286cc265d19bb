"""What the lens is compared with: windows put back, libraries' own partitions, cut projections, modules of users."""

import copy
from collections.abc import Callable
from functools import cache, partial

import torch
from jaxtyping import Float
from timm.models.swin_transformer import window_partition
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attribution.models import cnn
from tests.lens.tiny import ours, shaken, shared_model
from tests.models.handwritten import EinsumViT, EncoderViT, InlineViT, MultiheadViT, SoftmaxViT
from vitlens.lens.attention import projection_of
from vitlens.lens.call import window_index
from vitlens.lens.intervene import Change, intervene
from vitlens.lens.site import Windows
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

SHAPES = {  # resolution, window, shift
    "plain": ((8, 8), (4, 4), (0, 0)),
    "shifted": ((8, 8), (4, 4), (2, 2)),
    "not square": ((8, 12), (4, 4), (2, 2)),
    "window not square": ((8, 12), (4, 6), (2, 3)),
    "padded": ((5, 7), (4, 4), (2, 2)),
    "one window": ((4, 4), (4, 4), (0, 0)),
    "one padded window": ((3, 4), (4, 4), (2, 2)),
}


def changed(model: Model, batch: Tensor, changes: dict[str, Change], **options: object) -> Tensor:
    """The logits under changes."""
    with torch.no_grad(), intervene(model, changes, **options):
        return model(batch)


def unwindow(
    weights: Float[Tensor, "calls heads inside inside"], windows: Windows
) -> Float[Tensor, "batch heads patches patches"]:
    """The weights between all patches of the map, zero where two patches share no window; weights: row by row.

    Rows sum to 1 minus the mass on padding. `calls` holds the windows of each image one after another.
    """
    index = window_index(windows).to(weights.device)
    count, patches = len(index), windows.resolution[0] * windows.resolution[1]
    split = weights.unflatten(0, (-1, count)).transpose(1, 2)  # (batch, heads, count, inside, inside)
    # padding gets an extra row and column, which is cut off at the end
    place = index.masked_fill(index < 0, patches)
    full = weights.new_zeros(*split.shape[:2], patches + 1, patches + 1)
    full[:, :, place[:, :, None], place[:, None, :]] = split
    return full[:, :, :patches, :patches]


def timm_tokens(resolution: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]) -> Tensor:
    """Numbers of the patches as timm's block lays them out: rolled, then padded, then cut (its _attn)."""
    tokens = torch.arange(1.0, 1 + resolution[0] * resolution[1]).view(1, *resolution, 1)
    tokens = tokens.roll((-shift[0], -shift[1]), (1, 2))
    tokens = F.pad(tokens, (0, 0, 0, -resolution[1] % window[1], 0, -resolution[0] % window[0]))
    return window_partition(tokens, window).flatten(1) - 1  # 0 was padding


def torchvision_tokens(resolution: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]) -> Tensor:
    """The same as torchvision's shifted_window_attention: padded, then rolled (never where one window covers all)."""
    tokens = torch.arange(1.0, 1 + resolution[0] * resolution[1]).view(1, *resolution, 1)
    tokens = F.pad(tokens, (0, 0, 0, -resolution[1] % window[1], 0, -resolution[0] % window[0]))
    _, height, width, _ = tokens.shape
    down, across = (0 if size <= w else s for size, w, s in zip((height, width), window, shift))
    tokens = tokens.roll((-down, -across), (1, 2))
    tokens = tokens.view(1, height // window[0], window[0], width // window[1], window[1], 1)
    return tokens.permute(0, 1, 3, 2, 4, 5).reshape(-1, window[0] * window[1]) - 1


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
