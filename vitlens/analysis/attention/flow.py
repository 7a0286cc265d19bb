"""Attention flow (Abnar & Zuidema 2020, section 3): the maximum flow from the readout to each patch.

The layers form a flow network whose capacities are the weights with the residual connection, (A + I) / 2; a patch's
value is the maximum flow from the readout to it. One maximum flow for each patch and image: only for few tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.chain import Chain, chain_length, over_batches
from vitlens.analysis.attention.defaults import ALPHA
from vitlens.analysis.attention.readout import pooling_row
from vitlens.analysis.attention.rollout import RolloutSettings
from vitlens.errors import UnsupportedError
from vitlens.lens.call import AttentionCall, precise
from vitlens.models.model import Model
from vitlens.names import Readout
from vitlens.shapes import Images, Maps

MOST_TOKENS = 256  # each needs a maximum flow through layers x tokens² edges
_UNIT = 1 << 24  # the integer for a capacity of 1, as scipy's flows are 32-bit integers: precision 6e-8


def flow(model: Model, images: Images, *, alpha: float = ALPHA, readout: Readout | None = None) -> Maps:
    """The maximum attention flow from the readout to each patch: (batch, rows, columns), each from 0 to 1.

    alpha: weight of the identity. Takes 0.1 s an image for 65 tokens, seconds for 197. Raises UnsupportedError
    above 256 tokens, and for a model whose layers are not all token-to-token.
    """
    RolloutSettings(alpha=alpha)  # raises for values out of range
    require_flow(model, images)
    return over_batches(model, images, lambda chain: flow_maps(chain, alpha=alpha), readout=readout)


def require_flow(model: Model, images: Images) -> None:
    """Raise UnsupportedError where attention flow would take too long, or is not defined."""
    layout = model.anatomy.layout
    if layout is not None and layout.tokens > MOST_TOKENS:
        raise UnsupportedError(
            f"expected at most {MOST_TOKENS} tokens for attention flow, found {layout.tokens} in {model.alias}: it "
            "takes a maximum flow for each of them; try --method rollout"
        )
    chain_length(model, images)
    if layout is None:
        raise UnsupportedError(
            f"expected one sequence of tokens for attention flow, found windows in {model.alias}; try --method rollout"
        )


def flow_maps(chain: Chain, *, alpha: float = ALPHA) -> Maps:
    """The maximum flow from the readout of a chain to each patch."""
    return chain.as_map(flow_of(chain, alpha=alpha))


def flow_of(chain: Chain, *, alpha: float = ALPHA) -> Float[Tensor, "batch tokens"]:
    """The maximum flow from the readout to each token; zero for the prefix, which is not in the map."""
    layout = chain.model.layout

    def pooling(call: AttentionCall) -> Float[Tensor, "batch keys"]:
        return precise(call.precise().weights()).mean(1)[:, 0]

    start = chain.start(pooling=pooling, pool=lambda rows: pooling_row(rows, layout, alpha=alpha))
    layers = [precise(call.precise().weights()).mean(1) for call in chain.calls if call.site.kind == "patch"]
    patches = range(len(layout.prefix), layout.tokens)
    flows = [
        maximum_flows(start[image].cpu().numpy(), [mixed(layer[image], alpha) for layer in layers], patches)
        for image in range(len(start))
    ]
    return torch.from_numpy(np.stack(flows)).to(start)


def mixed(fused: Float[Tensor, "query key"], alpha: float) -> NDArray[np.float64]:
    """The capacities of one layer: attention mixed with the residual connection."""
    weights = fused.double().cpu().numpy()
    capacities: NDArray[np.float64] = (1 - alpha) * weights + alpha * np.eye(len(weights))
    return capacities


def maximum_flows(
    start: NDArray[np.floating], layers: Sequence[NDArray[np.float64]], targets: Sequence[int]
) -> NDArray[np.float64]:
    """The maximum flow from a source to each target token of the input; 0 for the other tokens.

    start: (tokens,), capacities from the source to the tokens after the last layer; layers: (query, key) capacities in
    forward order.
    """
    from scipy.sparse import csr_matrix  # takes 0.2 s to import
    from scipy.sparse.csgraph import maximum_flow

    tokens, depth = len(start), len(layers)
    source = tokens * (depth + 1)  # nodes: the tokens before layer 0, after layer 0, ... and the source
    heads, tails, capacities = [np.full(tokens, source)], [depth * tokens + np.arange(tokens)], [start]
    query, key = np.divmod(np.arange(tokens * tokens), tokens)
    for layer, weights in enumerate(layers):
        heads.append((layer + 1) * tokens + query)
        tails.append(layer * tokens + key)
        capacities.append(weights.ravel())
    scaled = np.rint(np.concatenate(capacities).astype(np.float64) * _UNIT).astype(np.int32)
    edges = (np.concatenate(heads), np.concatenate(tails))
    network = csr_matrix((scaled, edges), shape=(source + 1, source + 1), dtype=np.int32)
    network.eliminate_zeros()
    flows = np.zeros(tokens)
    for target in targets:
        flows[target] = maximum_flow(network, source, target).flow_value / _UNIT
    return flows
