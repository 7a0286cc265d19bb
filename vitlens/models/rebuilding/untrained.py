"""A model of the same architecture with random weights."""

from dataclasses import replace

from vitlens.errors import UnsupportedError
from vitlens.models.assembly import Architecture, build, seeded, versions
from vitlens.models.cutting import cut_heads
from vitlens.models.model import Model, Provenance
from vitlens.models.rebuilding import with_module
from vitlens.models.sources.registry import SOURCES


def untrained_like(model: Model, *, seed: int, alias: str | None = None) -> Model:
    """A model of the same architecture, input and classes with seeded random weights, on the same device.

    alias: its name (None: the model's). Raises UnsupportedError for a model whose architecture is only known by the
    code that made it.
    """
    source = SOURCES.get(str(model.architecture.get("kind")))
    if source is None or not source.build:
        raise UnsupportedError(
            f"expected an architecture that can be built anew with random weights, found {model.alias}, which only its "
            "own code can make; try timm:NAME, torchvision:NAME or a run folder"
        )
    architecture = Architecture.from_json(model.architecture)
    with seeded(seed):
        module, _ = build(replace(architecture, image_size=model.input_size))
    cut_heads(module, architecture.pruned)
    provenance = Provenance(model.provenance.name, "random", None, versions())
    made = with_module(model, module, architecture, model.classes, provenance)
    made.alias = alias or model.alias
    return made.eval().requires_grad_(False)
