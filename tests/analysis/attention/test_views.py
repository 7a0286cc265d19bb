"""Views of one patch: its row and its column of the full weights, in every family, also through Swin's windows."""

from functools import partial

import pytest
import torch

from tests.lens.oracles import unwindow
from tests.lens.tiny import FAMILIES, images, ours, shared_model, timm_model, torchvision_swin
from vitlens.analysis.attention.weights import attention, merged, patch_views
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens import call
from vitlens.lens.capture import capture_attention


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


@pytest.mark.parametrize("family", [name for name in FAMILIES if "swin" not in name])
def test_row_and_column_in_every_family(family):
    check_row_and_column(shared_model(family), (1, 2))


def test_a_column_of_more_images_than_go_at_once(monkeypatch):
    monkeypatch.setitem(call._AT_ONCE, "cpu", 1)
    check_row_and_column(ours(registers=3), (3, 2))


SWINS = {
    "timm": (lambda size: timm_model("swin_tiny_patch4_window7_224", img_size=size), (32, 32)),
    "timm-padded": (lambda size: timm_model("swin_tiny_patch4_window7_224", img_size=size), (20, 36)),
    "timm-v2": (lambda size: timm_model("swinv2_tiny_window8_256", img_size=size), (32, 32)),
    "torchvision": (torchvision_swin, (32, 32)),
    "torchvision-padded": (torchvision_swin, (20, 36)),
}


@pytest.mark.parametrize("patch", [(0, 0), (9, 9)])
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


XCIT = partial(timm_model, "xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32)


@pytest.mark.parametrize(
    ("make", "side", "patch", "error", "words"),
    [
        (ours, "query", (4, 0), InputError, r"--query ROW,COL inside the 4x3 grid \(0,0 to 3,2\), found 4,0"),
        (ours, "key", (0, 3), InputError, "--key ROW,COL inside the 4x3 grid .* found 0,3"),
        (ours, "key", (0, -1), InputError, "found 0,-1"),
        (torchvision_swin, "query", (16, 0), InputError, r"inside the 16x16 grid \(0,0 to 15,15\), found 16,0"),
        (XCIT, "key", (0, 0), UnsupportedError, "patches attend to patches, found none in tiny; leave --key out"),
    ],
)
def test_refusals(make, side, patch, error, words):
    model = make()
    with pytest.raises(error, match=words):
        patch_views(model, images(model.input_size), side=side, patch=patch)
