"""Which part of a model a module or a parameter belongs to: patch embedding, attention, MLP, stage ..."""

import re
from bisect import bisect_left
from collections import Counter
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
        self._end = max((place for name, place in self._place.items() if _within(name, self._blocks)), default=0)
        self._containers = list(dict.fromkeys(name.rpartition(".")[0] for name in self._blocks))

    def of_module(self, name: str) -> str:
        """The part that a module's own operations belong to; "" is the model itself."""
        if not name:
            return OTHER
        module, place, block = self._modules[name], self._place[name], _within(name, self._blocks)
        before = bool(self._blocks) and place < self._starts[0]
        if not self._has_tokens:  # a CNN
            if not self._blocks:
                return HEAD if isinstance(module, nn.Linear) else CONVOLUTIONS
            if before or place > self._end:
                return STEM if before else HEAD
            # layers between two stages (ConvNeXt's downsampling) are counted with the later stage
            block = block or self._blocks[bisect_left(self._starts, place)]
            return f"{STAGE} {self._containers.index(block.rpartition('.')[0])}"
        if not any(True for _ in module.children()) and _NORM.search(type(module).__name__):
            return NORMS
        if any(_POSITION.search(word) for word in name.split(".")):
            return POSITIONS
        if _within(name, self._attention):
            return PROJECTIONS
        if block:
            return MLP
        return EMBEDDING if before or not self._blocks else HEAD if place > self._end else BETWEEN

    def of_parameter(self, name: str) -> str:
        """The part that a parameter belongs to."""
        owner, _, last = name.rpartition(".")
        if self._has_tokens and _POSITION.search(last):
            return POSITIONS
        return NORMS if self._has_tokens and _SCALE.search(last) else self.of_module(owner)


def _within(name: str, others: Iterable[str]) -> str | None:
    """The one of other modules that a module is, or is part of."""
    return next((other for other in others if name == other or name.startswith(f"{other}.")), None)


def in_order(parts: Iterable[str]) -> list[str]:
    """Each part once, in the order of a forward pass."""
    order = list(PARTS)

    def place(part: str) -> tuple[int, int]:
        word, _, number = part.rpartition(" ")
        return (order.index(STAGE), int(number)) if word == STAGE else (order.index(part), 0)

    return sorted(set(parts), key=place)


def parameters_by_part(model: Model) -> dict[str, int]:
    """How many parameters each part has; their sum is the model's parameter_count()."""
    parts, counts = Parts(model), Counter[str]()
    for name, parameter in model.module.named_parameters():
        counts[parts.of_parameter(name)] += parameter.numel()
    return {part: counts[part] for part in in_order(counts)}
