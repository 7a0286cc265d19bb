"""Layer-wise relevance propagation of CNNs by the composites of zennit.

Norms are merged into the convolutions before them, and sums of branches get the rule of zennit's
layer Sum. Zennit's own canonizers do so for torchvision's ResNet, here it is done for any CNN.
Relevance starts as 1 at the target. Maps are sums over the channels.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.canonizers import SequentialMergeBatchNorm
from zennit.composites import COMPOSITES
from zennit.core import Composite
from zennit.layer import Sum
from zennit.types import Activation, AvgPool, BatchNorm, Linear, MaxPool

from vitlens.attribution.adapters.registry import LIBRARIES
from vitlens.attribution.adapters.shared import (
    LibraryMethod,
    Network,
    library_method,
    note_once,
    one_hot,
    prepared,
    running,
)
from vitlens.errors import UnsupportedError
from vitlens.models.hooks import ScopedMode
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

_LIBRARY: Final = LIBRARIES["zennit"]
_RULES_OF_RELU: Final = ("deconvnet", "guided_backprop", "beta_smooth")  # and of no other module
# share of the largest logit by which merged norms may change logits: rounding, not another function
_LARGEST_CHANGE: Final = 1e-3
_ADDITIONS: Final = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__)


def methods() -> dict[str, LibraryMethod]:
    """Return the composites of the library by their full names."""
    entries = {}
    for composite in COMPOSITES:
        entry = library_method(
            _LIBRARY, composite, resolution="pixel", signed=True, forwards=1, backwards=1
        )
        entries[entry.name] = entry
    return entries


def library_maps(model: Model, images: Images, targets: Labels, *, name: str, variant: str) -> Maps:
    """Return the relevance of each pixel by a composite (batch, height, width)."""
    _require_cnn(model, name, variant)
    note_once(name)
    network = Network(model, share=False)  # merging norms changes weights
    with running(_LIBRARY, model, name):
        inputs = prepared(model, images)
        composite = _build(model, variant)

        def start_at_target(logits: Tensor) -> Tensor:
            return one_hot(targets, logits)

        with Gradient(network, composite, start_at_target) as attributor, _Sums(composite):
            logits, relevance = attributor(inputs)
        _require_equal_logits(model, name, merged=logits.detach(), plain=network(inputs).detach())
    maps: Tensor = relevance.detach().sum(1)
    return maps


def _require_cnn(model: Model, name: str, composite: str) -> None:
    """Raise UnsupportedError for a model with a module that has no rule."""
    if model.anatomy.family != "cnn":
        raise UnsupportedError(
            f"expected a CNN for {name}, found {model.alias} ({model.anatomy.family}): zennit has "
            "no rule for attention; use autolrp:attnlrp"
        )
    types = (Activation, AvgPool, MaxPool, BatchNorm, Linear)
    for module in model.module.modules():
        has_weights = bool(list(module.parameters(recurse=False)))
        if has_weights and not isinstance(module, types):
            raise UnsupportedError(
                f"expected modules with a rule for {name}, found {type(module).__name__} in "
                f"{model.alias}; use autolrp:composite"
            )
    has_relu = any(isinstance(module, nn.ReLU) for module in model.module.modules())
    if composite in _RULES_OF_RELU and not has_relu:
        raise UnsupportedError(
            f"expected modules nn.ReLU for {name}, found none in {model.alias}: the map would be a "
            "plain gradient; use saliency"
        )


def _build(model: Model, composite: str) -> Composite:
    """Return the composite, with the smallest and largest pixels where it has bounds."""
    composite_class = COMPOSITES[composite]
    settings: dict[str, Any] = {"canonizers": [SequentialMergeBatchNorm()]}
    if "low" in inspect.signature(composite_class).parameters:
        black = torch.zeros(1, 3, *model.input_size, device=model.device)
        settings["low"] = model.prepare(black)
        settings["high"] = model.prepare(black + 1)  # white
    return composite_class(**settings)


class _Sums(ScopedMode):
    """A mode in which the sum of two branches is computed by zennit's layer Sum.

    Composites have a rule for modules only, so they would pass over `x + y` of a residual network.

    rule: the composite's hook for that layer; None where it has none.
    """

    def __init__(self, composite: Composite) -> None:
        super().__init__()
        # the arguments are the context, the name and the module that needs a rule
        self.rule = composite.module_map({}, "", Sum())
        self.hooks: list[Any] = []  # kept, because torch holds them by weak references only

    def intercept(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the value of a torch function; additions get the rule's gradient."""
        is_sum = func in _ADDITIONS and not kwargs and _are_branches(args)
        if self.rule is None or not is_sum:
            return func(*args, **kwargs)
        layer = Sum()  # sums over the last axis
        hook = self.rule.copy()
        self.hooks.append(hook)
        hook.register(layer)
        return layer(torch.stack(args, dim=-1))


def _are_branches(values: tuple[Any, ...]) -> bool:
    """Return True for two maps of one shape that depend on the image."""
    if len(values) != 2 or not all(isinstance(value, Tensor) for value in values):
        return False
    first, second = values
    are_maps = first.dim() == 4 and first.shape == second.shape
    return bool(are_maps and first.requires_grad and second.requires_grad)


def _require_equal_logits(model: Model, name: str, *, merged: Tensor, plain: Tensor) -> None:
    """Raise UnsupportedError where merging norms has changed the logits."""
    change = float((merged - plain).abs().max())
    if change > _LARGEST_CHANGE * float(plain.abs().max()):
        raise UnsupportedError(
            f"expected norms that follow their convolutions for {name}, found logits of "
            f"{model.alias} that change by {change:.3g} when they are merged; use autolrp:composite"
        )
