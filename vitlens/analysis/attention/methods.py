"""Attention methods with their settings, and their maps of a batch: all those asked for from one pass of the model.

The pass has gradients where one of the methods needs them. The methods themselves are listed in registry.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import chain_length, chained, exactly
from vitlens.analysis.attention.defaults import ALPHA
from vitlens.analysis.attention.registry import attention_method
from vitlens.analysis.attention.rollout import RolloutSettings, require_start
from vitlens.errors import InputError
from vitlens.lens.observe import survey
from vitlens.models.model import Model
from vitlens.names import Fusion, Readout
from vitlens.references import resolved
from vitlens.shapes import Images, Labels, Logits, Maps


@dataclass(frozen=True)
class Way:
    """A method with its settings; what a method does not use is ignored.

    method: a name of ATTENTION_METHODS; fusion, discard: of rollout; alpha: share of the identity in rollout, its
    gradient-weighted kin and flow; start_layer: first layer of the chain; layer: whose attention the method attention
    shows (None: the last). All layers count from 0. Raises UnknownNameError and InputError.
    """

    method: str
    fusion: Fusion = "mean"
    discard: float = 0.0
    alpha: float = ALPHA
    start_layer: int = 0
    layer: int | None = None

    def __post_init__(self) -> None:
        attention_method(self.method)
        RolloutSettings(self.fusion, self.discard, self.alpha, self.start_layer)  # refuses settings that cannot be

    @property
    def name(self) -> str:
        """What reports and metrics call it: "rollout-mean", "relevance", "attention" ..."""
        return f"{self.method}-{self.fusion}" if "fusion" in attention_method(self.method).options else self.method

    @property
    def settings(self) -> dict[str, object]:
        """The settings that its method uses."""
        return {name: getattr(self, name) for name in attention_method(self.method).options}


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
        method = attention_method(way.method)
        if method.needs == "chain":
            require_start(way.start_layer, chain_length(model, images[:1]))
        if method.check is not None:
            resolved(method.check)(model, images)
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
    gradient = any(attention_method(way.method).gradients for way in ways)
    chain = chained(model, images, targets=targets, gradient=gradient, readout=readout)
    with torch.no_grad(), exactly(model.device):
        maps: list[Maps] = [attention_method(way.method).maps(chain, **way.settings) for way in ways]
    return Traced(chain.logits, tuple(maps))


def method_maps(model: Model, images: Images, targets: Labels, *, method: str) -> Maps:
    """The maps of one method with its default settings; one without gradients leaves the targets aside."""
    return trace(model, images, [Way(method)], targets=targets).maps[0]
