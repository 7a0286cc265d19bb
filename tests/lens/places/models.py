"""Models whose places are tried: ours, timm's, nn.MultiheadAttention, windows, computed softmax, a CNN."""

from collections.abc import Callable
from functools import partial

from torch import nn

from tests.attribution.models import cnn
from tests.lens.tiny import FAMILIES, ours, shaken
from tests.models.handwritten import EinsumViT, EncoderViT, InlineViT, MultiheadViT, SoftmaxViT
from vitlens.models.model import Model
from vitlens.models.wrap import wrap


def handwritten(module: Callable[[], nn.Module]) -> Model:
    """A wrapped module, as a user would write it."""
    return wrap(shaken(module), image_size=(24, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


MODELS: dict[str, Callable[[], Model]] = {
    **{
        name: FAMILIES[name]
        for name in (
            "ours",
            "ours-unfused",
            "vit",
            "dinov2-registers",
            "siglip",
            "cait",
            "swin",
            "torchvision-vit",
            "torchvision-swin",
        )
    },
    "registers": lambda: ours(registers=2),
    "cnn": lambda: cnn((16, 24)),
}
HANDWRITTEN: dict[str, Callable[[], Model]] = {
    "softmax": partial(handwritten, SoftmaxViT),
    "einsum": partial(handwritten, EinsumViT),  # attention that stands in no block
    "multihead": partial(handwritten, MultiheadViT),
    "encoder": partial(handwritten, EncoderViT),  # (tokens, batch, dim)
    "inline": partial(handwritten, InlineViT),  # attention and MLP in one module
}
EVERY = {**MODELS, **HANDWRITTEN}
ATTENTIVE = tuple(name for name in MODELS if name != "cnn")
PLAIN = ("ours", "ours-unfused", "vit", "dinov2-registers", "torchvision-vit", "registers")  # one sequence, by CLS
