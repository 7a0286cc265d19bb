"""Floating-point operations of one image's forward pass, by part: counted in any model, and by formula for our ViT.

One multiplication with its addition counts as two operations. Matrix products and convolutions are counted; norms,
softmax, activations, biases, residual sums and the resizing of positions are not: their number grows with the tokens,
not with tokens times width.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitlens.analysis.cost.parts import EMBEDDING, HEAD, MLP, PRODUCTS, PROJECTIONS, Parts, in_order
from vitlens.devices import evaluating
from vitlens.lens.trace import probe_images
from vitlens.models.configs import ViTConfig
from vitlens.models.hooks import Arguments, watching
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate

_ATEN: Final = torch.ops.aten
_KERNELS: Final = (
    "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
    "fused_attention_overrideable", "attention_math_for_mps",
)  # fmt: skip
_NAMES: Final = [f"_scaled_dot_product_{kernel}" for kernel in _KERNELS]  # of F.scaled_dot_product_attention
_FUSED: Final = tuple(getattr(_ATEN, name) for name in _NAMES if hasattr(_ATEN, name))  # as this version of torch has
_BETWEEN_TOKENS: Final = (*_FUSED, _ATEN.bmm, _ATEN.baddbmm)  # in attention: products of tokens with tokens


def flops_by_part(model: Model) -> dict[str, int]:
    """FLOPs of each part for one image of the model's own size, counted in a forward pass.

    In attention, the projections multiply tokens by parameters, the products multiply tokens by tokens.
    """
    images, parts, flops = probe_images(model, 1), Parts(model), Counter[str]()
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(_FUSED, _attention_flops))
    with evaluating(model), _countable(model), torch.no_grad(), counter, _by_module(model.module, counter) as own:
        model(images)
    for (name, operation), count in own.items():
        part = parts.of_module(name)
        flops[PRODUCTS if part == PROJECTIONS and operation in _BETWEEN_TOKENS else part] += count
    return {part: flops[part] for part in in_order(flops) if flops[part]}


def vit_flops(config: ViTConfig) -> dict[str, int]:
    """FLOPs of each part of our ViT for one image of the config's size, by formula.

    With N tokens of width d, P patches of p pixels and an MLP of h hidden units, each block takes 8 N d² for the four
    projections, 4 N² d for the two products, 4 N d h for the MLP.
    """
    tokens, patches, dim = config.layout.tokens, config.layout.patches, config.dim
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
    """The number of tokens at which the products of attention take as many FLOPs as the projections and the MLPs.

    flops: by part, counted at this many tokens in a model with one sequence of tokens and attention.
    """
    return tokens * (flops.get(PROJECTIONS, 0) + flops.get(MLP, 0)) / flops[PRODUCTS]


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of both products; shapes (..., query, head_dim), (..., key, head_dim), (..., key, value_dim)."""
    *leading, queries, head_dim = query
    return int(2 * prod(leading) * queries * key[-2] * (head_dim + value[-1]))


@contextmanager
def _countable(model: nn.Module) -> Iterator[None]:
    """Inside, torch's counter sees every product.

    It fails on a view of a parameter that requires a gradient and is a module's argument, and does not see into the
    fused inference kernel of nn.MultiheadAttention.
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


@contextmanager
def _by_module(model: nn.Module, counter: FlopCounterMode) -> Iterator[Counter[tuple[str, Any]]]:
    """The FLOPs of each module without those of its children, by (name, operation), filled during the forward pass.

    They are differences of the counter's total between entry and exit of each call, so nothing is counted twice or
    lost, in whatever order modules call each other.
    """
    own: Counter[tuple[str, Any]] = Counter()
    stack: list[tuple[Counter[Any], Counter[Any]]] = []  # total at entry, FLOPs of its children

    def enter(_name: str, _arguments: Arguments) -> None:
        stack.append((Counter(counter.flop_counts["Global"]), Counter()))

    def leave(name: str, _arguments: Arguments, _output: Any) -> None:
        before, inside = stack.pop()
        taken = Counter(counter.flop_counts["Global"]) - before
        for operation, count in (taken - inside).items():
            own[name, operation] += count
        if stack:
            stack[-1][1].update(taken)

    with watching(model, [name for name, _ in model.named_modules()], leave, before=enter):
        yield own


def exponent(tokens: ArrayLike, costs: ArrayLike) -> Estimate:
    """k of cost = c · tokensᵏ, least squares on logarithms, with Student's 95 % interval; n is the number of points.

    Two points have no interval. For exact costs (FLOPs) the interval says how far the points are from one straight
    line, not how uncertain they are. tokens, costs: above 0, at two or more numbers of tokens.
    """
    x, y = np.log(np.asarray(tokens, dtype=np.float64)), np.log(np.asarray(costs, dtype=np.float64))
    across, up = x - x.mean(), y - y.mean()
    slope = float(across @ up / (across @ across))
    if len(x) == 2:
        return Estimate(slope, n=2, unit="")
    left = up - slope * across
    error = np.sqrt(left @ left / (len(x) - 2) / (across @ across))
    half = float(stats.t.ppf(0.975, len(x) - 2) * error)
    return Estimate(slope, slope - half, slope + half, len(x), "")
