"""Floating-point operations of one image's forward pass, by part: counted, and by formula.

The formula is that of our ViT. One multiplication with its addition counts as two operations. Only
matrix products and convolutions are counted. Norms, softmax, activations, biases, residual sums and
the resizing of positions are left out: each takes only a few operations per value.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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
# the operations of F.scaled_dot_product_attention, as far as this version of torch has them
_NAMES: Final = [f"_scaled_dot_product_{kernel}" for kernel in _KERNELS]
_FUSED: Final = tuple(getattr(_ATEN, name) for name in _NAMES if hasattr(_ATEN, name))
# the operations that attention uses for products of tokens with tokens
_BETWEEN_TOKENS: Final = (*_FUSED, _ATEN.bmm, _ATEN.baddbmm)

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
# The parts in the order of a forward pass. A CNN has "stage 0", "stage 1" and so on for "stage".
PARTS: Final[Mapping[str, str]] = {
    EMBEDDING: "from pixels to patch tokens",
    STEM: "the layers before the first stage of a CNN",
    POSITIONS: "position embeddings and biases, CLS, distillation and register tokens",
    PROJECTIONS: "queries, keys, values and the output projection of attention",
    PRODUCTS: (
        "queries times keys and weights times values: they grow with the square of the number of "
        "tokens, within windows with the number of windows"
    ),
    MLP: "the rest of each block, without its norms",
    NORMS: "norms and layer scales of a model with tokens",
    BETWEEN: "patch merging and other layers between the blocks of a model with tokens",
    STAGE: "blocks of one width, their norms included",
    CONVOLUTIONS: "the layers before the classifier of a CNN without repeated blocks",
    HEAD: "the layers after the last block",
    OTHER: "operations outside any submodule",
}
# names of modules and parameters in POSITIONS
_POSITION = re.compile(r"pos_|_pos$|^pos$|posemb|position|relative|cpb_|rope|rpe|tokens?$|^latent$")
_SCALE = re.compile(r"^(gamma|ls|layer_scale)")  # names of parameters in NORMS
_NORM = re.compile(r"norm|layerscale|affine", re.IGNORECASE)  # types of modules in NORMS


@dataclass
class _Running:
    """A module that is running. FLOPs are counted by operation.

    at_entry: the counter of all FLOPs when the module started.
    in_children: the FLOPs of its children so far.
    """

    at_entry: Counter[Any]
    in_children: Counter[Any] = field(default_factory=Counter)


def flops_by_part(model: Model) -> dict[str, int]:
    """Return the FLOPs of each part for one image of the model's size, counted in a forward pass.

    In attention, the projections multiply tokens by parameters, and the products multiply tokens by
    tokens. A counter counts all FLOPs. Those of a module are the difference between its values at
    entry to and exit from the module, minus the FLOPs of the module's children.
    """
    images = probe_images(model, 1)
    parts = Parts(model)
    flops = Counter[str]()
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(_FUSED, _attention_flops))
    running: list[_Running] = []  # from the outermost module to the innermost

    def enter(_name: str, _arguments: Arguments) -> None:
        """Keep the counter; called before each module."""
        running.append(_Running(at_entry=Counter(counter.flop_counts["Global"])))

    def leave(name: str, _arguments: Arguments, _output: Any) -> None:
        """Add the FLOPs of a module to its part; called after each module."""
        module = running.pop()
        total = Counter(counter.flop_counts["Global"]) - module.at_entry
        part = parts.of_module(name)
        for operation, count in (total - module.in_children).items():
            if part == PROJECTIONS and operation in _BETWEEN_TOKENS:
                flops[PRODUCTS] += count
            else:
                flops[part] += count
        if running:
            parent = running[-1]
            parent.in_children.update(total)

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
    """Return the FLOPs of each part of our ViT for one image of the config's size, by formula.

    Each block takes 8 N d² for the four projections, 4 N² d for the two products and 4 N d h for
    the MLP. N is the number of tokens, d their width and h the number of hidden units. The
    embedding takes 6 P p d for P patches of p pixels.
    """
    tokens = config.layout.tokens
    patches = config.layout.patches
    dim = config.dim
    heads = 2 if config.distillation else 1
    # config.attention and config.mlp are False, a factor of 0, for a model without them
    flops = {
        EMBEDDING: 2 * patches * 3 * prod(config.patch_size) * dim,  # three colours
        PROJECTIONS: config.depth * 8 * tokens * dim**2 * config.attention,
        PRODUCTS: config.depth * 4 * tokens**2 * dim * config.attention,
        MLP: config.depth * 4 * tokens * dim * config.hidden * config.mlp,
        HEAD: heads * 2 * dim * config.classes,
    }
    return {part: count for part, count in flops.items() if count}


def crossover(flops: Mapping[str, int], tokens: int) -> float:
    """Return the number of tokens at which attention products begin to dominate.

    At this number they have as many FLOPs as projections and MLPs together.

    flops: the FLOPs of each part, in a model with attention over one sequence of tokens.
    tokens: the number of tokens at which these FLOPs were counted.
    """
    linear = flops.get(PROJECTIONS, 0) + flops.get(MLP, 0)
    return tokens * linear / flops[PRODUCTS]


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of both products of attention.

    query: the shape of the queries, (.., queries, head_dim).
    key: the shape of the keys, (.., keys, head_dim).
    value: the shape of the values, (.., keys, value_dim).
    """
    *leading, queries, head_dim = query
    keys = key[-2]
    value_dim = value[-1]
    return int(2 * prod(leading) * queries * keys * (head_dim + value_dim))


@contextmanager
def _countable(model: nn.Module) -> Iterator[None]:
    """Make every product of the model visible to torch's counter.

    The counter fails on a view of a parameter that requires a gradient, and does not see into the
    fused inference kernel of nn.MultiheadAttention.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)
        for parameter in trainable:
            parameter.requires_grad_(True)


def exponent(tokens: ArrayLike, costs: ArrayLike) -> Estimate:
    """Return k of cost = c · tokensᵏ, fitted by least squares to logarithms.

    It has Student's 95 % interval; n is the number of points. Two points have no interval. For
    exact costs (FLOPs) the interval says how far the points are from one straight line.
    """
    log_tokens = np.log(np.asarray(tokens, dtype=np.float64))
    log_costs = np.log(np.asarray(costs, dtype=np.float64))
    count = len(log_tokens)
    x = log_tokens - log_tokens.mean()
    y = log_costs - log_costs.mean()
    slope = float(x @ y / (x @ x))
    if count == 2:
        return Estimate(slope, n=2, unit="")
    residuals = y - slope * x
    freedom = count - 2  # slope and intercept are fitted
    error = np.sqrt(residuals @ residuals / freedom / (x @ x))
    half_width = float(stats.t.ppf(0.975, freedom) * error)
    return Estimate(slope, slope - half_width, slope + half_width, count, "")


class Parts:
    """The parts of one model, by the names of the modules and parameters of `Model.module`."""

    def __init__(self, model: Model) -> None:
        self._modules = dict(model.module.named_modules())
        self._order = {name: index for index, name in enumerate(self._modules)}
        self._attention = model.anatomy.attention_modules
        self._has_tokens = bool(self._attention) or model.anatomy.layout is not None
        blocks = sorted(set(model.anatomy.blocks_with_attention), key=self._order.__getitem__)
        self._blocks = [name for name in blocks if not _is_inside_any(name, blocks)]
        # places of modules in the order of the model: where each block starts, where the last ends
        self._starts = [self._order[name] for name in self._blocks]
        self._end = 0
        for name, place in self._order.items():
            if _owner(name, self._blocks) is not None:
                self._end = place
        # the modules that hold the blocks; those of a CNN are its stages
        self._containers = list(dict.fromkeys(_parent(name) for name in self._blocks))

    def of_module(self, name: str) -> str:
        """Return the part of a module's operations, without those of its children.

        The name of the model itself is "".
        """
        if not name:
            return OTHER
        return self._of_token_module(name) if self._has_tokens else self._of_cnn_module(name)

    def _of_cnn_module(self, name: str) -> str:
        if not self._blocks:
            return HEAD if isinstance(self._modules[name], nn.Linear) else CONVOLUTIONS
        place = self._order[name]
        if place < self._starts[0]:
            return STEM
        if place > self._end:
            return HEAD
        block = _owner(name, self._blocks)
        if block is None:
            # layers between two stages (ConvNeXt's downsampling) are counted with the later stage
            # the first block that starts after this layer
            block = self._blocks[bisect_left(self._starts, place)]
        stage = self._containers.index(_parent(block))
        return f"{STAGE} {stage}"

    def _of_token_module(self, name: str) -> str:
        module = self._modules[name]
        place = self._order[name]
        is_leaf = not list(module.children())
        if is_leaf and _NORM.search(type(module).__name__):
            return NORMS
        if any(_POSITION.search(word) for word in name.split(".")):
            return POSITIONS
        if _owner(name, self._attention) is not None:
            return PROJECTIONS
        if _owner(name, self._blocks) is not None:
            return MLP
        if not self._blocks or place < self._starts[0]:
            return EMBEDDING
        return HEAD if place > self._end else BETWEEN

    def of_parameter(self, name: str) -> str:
        """Return the part of a parameter."""
        module, _, parameter = name.rpartition(".")
        if self._has_tokens and _POSITION.search(parameter):
            return POSITIONS
        if self._has_tokens and _SCALE.search(parameter):
            return NORMS
        return self.of_module(module)


def _parent(name: str) -> str:
    """Return the name of the module that holds a module, "" for the model itself."""
    return name.rpartition(".")[0]


def _is_inside_any(name: str, modules: Iterable[str]) -> bool:
    """Return True if a module is inside one of these modules, and not one of them."""
    return any(name.startswith(f"{module}.") for module in modules)


def _owner(name: str, modules: Iterable[str]) -> str | None:
    """Return the first of these modules that is the module or contains it, None if none does."""
    for module in modules:
        if name == module or name.startswith(f"{module}."):
            return module
    return None


def in_order(parts: Iterable[str]) -> list[str]:
    """Return the parts without duplicates, in the order of a forward pass."""
    order = list(PARTS)

    def place(part: str) -> tuple[int, int]:
        """Return a sort key: the place among PARTS, and the number of a stage."""
        if part not in PARTS:  # such as "stage 2"
            word, number = part.split(" ")
            return order.index(word), int(number)
        return order.index(part), 0

    return sorted(set(parts), key=place)


def parameters_by_part(model: Model) -> dict[str, int]:
    """Return the number of parameters of each part; their sum is the model's parameter_count()."""
    parts = Parts(model)
    counts = Counter[str]()
    for name, parameter in model.module.named_parameters():
        counts[parts.of_parameter(name)] += parameter.numel()
    return {part: counts[part] for part in in_order(counts)}
