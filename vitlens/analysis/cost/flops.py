"""Floating-point operations of one image's forward pass, by part: counted in any model, and by
formula for our ViT.

One multiplication with its addition counts as two operations. Matrix products and convolutions are
counted; norms, softmax, activations, biases, residual sums and the resizing of positions are not:
their number grows with the tokens, not with tokens times width.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitlens.devices import evaluating
from vitlens.lens.trace import probe_images
from vitlens.models.configs import ViTConfig
from vitlens.models.hooks import Arguments, watching
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate

_ATEN: Final = torch.ops.aten
_KERNELS: Final = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
    "attention_math_for_mps",
)
_NAMES: Final = [
    f"_scaled_dot_product_{kernel}" for kernel in _KERNELS
]  # of F.scaled_dot_product_attention
_FUSED: Final = tuple(
    getattr(_ATEN, name) for name in _NAMES if hasattr(_ATEN, name)
)  # as this version of torch has
_BETWEEN_TOKENS: Final = (
    *_FUSED,
    _ATEN.bmm,
    _ATEN.baddbmm,
)  # in attention: products of tokens with tokens

EMBEDDING = "patch embedding"
POSITIONS = "positions and tokens"
MLP = "MLP"
NORMS = "norms"
BETWEEN = "between stages"
PROJECTIONS = "attention projections"
PRODUCTS = "attention products"
STEM = "stem"
STAGE = "stage"
CONVOLUTIONS = "convolutions"
HEAD = "head"
OTHER = "other"
# In the order of a forward pass; a CNN's stages ("stage 0" ...) are at the place of "stage".
PARTS: Final[Mapping[str, str]] = {
    EMBEDDING: "from pixels to patch tokens",
    STEM: "the layers before the first stage of a CNN",
    POSITIONS: "position embeddings and biases, CLS, distillation and register tokens",
    PROJECTIONS: "queries, keys, values and the output projection of attention",
    PRODUCTS: "queries times keys and weights times values: they grow with the square of the "
    "number of tokens, within "
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


def flops_by_part(model: Model) -> dict[str, int]:
    """FLOPs of each part for one image of the model's own size, counted in a forward pass.

    In attention, the projections multiply tokens by parameters, the products multiply tokens by
    tokens. A module's own are the difference of the counter between entry and exit of its call,
    without what its children took.
    """
    images = probe_images(model, 1)
    parts = Parts(model)
    flops = Counter[str]()
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(_FUSED, _attention_flops))
    stack: list[
        tuple[Counter[Any], Counter[Any]]
    ] = []  # of each running module: the total at entry, its children's

    def enter(_name: str, _arguments: Arguments) -> None:
        stack.append((Counter(counter.flop_counts["Global"]), Counter()))

    def leave(name: str, _arguments: Arguments, _output: Any) -> None:
        before, inside = stack.pop()
        taken = Counter(counter.flop_counts["Global"]) - before
        part = parts.of_module(name)
        for operation, count in (taken - inside).items():
            flops[PRODUCTS if part == PROJECTIONS and operation in _BETWEEN_TOKENS else part] += (
                count
            )
        if stack:
            stack[-1][1].update(taken)

    names = [name for name, _ in model.module.named_modules()]
    with (
        evaluating(model),
        _countable(model),
        torch.no_grad(),
        counter,
        watching(model.module, names, leave, before=enter),
    ):
        model(images)
    return {part: flops[part] for part in in_order(flops) if flops[part]}


def vit_flops(config: ViTConfig) -> dict[str, int]:
    """FLOPs of each part of our ViT for one image of the config's size, by formula.

    With N tokens of width d, P patches of p pixels and an MLP of h hidden units, each block takes 8
    N d² for the four projections, 4 N² d for the two products, 4 N d h for the MLP.
    """
    tokens = config.layout.tokens
    patches = config.layout.patches
    dim = config.dim
    heads = 2 if config.distillation else 1
    flops = {
        EMBEDDING: 2 * patches * 3 * prod(config.patch_size) * dim,
        PROJECTIONS: config.depth * 8 * tokens * dim**2 * config.attention,
        PRODUCTS: config.depth * 4 * tokens**2 * dim * config.attention,
        MLP: config.depth * 4 * tokens * dim * config.hidden * config.mlp,
        HEAD: heads * 2 * dim * config.classes,
    }
    return {part: count for part, count in flops.items() if count}


def crossover(flops: Mapping[str, int], tokens: int) -> float:
    """Return the number of tokens at which the products of attention take as many FLOPs as the
    projections and the MLPs.

    flops: by part, counted at this many tokens in a model with one sequence of tokens and
    attention.
    """
    return tokens * (flops.get(PROJECTIONS, 0) + flops.get(MLP, 0)) / flops[PRODUCTS]


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of both products; shapes (..., query, head_dim), (..., key, head_dim), (..., key,
    value_dim).
    """
    *leading, queries, head_dim = query
    return int(2 * prod(leading) * queries * key[-2] * (head_dim + value[-1]))


@contextmanager
def _countable(model: nn.Module) -> Iterator[None]:
    """Inside, torch's counter sees every product: it fails on a view of a parameter that requires a
    gradient, and does not see into the fused inference kernel of nn.MultiheadAttention.
    """
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for parameter in learned:
            parameter.requires_grad_(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for parameter in learned:
            parameter.requires_grad_(True)


def exponent(tokens: ArrayLike, costs: ArrayLike) -> Estimate:
    """k of cost = c · tokensᵏ, least squares on logarithms, with Student's 95 % interval; n is the
    number of points.

    Two points have no interval. Of exact costs (FLOPs) it says how far the points are from one
    straight line.
    """
    x = np.log(np.asarray(tokens, dtype=np.float64))
    y = np.log(np.asarray(costs, dtype=np.float64))
    across = x - x.mean()
    up = y - y.mean()
    slope = float(across @ up / (across @ across))
    if len(x) == 2:
        return Estimate(slope, n=2, unit="")
    left = up - slope * across
    error = np.sqrt(left @ left / (len(x) - 2) / (across @ across))
    half = float(stats.t.ppf(0.975, len(x) - 2) * error)
    return Estimate(slope, slope - half, slope + half, len(x), "")


class Parts:
    """The parts of one model, by the names of the modules and parameters of `Model.module`."""

    def __init__(self, model: Model) -> None:
        self._modules = dict(model.module.named_modules())
        self._place = {name: index for index, name in enumerate(self._modules)}
        self._attention = model.anatomy.attention_modules
        self._has_tokens = bool(self._attention) or model.anatomy.layout is not None
        blocks = sorted(set(model.anatomy.blocks_with_attention), key=self._place.__getitem__)
        self._blocks = [
            name for name in blocks if not any(name.startswith(f"{other}.") for other in blocks)
        ]
        self._starts = [self._place[name] for name in self._blocks]
        self._end = max(
            (place for name, place in self._place.items() if _within(name, self._blocks)), default=0
        )
        self._containers = list(dict.fromkeys(name.rpartition(".")[0] for name in self._blocks))

    def of_module(self, name: str) -> str:
        """Return the part that a module's own operations belong to; "" is the model itself."""
        if not name:
            return OTHER
        module = self._modules[name]
        place = self._place[name]
        block = _within(name, self._blocks)
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
        """Return the part that a parameter belongs to."""
        owner, _, last = name.rpartition(".")
        if self._has_tokens and _POSITION.search(last):
            return POSITIONS
        return NORMS if self._has_tokens and _SCALE.search(last) else self.of_module(owner)


def _within(name: str, others: Iterable[str]) -> str | None:
    """Return the one of other modules that a module is, or is part of."""
    return next((other for other in others if name == other or name.startswith(f"{other}.")), None)


def in_order(parts: Iterable[str]) -> list[str]:
    """Return each part once, in the order of a forward pass."""
    order = list(PARTS)

    def place(part: str) -> tuple[int, int]:
        word, _, number = part.rpartition(" ")
        return (order.index(STAGE), int(number)) if word == STAGE else (order.index(part), 0)

    return sorted(set(parts), key=place)


def parameters_by_part(model: Model) -> dict[str, int]:
    """Return how many parameters each part has; their sum is the model's parameter_count()."""
    parts = Parts(model)
    counts = Counter[str]()
    for name, parameter in model.module.named_parameters():
        counts[parts.of_parameter(name)] += parameter.numel()
    return {part: counts[part] for part in in_order(counts)}
