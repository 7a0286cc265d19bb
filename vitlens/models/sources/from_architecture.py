"""Loading for most sources: an architecture is built, with weights from a file, from a hub, or random."""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from vitlens.errors import ModelError, VitlensError, lacks_memory
from vitlens.files import sha256
from vitlens.models.anatomy import is_headless
from vitlens.models.assembly import Architecture, assemble, build, count_classes, default_classes, seeded, versions
from vitlens.models.model import Model, Provenance
from vitlens.models.sources.registry import ModelRequest
from vitlens.models.weights import Weights, read_weights


def load(request: ModelRequest) -> Model:
    """The model of a source that has `build`.

    Raises ModelError for weights that are missing or do not fit, UnknownNameError for an unknown architecture.
    """
    name, file = request.name, request.file
    if request.source.weights == "none" and file is None and not request.random:
        raise ModelError(
            f"expected a trained model, found the {request.source.kind} {name!r}; train one first: "
            f"vitlens train {name} --data digits"
        )
    weights = read_weights(file) if file else None
    architecture = Architecture(request.source.kind, request.short, None, request.image_size)
    try:
        with seeded(request.seed):
            state = weights.state if weights else None
            module, preprocessing = build(architecture, state=state, pretrained=not (request.random or file))
        outputs = count_classes(module, preprocessing.size)
    except VitlensError:
        raise
    except Exception as error:  # libraries raise a dozen types for weights and sizes that do not fit
        if lacks_memory(error):
            raise
        size = "its own size" if request.image_size is None else "{}x{} px".format(*request.image_size)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"expected {name} at {size} to run, found: {reason}; check --image-size") from error
    classes = () if is_headless(module) else default_classes(outputs)
    architecture = replace(architecture, classes=len(classes))
    return assemble(module, architecture, preprocessing, classes, request.alias, _provenance(request, module, weights))


def _provenance(request: ModelRequest, module: nn.Module, weights: Weights | None) -> Provenance:
    file = request.file
    source = file.name if file else "random" if request.random else "hub"
    notes = (*weights.notes, *_resized(module, weights)) if weights else ()
    return Provenance(request.name, source, sha256(file) if file else None, versions(), notes)


def _resized(module: nn.Module, weights: Weights) -> Iterator[str]:
    """A note for each tensor that a library resized to make the weights fit (positions, for another image size)."""
    for key, value in module.state_dict().items():
        stored = weights.state.get(key)
        if stored is not None and stored.shape != value.shape:
            yield f"resized {key!r} from {tuple(stored.shape)} to {tuple(value.shape)}"
