"""Models whose places are tried: ours, timm's, nn.MultiheadAttention, windows, computed softmax, a CNN."""

from collections.abc import Callable

from tests.attribution.models import cnn
from tests.lens.tiny import FAMILIES, ours
from vitlens.models.model import Model

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
ATTENTIVE = tuple(name for name in MODELS if name != "cnn")
PLAIN = ("ours", "ours-unfused", "vit", "dinov2-registers", "torchvision-vit", "registers")  # one sequence, by CLS
