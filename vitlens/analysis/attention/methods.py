"""Attention methods: rollout, relevance, gradient-weighted rollout and attention flow.

Rollout (Abnar & Zuidema 2020) multiplies attention through the layers, with the residual
connection: R = Â_L ... Â_1. Â has the rows of (1 - alpha) A + alpha I, scaled to sum to 1.

Relevance (Chefer 2021, "generic attention-model explainability") weights attention by the gradient
of a logit: Ā is the mean over heads of (∂logit/∂A ⊙ A)⁺ (equation 5). From R = I, each layer gives
R ← R + Ā R (equation 6).

One row of R needs only products of a vector and a matrix, from the last layer back. That takes
O(layers N²), not O(layers N³). A method is a step of the chain (chain.py). The methods are listed
in registry.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.chain import (
    Chain,
    Vector,
    chained,
    mean_of_heads,
    require_chain,
    without_autocast,
)
from vitlens.analysis.attention.registry import ALPHA, MethodSettings, attention_method
from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.errors import InputError, UnsupportedError, argument
from vitlens.inputs import takes_images
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.observe import survey_weights
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.models.numbering import no_layer
from vitlens.names import Fusion, Readout
from vitlens.pixels import AnyImages, Parts, Targets, as_parts, as_targets
from vitlens.references import resolved
from vitlens.shapes import Fused, Images, Labels, Logits, Maps, Weights

# Attention flow needs a maximum flow through layers x tokens² edges for each token. It takes 0.1 s
# per image for 65 tokens, and seconds for 197.
MOST_TOKENS = 256
# scipy's flows are 32-bit integers: this one stands for a capacity of 1, with a precision of 6e-8
_UNIT = 1 << 24


@takes_images
def rollout(
    model: Model,
    images: AnyImages,
    *,
    fusion: Fusion = "mean",
    discard: float = 0.0,
    alpha: float = ALPHA,
    start_layer: int = 0,
    readout: Readout | None = None,
) -> Maps:
    """Return the rollout of each image over its patches (batch, rows, columns), not scaled.

    The map of a windowed model (Swin, Hiera) is that of the first stage. If patches are merged or
    queries pooled, each of the four patches gets an equal share.

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes.
    fusion: the fusion of the heads, "mean", "max" or "min".
    discard: the fraction of each row that is set to 0, the lowest weights (except CLS).
    alpha: the weight of the identity.
    start_layer: the first layer that is included, from 0.
    readout: the tokens to start from (None: those that the classifier reads).

    Raises UnsupportedError for a model with layers that are neither token-to-token nor windows
    (XCiT, PVT, CNNs), or with convolutions between them (MaxViT).

    >>> import torch, vitlens
    >>> vitlens.rollout(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 8, 8])
    """
    settings = MethodSettings(
        "rollout", fusion=fusion, discard=discard, alpha=alpha, start_layer=start_layer
    )
    return maps_of(model, as_parts(images), settings, readout=readout)


@takes_images
def relevance(
    model: Model,
    images: AnyImages,
    *,
    targets: Targets = "predicted",
    start_layer: int = 0,
    readout: Readout | None = None,
) -> Maps:
    """Return the relevance of each patch for a target class (batch, rows, columns), not scaled.

    The target's logit is differentiated, not its probability. The map of a windowed model (Swin) is
    that of the first stage.

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes.
    targets: "predicted", "label" (of a Split or class folders), a class by name or index, or class
        indices (batch,).
    start_layer: the first layer that is included, from 0.
    readout: the tokens to start from (None: those that the classifier reads).

    Raises InputError for a class that does not exist, and UnsupportedError as `rollout`.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> vitlens.relevance(vit, torch.rand(2, 3, 32, 32), targets=torch.tensor([3, 8])).shape
    torch.Size([2, 8, 8])
    """
    settings = MethodSettings("relevance", start_layer=start_layer)
    return maps_of(model, as_parts(images), settings, targets=as_targets(targets), readout=readout)


def maps_of(
    model: Model,
    images: Parts,
    settings: MethodSettings,
    *,
    targets: Labels | None = None,
    readout: Readout | None = None,
) -> Maps:
    """Return the maps of one method, computed in batches that fit in memory.

    targets: None for the predicted classes.
    """
    require_possible(model, [settings])
    if targets is not None and len(targets) != len(images):
        raise InputError(f"expected one target per image ({len(images)}), found {len(targets)}")
    size = fitting_batch_size(model)
    if attention_method(settings.method).gradients:
        size = max(1, size // BACKWARD)
    parts: list[Maps] = []
    for start in range(0, len(images), size):
        rows = slice(start, start + size)
        batch = images[rows].to(model.device)
        batch_targets = None if targets is None else targets[rows]
        _, maps = maps_in_one_pass(model, batch, [settings], targets=batch_targets, readout=readout)
        parts.extend(maps)
    return torch.cat(parts)


def method_maps(
    model: Model,
    images: Images,
    targets: Labels,
    *,
    method: str,
    readout: Readout | None = None,
    **options: Any,
) -> Maps:
    """Return the maps of one method for one batch.

    A method without gradients ignores the targets.

    options: the settings of the method.
    """
    settings = MethodSettings(method, **options)
    return maps_of(model, images, settings, targets=targets, readout=readout)


def maps_in_one_pass(
    model: Model,
    images: Images,
    methods: Sequence[MethodSettings],
    *,
    targets: Labels | None = None,
    readout: Readout | None = None,
) -> tuple[Logits, tuple[Float[Tensor, "batch _ _"], ...]]:
    """Return the logits, and the maps of each method (batch, rows, columns), at least one.

    One pass serves all methods with the same rules of the backward pass (plain gradients or
    LibraGrad's). It has gradients if one of them needs gradients. For a windowed model, the maps of
    one layer's attention have the resolution of its stage.

    methods: the methods, which the model must support.
    targets: class indices (batch,) (None: the predicted classes).
    """
    entries = [attention_method(settings.method) for settings in methods]
    maps: dict[int, Maps] = {}
    for rules in sorted({entry.rules for entry in entries}):
        indices = [index for index, entry in enumerate(entries) if entry.rules == rules]
        gradient = any(entries[index].gradients for index in indices)
        chain = chained(
            model, images, targets=targets, gradient=gradient, rules=rules, readout=readout
        )
        with torch.no_grad(), without_autocast(model.device):
            for index in indices:
                compute_maps = resolved(entries[index].function)
                maps[index] = compute_maps(chain, **methods[index].settings)
    return chain.logits, tuple(maps[index] for index in range(len(methods)))


def require_possible(model: Model, methods: Sequence[MethodSettings]) -> None:
    """Raise UnsupportedError or InputError for a method that this model does not support."""
    for settings in methods:
        method = attention_method(settings.method)
        if method.check is not None:
            resolved(method.check)(model)
        if method.needs == "chain":
            require_chain(model)
        layers = sorted({site.layer for site in survey_weights(model, probe_images(model, 1))})
        if method.needs == "chain":
            require_start(settings.start_layer, 1 + layers[-1])
        if settings.layer is not None and settings.layer not in layers:
            raise InputError(no_layer(layers, settings.layer, model.alias, argument("layer")))


def require_start(start_layer: int, depth: int) -> None:
    """Raise InputError unless the model has this layer."""
    if not 0 <= start_layer < depth:
        raise InputError(
            f"expected {argument('start_layer')} of at least 0 and below {depth} layers, found "
            f"{start_layer}"
        )


def rollout_maps(
    chain: Chain,
    *,
    fusion: Fusion = "mean",
    discard: float = 0.0,
    alpha: float = ALPHA,
    start_layer: int = 0,
) -> Maps:
    """Return the rollout maps of a chain."""
    layout = chain.model.anatomy.layout
    keep = () if layout is None else layout.positions("cls")  # keys that are never discarded

    def step(row: Vector, weights: Weights, _gradient: Weights | None, sums_to_1: bool) -> Vector:
        """Propagate a row through one layer; see `Step` in chain.py."""
        if fusion == "mean" and discard == 0 and sums_to_1:
            # The row times the mean over heads is the mean of the row times each head. So the mean
            # of the weights is not needed, and rows of a softmax need no scaling.
            mixed = (row[:, None, None] @ weights).mean(1)[:, 0]
            return (1 - alpha) * mixed + alpha * row
        remaining = discard_lowest(fused(weights, fusion), discard, keep=keep)
        return scaled_step(row, remaining, alpha)

    def pooling(call: AttentionCall) -> Float[Tensor, "batch keys"]:
        """Return the weights of a pooling query, heads fused; see `Pooling` in chain.py."""
        assert layout is not None  # `Chain.start` pools the tokens of a layout only
        keep_in_call = keep
        if call.site.keys > layout.tokens:
            keep_in_call = (0,)  # class attention has a CLS token before the tokens of the layout
        elif call.site.keys == layout.patches:
            keep_in_call = ()  # without the prefix, which is timm's default
        weights = fused(precise(call.precise().weights()), fusion)  # (batch, one query, keys)
        row = discard_lowest(weights, discard, keep=keep_in_call)[:, 0]
        return row / row.sum(-1, keepdim=True)

    start = chain.start(pooling, alpha=alpha, start_layer=start_layer)
    return chain.as_map(chain.follow(start, step, start_layer=start_layer))


def relevance_maps(chain: Chain, *, start_layer: int = 0) -> Maps:
    """Return the relevance maps of a chain with gradients: the readout's row of R - I."""

    def step(row: Vector, weights: Weights, gradient: Weights | None, _sums_to_1: bool) -> Vector:
        return row + (row.unsqueeze(1) @ gradient_weighted(weights, gradient)).squeeze(1)

    start = chain.start(_gradient_weighted_query, alpha=None, start_layer=start_layer)
    row = chain.follow(start, step, start_layer=start_layer)
    if chain.readout != "pool":  # a pooling query is no token, so its row contains no identity
        # Subtract the I of R - I: the start itself, with merged patches split again. A start_layer
        # after the last layer gives it, as `follow` then only splits them.
        after_all_layers = 1 + chain.calls[-1].site.layer
        row = row - chain.follow(start, step, start_layer=after_all_layers)
    return chain.as_map(row)


def gradient_rollout_maps(chain: Chain, *, alpha: float = ALPHA, start_layer: int = 0) -> Maps:
    """Return the rollout maps of a chain with gradients, with Ā instead of the heads' mean.

    A row without any positive gradient becomes that of the identity. The row of a pooling query,
    which is no token, becomes 0.
    """

    def step(row: Vector, weights: Weights, gradient: Weights | None, _sums_to_1: bool) -> Vector:
        return scaled_step(row, gradient_weighted(weights, gradient), alpha)

    start = chain.start(_gradient_weighted_query, alpha=alpha, start_layer=start_layer)
    return chain.as_map(chain.follow(start, step, start_layer=start_layer))


def fused(weights: Weights, fusion: Fusion) -> Fused:
    """Return one weight per query and key: the mean, maximum or minimum over heads."""
    if fusion == "mean":
        return weights.mean(1)
    if fusion == "max":
        return weights.amax(1)
    return weights.amin(1)


def discard_lowest(fused: Fused, fraction: float, *, keep: Sequence[int] = ()) -> Fused:
    """Return the weights with the lowest fraction of every row set to zero.

    Columns in keep are unchanged.
    """
    count = int(fused.shape[-1] * fraction)
    if count == 0:
        return fused
    columns = list(keep)
    ranked = fused.clone()
    ranked[..., columns] = torch.inf
    lowest = ranked.topk(count, dim=-1, largest=False).indices
    result = fused.scatter(-1, lowest, 0.0)
    # with a large fraction these columns may be among the lowest: restore them
    result[..., columns] = fused[..., columns]
    return result


def scaled_step(row: Vector, fused: Fused, alpha: float) -> Vector:
    """Return row · Â, a step of the rollout towards the input.

    Â is (1 - alpha) fused + alpha I, each of its rows divided by its sum.
    """
    sums = (1 - alpha) * fused.sum(-1) + alpha
    # entry i of the vector multiplies row i of Â, so the entry is divided by the row's sum
    scaled = (row / sums.clamp_min(torch.finfo(sums.dtype).tiny)).unsqueeze(1)
    # alpha * scaled + (1 - alpha) * scaled @ fused, in one operation
    return torch.baddbmm(scaled, scaled, fused, beta=alpha, alpha=1 - alpha).squeeze(1)


def gradient_weighted(weights: Weights, gradient: Weights | None) -> Fused:
    """Return Ā, the attention that raises the target's logit, mean over heads.

    Source: Chefer 2021, equation 5.
    """
    assert gradient is not None  # the chain has gradients
    return (weights * gradient).clamp_min(0).mean(1)


def _gradient_weighted_query(call: AttentionCall) -> Float[Tensor, "batch keys"]:
    exact = call.precise()
    return gradient_weighted(precise(exact.weights()), exact.weight_gradient())[:, 0]


def require_flow(model: Model) -> None:
    """Raise UnsupportedError if attention flow would take too long, or is not defined."""
    layout = model.anatomy.layout
    if layout is not None and layout.tokens > MOST_TOKENS:
        raise UnsupportedError(
            f"expected at most {MOST_TOKENS} tokens for attention flow, found {layout.tokens} in "
            f"{model.alias}: it takes a maximum flow for each of them; try "
            f"{argument('method', 'rollout')}"
        )
    require_chain(model)
    if layout is None:
        raise UnsupportedError(
            f"expected one sequence of tokens for attention flow, found windows in {model.alias}; "
            f"try {argument('method', 'rollout')}"
        )


def flow_maps(chain: Chain, *, alpha: float = ALPHA) -> Maps:
    """Return the maximum flow from the readout of a chain to each patch, from 0 to 1.

    The capacities of the network are the weights with the residual connection, (1 - alpha) A +
    alpha I. Source: Abnar & Zuidema 2020, section 3.
    """
    layout = chain.model.layout
    start = chain.start(lambda call: mean_of_heads(call)[:, 0], alpha=alpha)
    capacities = []
    for call in chain.calls:
        if call.site.kind == "patch":
            weights = mean_of_heads(call).double().cpu().numpy()
            capacities.append((1 - alpha) * weights + alpha * np.eye(layout.tokens))
    patches = range(len(layout.prefix), layout.tokens)
    flows = []
    for image, row in enumerate(start.cpu().numpy()):
        flows.append(maximum_flows(row, [layer[image] for layer in capacities], patches))
    return chain.as_map(torch.from_numpy(np.stack(flows)).to(start))


def maximum_flows(
    start: NDArray[np.floating], layers: Sequence[NDArray[np.float64]], targets: Sequence[int]
) -> NDArray[np.float64]:
    """Return the maximum flow from a source to each target token of the input; 0 for the others.

    start (tokens,): the capacities from the source to the last layer's tokens.
    layers (query, key): the capacities of each layer, in forward order.
    """
    from scipy.sparse import csr_matrix  # takes 0.2 s to import
    from scipy.sparse.csgraph import maximum_flow

    tokens = len(start)
    depth = len(layers)
    # node layer * tokens + t is token t before the layer; the last of these are after all layers
    source = tokens * (depth + 1)
    # edges point from the source to the image; from the source to the last layer's tokens first
    from_nodes = [np.full(tokens, source)]
    to_nodes = [depth * tokens + np.arange(tokens)]
    capacities = [start]
    query, key = np.divmod(np.arange(tokens * tokens), tokens)
    for layer, weights in enumerate(layers):
        from_nodes.append((layer + 1) * tokens + query)
        to_nodes.append(layer * tokens + key)
        capacities.append(weights.ravel())
    integers = np.rint(np.concatenate(capacities).astype(np.float64) * _UNIT).astype(np.int32)
    edges = (np.concatenate(from_nodes), np.concatenate(to_nodes))
    network = csr_matrix((integers, edges), shape=(source + 1, source + 1), dtype=np.int32)
    network.eliminate_zeros()
    flows = np.zeros(tokens)
    for target in targets:
        flows[target] = maximum_flow(network, source, target).flow_value / _UNIT
    return flows
