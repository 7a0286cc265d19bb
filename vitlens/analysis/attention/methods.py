"""Attention methods with their settings, and the maps of several methods from one pass of the model.

The pass has gradients where one of the methods needs them; methods with LibraGrad's take a pass of their own. The
methods themselves are listed in registry.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import chain_length, chained, without_autocast
from vitlens.analysis.attention.defaults import ALPHA
from vitlens.analysis.attention.registry import attention_method
from vitlens.analysis.attention.rollout import RolloutSettings, require_start
from vitlens.errors import InputError
from vitlens.lens.observe import survey_weights
from vitlens.models.model import Model
from vitlens.names import Fusion, Readout
from vitlens.references import resolved
from vitlens.shapes import Images, Labels, Logits, Maps


@dataclass(frozen=True)
class MethodSettings:
    """A method with its settings; settings that the method does not use are ignored.

    method: a name of ATTENTION_METHODS; fusion, discard: of rollout; alpha: weight of the identity in rollout,
    gradient-weighted rollout and flow; start_layer: first layer of the chain; layer: that of the method "attention"
    (None: the last). All layers count from 0. Raises UnknownNameError and InputError.
    """

    method: str
    fusion: Fusion = "mean"
    discard: float = 0.0
    alpha: float = ALPHA
    start_layer: int = 0
    layer: int | None = None

    def __post_init__(self) -> None:
        attention_method(self.method)
        RolloutSettings(self.fusion, self.discard, self.alpha, self.start_layer)  # raises for values out of range

    @property
    def name(self) -> str:
        """Its name in reports and metrics: "rollout-mean", "relevance", "attention" ..."""
        return f"{self.method}-{self.fusion}" if "fusion" in attention_method(self.method).options else self.method

    @property
    def settings(self) -> dict[str, object]:
        """The settings that the method uses."""
        return {name: getattr(self, name) for name in attention_method(self.method).options}


@dataclass(frozen=True)
class MethodMaps:
    """logits (batch, classes); maps: of each method in order (batch, rows, columns), raw; for a windowed model, those
    of one layer's attention have the resolution of its stage."""

    logits: Logits
    maps: tuple[Float[Tensor, "batch _ _"], ...]


def require_possible(model: Model, images: Images, methods: Sequence[MethodSettings]) -> None:
    """Raise UnsupportedError or InputError, before any work, for a method that this model does not support."""
    depth = 1 + max(site.layer for site in survey_weights(model, images[:1]))
    for settings in methods:
        method = attention_method(settings.method)
        if method.needs == "chain":
            require_start(settings.start_layer, chain_length(model, images[:1]))
        if method.check is not None:
            resolved(method.check)(model, images)
        if settings.layer is not None and not 0 <= settings.layer < depth:
            raise InputError(f"expected --layer from 0 to {depth - 1}, found {settings.layer}")


def maps_in_one_pass(
    model: Model,
    images: Images,
    methods: Sequence[MethodSettings],
    *,
    targets: Labels | None = None,
    readout: Readout | None = None,
) -> MethodMaps:
    """The maps of several methods, from one pass for each kind of backward pass.

    targets: class indices (batch,), None: the predicted classes.

    Raises UnsupportedError or InputError for a method that this model does not support.
    """
    require_possible(model, images, methods)
    found = [attention_method(settings.method) for settings in methods]
    maps: list[Maps | None] = [None] * len(methods)
    logits: Logits | None = None
    for rules in dict.fromkeys(sorted(method.rules for method in found)):
        own = [place for place, method in enumerate(found) if method.rules == rules]
        gradient = any(found[place].gradients for place in own)
        chain = chained(model, images, targets=targets, gradient=gradient, rules=rules, readout=readout)
        with torch.no_grad(), without_autocast(model.device):
            for place in own:
                maps[place] = found[place].maps(chain, **methods[place].settings)
        logits = chain.logits
    if logits is None:
        raise InputError("expected at least one method, found none")
    return MethodMaps(logits, tuple(each for each in maps if each is not None))


def method_maps(
    model: Model, images: Images, targets: Labels, *, method: str, readout: Readout | None = None, **options: Any
) -> Maps:
    """The maps of one method; options: its settings. A method without gradients ignores the targets."""
    settings = MethodSettings(method, **options)
    return maps_in_one_pass(model, images, [settings], targets=targets, readout=readout).maps[0]
