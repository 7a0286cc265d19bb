"""Layer-wise relevance propagation of CNNs by the composites of zennit.

As zennit's own canonizers do for torchvision's ResNet, norms are merged into the convolutions
before them and sums of branches get the rule of its layer Sum, in any CNN. Relevance starts as 1 at
the target. Maps are sums over the channels.
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
    kebab,
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
_OF_RELU: Final = ("deconvnet", "guided_backprop", "beta_smooth")  # rules of nn.ReLU alone
_ALLOWED: Final = 1e-3  # share of the largest logit by which merged norms may change logits
_ADDITIONS: Final = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__)


def methods() -> dict[str, LibraryMethod]:
    """Return the composites of the library by their full names."""
    entries = {}
    for composite in COMPOSITES:
        name = f"{_LIBRARY.name}:{kebab(composite)}"
        entries[name] = LibraryMethod(
            name=name,
            title=f"{composite} (zennit)",
            description=f"the composite {composite} of zennit {_LIBRARY.version}",
            paper=f"zennit {_LIBRARY.version}",
            function=f"{__name__}:library_maps",
            arguments={"name": name, "composite": composite},
            resolution="pixel",
            signed=True,
            forwards=1,
            backwards=1,
        )
    return entries


def library_maps(
    model: Model, images: Images, targets: Labels, *, name: str, composite: str
) -> Maps:
    """Return the relevance of each pixel by a composite (batch, height, width)."""
    _require_cnn(model, name, composite)
    note_once(name)
    network = Network(model, share=False)  # merging norms changes weights
    with running(_LIBRARY, model, name):
        inputs = prepared(model, images)
        rules = _build(model, composite)

        def of_target(logits: Tensor) -> Tensor:
            return one_hot(targets, logits)

        with Gradient(network, rules, of_target) as attributor, _Sums(rules):
            logits, relevance = attributor(inputs)
        _require_logits(model, name, logits, network(inputs).detach())
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
    if composite in _OF_RELU and not any(
        isinstance(module, nn.ReLU) for module in model.module.modules()
    ):
        raise UnsupportedError(
            f"expected modules nn.ReLU for {name}, found none in {model.alias}: the map would be a "
            "plain gradient; use saliency"
        )


def _build(model: Model, composite: str) -> Composite:
    """Return the composite, with the smallest and largest pixels where it has bounds."""
    kind = COMPOSITES[composite]
    settings: dict[str, Any] = {"canonizers": [SequentialMergeBatchNorm()]}
    if "low" in inspect.signature(kind).parameters:
        image = torch.zeros(1, 3, *model.input_size, device=model.device)
        settings |= {"low": model.prepare(image), "high": model.prepare(image + 1)}
    return kind(**settings)


class _Sums(ScopedMode):
    """Computes the sum of two branches by zennit's layer Sum, with its rule of the composite."""

    def __init__(self, composite: Composite) -> None:
        super().__init__()
        self.rule = composite.module_map({}, "", Sum())
        self.hooks: list[Any] = []

    def intercept(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the value of the function, with the rule's gradient."""
        if func not in _ADDITIONS or self.rule is None or kwargs or not _are_branches(args):
            return func(*args, **kwargs)
        layer = Sum()
        hook = self.rule.copy()
        self.hooks.append(hook)  # which torch would otherwise forget
        hook.register(layer)
        return layer(torch.stack(args, dim=-1))


def _are_branches(values: tuple[Any, ...]) -> bool:
    """Return True for two maps of one shape that depend on the image."""
    if len(values) != 2 or not all(isinstance(value, Tensor) for value in values):
        return False
    first, second = values
    return bool(
        first.dim() == 4
        and first.shape == second.shape
        and first.requires_grad
        and second.requires_grad
    )


def _require_logits(model: Model, name: str, merged: Tensor, plain: Tensor) -> None:
    """Raise UnsupportedError where merging norms has changed the logits."""
    change = float((merged.detach() - plain).abs().max())
    if change > _ALLOWED * float(plain.abs().max()):
        raise UnsupportedError(
            f"expected norms that follow their convolutions for {name}, found logits of "
            f"{model.alias} that change by {change:.3g} when they are merged; use autolrp:composite"
        )
