"""Which part of a model a module or a parameter belongs to: patch embedding, attention, MLP, stage ..."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from torch import nn

from vitlens.models.model import Model

EMBEDDING, POSITIONS, MLP, NORMS, BETWEEN = "patch embedding", "positions and tokens", "MLP", "norms", "between stages"
PROJECTIONS, PRODUCTS = "attention projections", "attention products"
STEM, STAGE, CONVOLUTIONS, HEAD, OTHER = "stem", "stage", "convolutions", "head", "other"

# In the order of a forward pass; a CNN's stages ("stage 0" ...) are at the place of "stage".
PARTS: Final[Mapping[str, str]] = {
    EMBEDDING: "from pixels to patch tokens",
    STEM: "the layers before the first stage of a CNN",
    POSITIONS: "position embeddings and biases, CLS, distillation and register tokens",
    PROJECTIONS: "queries, keys, values and the output projection of attention",
    PRODUCTS: "queries times keys and weights times values: they grow with the square of the number of tokens, within "
    "windows with the number of windows",
    MLP: "the rest of each block, without its norms",
    NORMS: "norms and layer scales of a model with tokens",
    BETWEEN: "patch merging and other layers between the blocks of a model with tokens",
    STAGE: "blocks of one width, their norms included",
    CONVOLUTIONS: "the layers before the classifier of a CNN without repeated blocks",
    HEAD: "the layers after the last block",
    OTHER: "operations outside any submodule",
}

_POSITION = re.compile(r"pos_|_pos$|^pos$|posemb|position|relative|cpb_|rope|rpe|tokens?$|^latent$")
_SCALE = re.compile(r"^(gamma|ls|layer_scale)")
_NORM = re.compile(r"norm|layerscale|affine", re.IGNORECASE)


class Parts:
    """The parts of one model, by the names of the modules and parameters of `Model.module`."""

    def __init__(self, model: Model) -> None:
        self._modules = dict(model.module.named_modules())
        self._place = {name: index for index, name in enumerate(self._modules)}
        self._attention = model.anatomy.attention_modules
        self._has_tokens = bool(self._attention) or model.anatomy.layout is not None
        blocks = sorted(set(model.anatomy.blocks), key=self._place.__getitem__)
        self._blocks = [name for name in blocks if not any(name.startswith(f"{other}.") for other in blocks)]
        self._starts = [self._place[name] for name in self._blocks]
        self._end = max((place for name, place in self._place.items() if self._block_of(name)), default=0)
        self._containers = list(dict.fromkeys(name.rpartition(".")[0] for name in self._blocks))

    def of_module(self, name: str) -> str:
        """The part that a module's own operations belong to; "" is the model itself."""
        if not name:
            return OTHER
        return self._in_transformer(name) if self._has_tokens else self._in_cnn(name)

    def of_parameter(self, name: str) -> str:
        """The part that a parameter belongs to."""
        owner, _, last = name.rpartition(".")
        if self._has_tokens and _POSITION.search(last):
            return POSITIONS
        if self._has_tokens and _SCALE.search(last):
            return NORMS
        return self.of_module(owner)

    def _in_transformer(self, name: str) -> str:
        module = self._modules[name]
        if not any(True for _ in module.children()) and _NORM.search(type(module).__name__):
            return NORMS
        if any(_POSITION.search(word) for word in name.split(".")):
            return POSITIONS
        if any(name == other or name.startswith(f"{other}.") for other in self._attention):
            return PROJECTIONS
        if self._block_of(name):
            return MLP
        if not self._blocks or self._place[name] < self._starts[0]:
            return EMBEDDING
        return HEAD if self._place[name] > self._end else BETWEEN

    def _in_cnn(self, name: str) -> str:
        if not self._blocks:
            return HEAD if isinstance(self._modules[name], nn.Linear) else CONVOLUTIONS
        place = self._place[name]
        if place < self._starts[0]:
            return STEM
        if place > self._end:
            return HEAD
        # layers between two stages (ConvNeXt's downsampling) are counted with the later stage
        block = self._block_of(name) or self._blocks[bisect_left(self._starts, place)]
        return f"{STAGE} {self._containers.index(block.rpartition('.')[0])}"

    def _block_of(self, name: str) -> str | None:
        return next((block for block in self._blocks if name == block or name.startswith(f"{block}.")), None)


def in_order(parts: Iterable[str]) -> list[str]:
    """Each part once, in the order of a forward pass."""
    order = list(PARTS)

    def place(part: str) -> tuple[int, int]:
        word, _, number = part.rpartition(" ")
        return (order.index(STAGE), int(number)) if word == STAGE else (order.index(part), 0)

    return sorted(set(parts), key=place)


def parameters_by_part(model: Model) -> dict[str, int]:
    """How many parameters each part has; their sum is the model's parameter_count()."""
    parts, counts = Parts(model), dict[str, int]()
    for name, parameter in model.module.named_parameters():
        part = parts.of_parameter(name)
        counts[part] = counts.get(part, 0) + parameter.numel()
    return {part: counts[part] for part in in_order(counts)}
