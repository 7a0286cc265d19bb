"""Every way to follow attention to the image, by name, so that any command can ask for one.

Methods are computed from one pass: with gradients where one of those asked for needs them, else without.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import Chain, chain_length, chained, exactly
from vitlens.analysis.attention.flow import flow_of, require_few
from vitlens.analysis.attention.relevance import gradient_rollout_of, relevance_of
from vitlens.analysis.attention.rollout import RolloutOptions, require_start, rollout_of
from vitlens.analysis.attention.weights import layer_map
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.observe import survey
from vitlens.models.model import Model
from vitlens.names import ATTENTION_METHODS, DEFAULT_ALPHA, AttentionMethod, Fusion, Readout
from vitlens.shapes import Images, Labels, Logits, Maps


@dataclass(frozen=True)
class Way:
    """A method with its settings; what a method does not use is ignored.

    method: a name of ATTENTION_METHODS; fusion, discard: of rollout; alpha: share of the identity in rollout, its
    gradient-weighted kin and flow; start_layer: first layer of the chain; layer: whose attention the method attention
    shows (None: the last). All layers count from 0. Raises UnknownNameError and InputError.
    """

    method: AttentionMethod
    fusion: Fusion = "mean"
    discard: float = 0.0
    alpha: float = DEFAULT_ALPHA
    start_layer: int = 0
    layer: int | None = None

    def __post_init__(self) -> None:
        if self.method not in ATTENTION_METHODS:
            raise UnknownNameError("method", self.method, ATTENTION_METHODS)
        RolloutOptions(self.fusion, self.discard, self.alpha, self.start_layer)  # says what cannot be

    @property
    def name(self) -> str:
        """What reports and metrics call it: "rollout-mean", "relevance", "attention" ..."""
        return f"{self.method}-{self.fusion}" if self.method == "rollout" else self.method


@dataclass(frozen=True)
class Method:
    """follow: a map from a chain; gradient: whether the chain needs gradients, and so a target class; chained: whether
    all layers must be token-to-token; says: what it shows, in a sentence."""

    follow: Callable[[Chain, Way], Maps]
    gradient: bool
    chained: bool
    says: str


def _rollout(chain: Chain, way: Way) -> Maps:
    return chain.as_map(rollout_of(chain, RolloutOptions(way.fusion, way.discard, way.alpha, way.start_layer)))


def _attention(chain: Chain, way: Way) -> Maps:
    layer = chain.calls[-1].site.layer if way.layer is None else way.layer
    found = layer_map(next(call for call in reversed(chain.calls) if call.site.layer == layer), chain.model)
    if found is None:
        raise UnsupportedError(
            f"expected a layer in which patches look at patches, found pooled keys or channels in that of "
            f"{chain.model.alias}; choose another --layer"
        )
    return found.maps.mean(1)


METHODS: Final[Mapping[AttentionMethod, Method]] = MappingProxyType(
    {
        "rollout": Method(
            _rollout, False, True, "attention followed through all layers; the same for every class"
        ),
        "relevance": Method(
            lambda chain, way: chain.as_map(relevance_of(chain, start_layer=way.start_layer)),
            True, True, "attention that raises the target's logit, followed through all layers (Chefer 2021)",
        ),
        "gradient-rollout": Method(
            lambda chain, way: chain.as_map(
                gradient_rollout_of(chain, alpha=way.alpha, start_layer=way.start_layer)
            ),
            True, True, "rollout of the attention that raises the target's logit",
        ),
        "attention": Method(_attention, False, False, "the mean of one layer's heads, the last by default"),
        "flow": Method(
            lambda chain, way: chain.as_map(flow_of(chain, alpha=way.alpha)),
            False, True, "the greatest flow from the readout to each patch (few tokens alone)",
        ),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """logits (batch, classes); maps: for each way in its order (batch, rows, columns), raw; of a windowed model, one
    layer's attention has its own stage's rows and columns."""

    logits: Logits
    maps: tuple[Float[Tensor, "batch _ _"], ...]


def require_possible(model: Model, images: Images, ways: Sequence[Way]) -> None:
    """Raise UnsupportedError or InputError, before any work, for a way that this model cannot go."""
    depth = 1 + max(site.layer for site in survey(model, images[:1]))
    for way in ways:
        if METHODS[way.method].chained:
            require_start(way.start_layer, chain_length(model, images[:1]))
        if way.method == "flow":
            require_few(model, images)
        if way.layer is not None and not 0 <= way.layer < depth:
            raise InputError(f"expected --layer from 0 to {depth - 1}, found {way.layer}")


def trace(
    model: Model,
    images: Images,
    ways: Sequence[Way],
    *,
    targets: Labels | None = None,
    readout: Readout | None = None,
) -> Traced:
    """Maps of a batch in several ways, from one pass. targets: class indices (batch,), None: the predicted classes.

    Raises UnsupportedError or InputError for a way that this model cannot go.
    """
    require_possible(model, images, ways)
    gradient = any(METHODS[way.method].gradient for way in ways)
    chain = chained(model, images, targets=targets, gradient=gradient, readout=readout)
    with torch.no_grad(), exactly(model.device):
        return Traced(chain.logits, tuple(METHODS[way.method].follow(chain, way) for way in ways))
