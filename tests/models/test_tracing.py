"""The anatomy read from forward passes is the one that attribute names give, for models that have such names."""

from collections.abc import Callable

import pytest

from tests.lens.tiny import ours, timm_model, torchvision_swin, torchvision_vit
from vitlens.models.model import Model
from vitlens.models.wrap import wrap

KNOWN: dict[str, Callable[[], Model]] = {
    "ours": ours,
    "torchvision": torchvision_vit,
    "torchvision-swin": torchvision_swin,
    **{
        name: (lambda name=name: timm_model(name))  # type: ignore[misc]
        for name in (
            "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_small_patch14_reg4_dinov2",
            "vit_base_patch16_siglip_224", "deit3_small_patch16_224", "eva02_tiny_patch14_224",
            "beit_base_patch16_224", "swin_tiny_patch4_window7_224", "vit_base_patch32_clip_224",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_the_traced_anatomy_is_that_of_the_names(name: str) -> None:
    model = KNOWN[name]()
    traced = wrap(model.module, image_size=model.input_size, mean=(0.5,) * 3, std=(0.5,) * 3).anatomy
    known = model.anatomy
    assert (traced.family, traced.blocks, traced.layout, traced.readout) == (
        known.family,
        known.blocks,
        known.layout,
        known.readout,
    )
    assert {part.module: (part.heads, part.projection) for part in traced.attention or ()} == {
        name: (known.parts[name].heads, known.parts[name].projection) for name in known.attention_modules
    }
    for part in traced.attention or ():
        block = next((block for block in known.blocks if part.module.startswith(f"{block}.")), None)
        if block is not None and known.family == "vit":
            assert part.mlp == f"{block}.mlp"
