"""Views of one patch: its row and its column of the full weights, in every family, also through Swin's windows."""

import pytest
import torch

from tests.lens.oracles import unwindow
from tests.lens.tiny import FAMILIES, images, model_of, ours, shared_model, timm_model, torchvision_swin
from vitlens.analysis.attention.weights import attention, merged, patch_views
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens import call
from vitlens.lens.capture import capture_attention
from vitlens.models.resnet import build_resnet

PREFIXES = {  # prefix tokens -> a model that has so many
    0: lambda: timm_model("vit_base_patch16_siglip_224", alias="siglip"),
    1: ours,
    2: lambda: timm_model("deit_tiny_distilled_patch16_224"),
    5: lambda: timm_model("vit_small_patch14_reg4_dinov2"),
    4: lambda: ours(registers=3),
}


def check_row_and_column(model, patch):
    """Both views against the whole matrices."""
    batch, layout = images(model.input_size), model.anatomy.layout
    token = len(layout.prefix) + patch[0] * layout.grid[1] + patch[1]
    full = [weights for weights in attention(model, batch) if weights.shape[-2:] == (layout.tokens,) * 2]
    looks = patch_views(model, batch, side="query", patch=patch)
    seen = patch_views(model, batch, side="key", patch=patch)
    assert len(looks) == len(seen) == len(full) > 0
    for look, see, weights in zip(looks, seen, full):
        row, column = (torch.cat([view.prefix, view.maps.flatten(2)], -1) for view in (look, see))
        torch.testing.assert_close(row, weights[:, :, token], atol=1e-6, rtol=0)
        torch.testing.assert_close(column, weights[..., token], atol=1e-6, rtol=0)
        torch.testing.assert_close(look.maps.sum((2, 3)) + look.prefix.sum(2), torch.ones(weights.shape[:2]))
        assert look.maps.shape[2:] == see.maps.shape[2:] == layout.grid
        assert look.patch == see.patch == patch


@pytest.mark.parametrize("count", PREFIXES)
def test_row_and_column_behind_any_prefix(count):
    model = PREFIXES[count]()
    assert len(model.layout.prefix) == count
    check_row_and_column(model, (2, 1))


@pytest.mark.parametrize("family", [name for name in FAMILIES if "swin" not in name])
def test_row_and_column_in_every_family(family):
    check_row_and_column(shared_model(family), (1, 2))


@pytest.mark.parametrize("patch", [(0, 0), (0, 2), (3, 0), (3, 2)])
def test_the_corners_of_a_grid_that_is_not_square(patch):
    check_row_and_column(ours(registers=1), patch)


def test_a_column_of_more_images_than_go_at_once(monkeypatch):
    monkeypatch.setitem(call._AT_ONCE, "cpu", 1)
    check_row_and_column(ours(), (1, 1))


SWINS = {
    "timm": (lambda size: timm_model("swin_tiny_patch4_window7_224", img_size=size), (32, 32)),
    "timm-padded": (lambda size: timm_model("swin_tiny_patch4_window7_224", img_size=size), (20, 36)),
    "timm-v2": (lambda size: timm_model("swinv2_tiny_window8_256", img_size=size), (32, 32)),
    "torchvision": (torchvision_swin, (32, 32)),
    "torchvision-padded": (torchvision_swin, (20, 36)),
}


@pytest.mark.parametrize("patch", [(0, 0), (5, 3), (9, 9)])
@pytest.mark.parametrize("name", SWINS)
def test_windows_against_unwindow(name, patch):
    make, size = SWINS[name]
    model, batch = make(size), images(size)
    captured = capture_attention(model, batch)
    looks = patch_views(model, batch, side="query", patch=patch)
    seen = patch_views(model, batch, side="key", patch=patch)
    assert [look.site.layer for look in looks] == [0, 1, 2, 3]
    for site, weights, look, see in zip(captured.sites, captured.layers, looks, seen):
        where = patch if site.layer < 2 else (patch[0] // 2, patch[1] // 2)
        assert look.patch == see.patch == where
        full, columns = unwindow(weights, site.windows), site.windows.resolution[1]
        token = where[0] * columns + where[1]
        torch.testing.assert_close(look.maps.flatten(2), full[:, :, token], atol=1e-6, rtol=0)
        torch.testing.assert_close(see.maps.flatten(2), full[..., token], atol=1e-6, rtol=0)
        assert look.maps.shape[2:] == site.windows.resolution
        assert look.prefix.shape[2] == see.prefix.shape[2] == 0
        if "padded" not in name:
            torch.testing.assert_close(look.maps.sum((2, 3)), torch.ones(look.maps.shape[:2]))


@pytest.mark.parametrize(
    ("place", "before", "now", "expected"),
    [(7, 8, 4, 3), (4, 5, 3, 2), (3, 5, 3, 1), (2, 3, 2, 1), (3, 8, 8, 3), (19, 20, 14, 13), (0, 14, 20, 0)],
)
def test_a_place_after_merging(place, before, now, expected):
    assert merged(place, before, now) == expected


def test_layers_without_patches_that_look_at_patches_are_left_out():
    model = timm_model("cait_xxs24_224")
    kinds = [site.kind for site in capture_attention(model, images()).sites]
    assert "class" in kinds
    assert len(patch_views(model, images(), side="query", patch=(0, 0))) == kinds.count("patch")


@pytest.mark.parametrize("patch", [(4, 0), (0, 3), (-1, 0), (0, -1)])
def test_outside_the_grid(patch):
    found = rf"inside the 4x3 grid \(0,0 to 3,2\), found {patch[0]},{patch[1]}"
    with pytest.raises(InputError, match="expected --query ROW,COL " + found):
        patch_views(ours(), images((32, 48)), side="query", patch=patch)
    with pytest.raises(InputError, match="expected --key ROW,COL " + found):
        patch_views(ours(), images((32, 48)), side="key", patch=patch)


def test_outside_the_first_layers_grid_of_a_windowed_model():
    with pytest.raises(InputError, match=r"inside the 16x16 grid \(0,0 to 15,15\), found 16,0"):
        patch_views(torchvision_swin(), images(), side="query", patch=(16, 0))


def test_models_without_such_layers_are_refused():
    with pytest.raises(UnsupportedError, match="softmax attention"):
        patch_views(
            model_of(build_resnet("resnet20", classes=5, image_size=(32, 32))), images(), side="query", patch=(0, 0)
        )
    xcit = timm_model("xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32)
    with pytest.raises(UnsupportedError, match="patches attend to patches, found none in tiny; leave --key out"):
        patch_views(xcit, images(), side="key", patch=(0, 0))
