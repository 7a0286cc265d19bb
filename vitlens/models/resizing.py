"""The same architecture for images of another size, to see what it costs there."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from vitlens.errors import ModelError, lacks_memory
from vitlens.models.assembly import assemble, count_classes, seeded, versions
from vitlens.models.build import Architecture, build_preset
from vitlens.models.cutting import cut_heads
from vitlens.models.specimen import Provenance, Specimen
from vitlens.preprocessing import require_side_lengths


def untrained_at(specimen: Specimen, size: tuple[int, int], *, seed: int = 0) -> Specimen:
    """A specimen of the same architecture for images of (height, width) pixels, with seeded random weights.

    A ViT has as many positions as it then needs; our ResNets keep their stem, whatever the size. Raises ModelError
    where the model cannot be built or does not run at this size.
    """
    if size == specimen.input_size:
        return specimen
    require_side_lengths(size)
    architecture = replace(Architecture.from_json(specimen.architecture), image_size=size)
    try:
        with seeded(seed):
            model = _built(architecture, specimen)
        model.to("cpu")
        count_classes(model, size)
    except (AssertionError, RuntimeError, ValueError) as error:
        if lacks_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"expected {specimen.alias} to run at {size[0]}x{size[1]} px, found: {reason}; check --sizes"
        ) from error
    made = assemble(
        model,
        architecture,
        replace(specimen.preprocessing, size=size, resize=None),
        specimen.classes,
        specimen.alias,
        Provenance(specimen.provenance.name, "random", None, versions()),
    )
    return made.to(specimen.device).eval().requires_grad_(False)


def _built(architecture: Architecture, specimen: Specimen) -> nn.Module:
    whole = replace(architecture, pruned={})
    if whole.kind == "timm":
        from vitlens.models.timm_zoo import build_timm

        model, _ = build_timm(whole)
    elif whole.kind == "torchvision":
        from vitlens.models.torchvision_zoo import build_torchvision

        model, _ = build_torchvision(whole)
    elif specimen.anatomy.layout is not None:
        model, _ = build_preset(whole)
    else:  # below 64 px ResNet-18 and 50 are built with another stem: built as before, it takes any size
        own = replace(whole, image_size=specimen.input_size)
        model, _ = build_preset(own)
    pruned: Mapping[str, list[int]] = architecture.pruned
    cut_heads(model, pruned)
    return model
