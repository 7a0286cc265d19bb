"""A model around another module than its own: with another head, without some of its heads."""

from torch import nn

from vitlens.models.assembly import Architecture, assemble
from vitlens.models.model import Model, Provenance
from vitlens.references import resolved


def with_module(
    model: Model, module: nn.Module, architecture: Architecture, classes: tuple[str, ...], provenance: Provenance
) -> Model:
    """A model around this module, on the device of the first; the anatomy is read again in the same way."""
    rest = (model.preprocessing, classes, model.alias, provenance)
    if model.told is None:
        return assemble(module, architecture, *rest).to(model.device)
    traced: Model = resolved("vitlens.models.wrap:wrapped")(module, architecture, *rest, told=model.told)
    return traced.to(model.device)
