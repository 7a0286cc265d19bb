"""Variants put together from tokens, from pixels, and one by one by hand: the same answers."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.lens.tiny import images, ours, timm_model
from vitlens.analysis.faithfulness.maps import enlarged, on_grid, removal_grid
from vitlens.analysis.faithfulness.removal import Variants, blurred, distinct_variants, pixel_masks, substrate_images
from vitlens.errors import UnsupportedError
from vitlens.lens.replay_pass import entry_of
from vitlens.models.model import Model

SAME = {"atol": 2e-5, "rtol": 1e-4}
MODELS = {
    "ours": ours,
    "mean": lambda: ours(pooling="mean"),
    "distilled": lambda: timm_model("deit_tiny_distilled_patch16_224"),
    "registers": lambda: timm_model("vit_small_patch14_reg4_dinov2"),
    "rotary": lambda: timm_model("eva02_tiny_patch14_224"),
    "swin": lambda: timm_model("swin_tiny_patch4_window7_224"),
}


def variants(model: Model, count: int = 11, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = removal_grid(model)
    removed = torch.rand(count, rows * columns, generator=torch.Generator().manual_seed(3)) < 0.5
    removed[0], removed[1] = False, True
    return images(model.input_size, batch=batch), torch.arange(count) % batch, removed


@torch.no_grad()
def one_by_one(model: Model, batch: Tensor, which: Tensor, removed: Tensor, substrate: str) -> Tensor:
    other = substrate_images(batch, substrate)
    rows = []
    for index, gone in zip(which.tolist(), removed):
        cells = gone.view(1, 1, *removal_grid(model)).float()
        pixels = F.interpolate(cells, size=model.input_size, mode="nearest-exact")[0] > 0.5
        rows.append(model(torch.where(pixels, other[index], batch[index])[None])[0])
    return torch.stack(rows)


@pytest.mark.parametrize("name", MODELS)
def test_many_at_once_are_each_by_itself(name):
    model = MODELS[name]()
    batch, which, removed = variants(model)
    found = Variants(model, batch, substrate="mean", batch_size=4).logits(which, removed)
    torch.testing.assert_close(found, one_by_one(model, batch, which, removed, "mean"), **SAME)


@pytest.mark.parametrize("substrate", ["blur", "mean", "black"])
def test_every_substrate_is_what_stands_there(substrate):
    model = ours()
    batch, which, removed = variants(model)
    found = Variants(model, batch, substrate=substrate).logits(which, removed)
    torch.testing.assert_close(found, one_by_one(model, batch, which, removed, substrate), **SAME)


def test_which_models_are_entered_by_tokens():
    entered = {name: entry_of(build()) for name, build in MODELS.items()}
    assert {name for name, entry in entered.items() if entry is not None} >= {"ours", "mean", "distilled", "registers"}
    assert entered["swin"] is None
    assert entered["ours"] is not None
    assert entered["ours"].only_tokens


@torch.no_grad()
def test_absent_patches_are_no_tokens():
    """By hand: the model's own blocks and head on the tokens that stay."""
    model = ours()
    batch, which, removed = variants(model)
    removed[1, 0] = False
    found = Variants(model, batch, substrate="absent", batch_size=2).logits(which, removed)
    module = model.module
    for row, index, gone in zip(found, which, removed):
        tokens = module.tokens(model.prepare(batch[index : index + 1]))
        kept = tokens[:, torch.cat([torch.tensor([True]), ~gone])]
        for block in module.blocks:
            kept = block(kept)
        torch.testing.assert_close(row, module.forward_head(module.norm(kept))[0], **SAME)


def test_nothing_removed_and_absent_is_the_image():
    model = ours()
    batch = images(model.input_size, batch=2)
    nothing = torch.zeros(2, model.layout.patches, dtype=torch.bool)
    found = Variants(model, batch, substrate="absent").logits(torch.arange(2), nothing)
    with torch.no_grad():
        torch.testing.assert_close(found, model(batch), **SAME)


def test_images_of_another_size_are_resized_first():
    model = ours()
    batch, which, removed = variants(model)
    large = F.interpolate(batch, size=(64, 96), mode="bilinear")
    small = F.interpolate(large, size=model.input_size, mode="bilinear", antialias=True, align_corners=False)
    found = Variants(model, large).logits(which, removed)
    torch.testing.assert_close(found, Variants(model, small).logits(which, removed))


def test_a_variant_asked_for_twice_is_computed_once():
    which = torch.tensor([1, 0, 1, 1])
    removed = torch.tensor([[True, False], [True, False], [True, False], [False, False]])
    place, back = distinct_variants(which, removed)
    assert len(place) == 3
    assert torch.equal(which[place][back], which)
    assert torch.equal(removed[place][back], removed)


def test_a_model_of_windows_needs_all_its_patches():
    with pytest.raises(UnsupportedError, match="left out of the sequence"):
        Variants(MODELS["swin"](), images(), substrate="absent")


def test_a_blur_keeps_even_colour_and_the_mean_and_takes_detail():
    even = torch.full((1, 3, 16, 24), 0.3)
    torch.testing.assert_close(blurred(even, 4.0), even)
    noise = torch.rand(1, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    assert blurred(noise, 4.0).std() < 0.2 * noise.std()
    spike = torch.zeros(1, 3, 33, 33)
    spike[:, :, 16, 16] = 1
    spread = blurred(spike, 2.0)[0, 0]
    place = torch.arange(33.0) - 16
    expected = torch.exp(-(place[:, None] ** 2 + place**2) / 8)
    torch.testing.assert_close(spread, (expected / expected.sum()), atol=3e-4, rtol=0.0)


def test_pixels_of_a_patch():
    removed = torch.tensor([[True, False, False, False, False, True]])
    mask = pixel_masks(removed, (2, 3), (4, 6))[0, 0]
    assert mask.sum() == 8
    assert mask[:2, :2].all()
    assert mask[2:, 4:].all()


def test_maps_at_another_resolution():
    fine = torch.arange(16.0).view(1, 4, 4)
    assert torch.equal(on_grid(fine, (2, 2)), torch.tensor([[[2.5, 4.5], [10.5, 12.5]]]))
    assert on_grid(fine, (4, 4)) is fine
    coarse = torch.tensor([[[0.0, 1.0]]])
    assert torch.equal(enlarged(coarse, (1, 4)), torch.tensor([[[0.0, 0.25, 0.75, 1.0]]]))
    assert on_grid(torch.ones(2, 7, 3), (4, 8)).eq(1).all()
