"""The same architecture for images of another size, to measure its cost."""

from dataclasses import replace

from torch import nn

from vitlens.errors import ModelError, lacks_memory
from vitlens.models.assembly import Architecture, assemble, build, count_classes, seeded, versions
from vitlens.models.cutting import cut_heads
from vitlens.models.model import Model, Provenance
from vitlens.models.sources.registry import SOURCES
from vitlens.preprocessing import require_side_lengths


def untrained_at(model: Model, size: tuple[int, int], *, seed: int = 0) -> Model:
    """A model of the same architecture for images of (height, width) pixels, with seeded random weights.

    A ViT has positions for the new size; our ResNets keep their stem. Raises ModelError
    where the model cannot be built or does not run at this size.
    """
    if size == model.input_size:
        return model
    require_side_lengths(size)
    architecture = replace(Architecture.from_json(model.architecture), image_size=size)
    try:
        with seeded(seed):
            module = _built(architecture, model)
        module.to("cpu")
        count_classes(module, size)
    except (AssertionError, RuntimeError, ValueError) as error:
        if lacks_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"expected {model.alias} to run at {size[0]}x{size[1]} px, found: {reason}; check --sizes"
        ) from error
    resized = assemble(
        module,
        architecture,
        replace(model.preprocessing, size=size, resize=None),
        model.classes,
        model.alias,
        Provenance(model.provenance.name, "random", None, versions()),
    )
    return resized.to(model.device).eval().requires_grad_(False)


def _built(architecture: Architecture, model: Model) -> nn.Module:
    whole = replace(architecture, pruned={})
    if SOURCES[whole.kind].any_size and model.anatomy.layout is None:
        # ResNet-18 and 50 have another stem below 64 px: build them for the old size, as they accept any
        whole = replace(whole, image_size=model.input_size)
    module, _ = build(whole)
    cut_heads(module, architecture.pruned)
    return module
