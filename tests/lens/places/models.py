"""Models whose places are tried, each made once: ours, timm's, nn.MultiheadAttention, windows, a CNN."""

from collections.abc import Callable
from functools import cache, partial

from torch import nn

from tests.attribution.models import cnn
from tests.lens.tiny import ours, shaken, shared_model
from tests.models.handwritten import EinsumViT, EncoderViT, InlineViT, MultiheadViT, SoftmaxViT
from vitlens.models.model import Model
from vitlens.models.wrap import wrap


def handwritten(module: Callable[[], nn.Module]) -> Model:
    """A wrapped module, as a user would write it."""
    return wrap(shaken(module), image_size=(24, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


MODELS: dict[str, Callable[[], Model]] = {
    **{
        name: partial(shared_model, name)
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
ATTENTIVE = tuple(name for name in MODELS if name != "cnn")
PLAIN = ("ours", "ours-unfused", "vit", "dinov2-registers", "torchvision-vit", "registers")  # one sequence, by CLS
