"""Layer-wise relevance propagation by autoLRP, for ViTs and CNNs.

AutoLRP has a rule for every operation of a pass, attention included. Its methods are the presets of
its configuration. Relevance starts as 1 at the target. Maps are sums over the channels.
"""

import inspect
from typing import Final

import autolrp
from autolrp import LRPConfig
from torch import Tensor

from vitlens.attribution.adapters.registry import LIBRARIES
from vitlens.attribution.adapters.shared import (
    LibraryMethod,
    Network,
    image_by_image,
    library_method,
    note_once,
    prepared,
    require_conserved,
    running,
)
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

_LIBRARY: Final = LIBRARIES["autolrp"]
_NOT_OF_ONE_IMAGE: Final = ("bilrp",)  # explains the similarity of two images


def methods() -> dict[str, LibraryMethod]:
    """Return the presets of the library by their full names."""
    entries = {}
    for preset, _ in inspect.getmembers(LRPConfig, inspect.ismethod):
        if preset in _NOT_OF_ONE_IMAGE:
            continue
        entry = library_method(
            _LIBRARY, preset, resolution="pixel", signed=True, forwards=1, backwards=2
        )
        entries[entry.name] = entry
    return entries


def library_maps(model: Model, images: Images, targets: Labels, *, name: str, variant: str) -> Maps:
    """Return the relevance of each pixel by a preset (batch, height, width)."""
    note_once(name)
    network = Network(model)
    config = getattr(LRPConfig, variant)()

    def explain(image: Tensor, target: Labels) -> Maps:
        wrapped = autolrp.tensor(image)
        logits = network(wrapped)
        logits[0, int(target)].lrp(config=config)
        relevance: Tensor = wrapped.relevance.as_subclass(Tensor).detach()
        return relevance.sum(1)

    with running(_LIBRARY, model, name):
        maps = image_by_image(explain, prepared(model, images), targets, seed=None)
    require_conserved(maps, 1.0, model=model, name=name)
    return maps
