"""The randomization check goes from the head down in the order of the forward pass."""

from collections.abc import Callable

import pytest

from tests.kit import cascades
from tests.kit.models import clip
from tests.kit.odd import odd
from tests.kit.tiny import ours, small_cnn, timm_model, torchvision_swin, torchvision_vit
from vitlens import Model

MODELS: dict[str, Callable[[], Model]] = {
    "ours": ours,
    "odd": odd,
    "torchvision": torchvision_vit,
    "cnn": small_cnn,
    "open_clip": clip.tiny,  # its projection is registered before its blocks
    "swin": torchvision_swin,
    "timm's swin": lambda: timm_model("swin_tiny_patch4_window7_224"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_what_runs_behind_the_blocks_and_the_embedding_what_runs_before_them(name):
    model = MODELS[name]()
    stages = cascades.new_at_each_stage(model)
    assert stages["head"] == cascades.used_behind(model)
    assert stages["embedding"] == cascades.used_before(model)
    parameters = {name for name, _ in model.module.named_parameters()}
    assert set.union(*stages.values()) == parameters
    assert next(iter(stages)) == "head"
    assert list(stages)[-1] == "embedding"


@pytest.mark.parametrize(
    ("name", "part"), [("swin", "features.2."), ("timm's swin", "layers.1.downsample.")]
)
def test_what_merges_patches_between_two_blocks_counts_with_the_block_that_follows(name, part):
    stages = cascades.new_at_each_stage(MODELS[name]())
    merging = {parameter for parameter in stages["block 2"] if parameter.startswith(part)}
    assert len(merging) == 3
    for parameter in stages["embedding"]:
        assert not parameter.startswith(part)
