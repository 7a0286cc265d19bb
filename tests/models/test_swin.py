"""Swin: timm's weights, logits and windows; masks over sizes, windows and shifts; padding; what cannot be built."""

from dataclasses import replace

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.swin_transformer import get_relative_position_index
from timm.models.swin_transformer import window_partition as timm_partition
from timm.models.swin_transformer import window_reverse as timm_reverse
from torch import Tensor, nn

from tests.lens.tiny import model_of, our_swin, shaken
from vitlens.errors import InputError, ModelError
from vitlens.lens.call import window_index
from vitlens.lens.capture import capture_attention
from vitlens.lens.site import Windows
from vitlens.models.configs import SWIN_PRESETS, SwinConfig
from vitlens.models.loading import load, untrained
from vitlens.models.saved import save
from vitlens.models.swin import (
    PatchMerging,
    SwinBlock,
    SwinTransformer,
    from_timm,
    padded_size,
    padding_note,
    relative_position_index,
    window_mask,
    window_partition,
    window_reverse,
    window_shift,
)
from vitlens.training.optimiser import Optimiser, decay_groups
from vitlens.training.recipe import Recipe

TIMM = "swin_tiny_patch4_window7_224"
SIDES = st.integers(1, 11)
PAIRS = st.tuples(SIDES, SIDES)


def numbered(rows: int, columns: int, *, batch: int = 1) -> Tensor:
    return torch.arange(float(batch * rows * columns)).view(batch, rows, columns, 1)


def pictures(height: int = 32, width: int = 32, *, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


def tiny_twin(**options: object) -> nn.Module:
    shape = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    model: nn.Module = shaken(lambda: timm.create_model(TIMM, num_classes=5, **{**shape, **options}))
    return model


TINY = SwinConfig(dim=16, depths=(2, 2), heads=(2, 4), classes=5)


def with_weights(config: SwinConfig, theirs: nn.Module) -> SwinTransformer:
    ours = SwinTransformer(config).eval()
    ours.load_state_dict(from_timm(theirs.state_dict()), strict=True)
    return ours


# ---- timm's weights


def expected_parameters(config: SwinConfig) -> int:
    """12 d² + 13 d a block and its table of offsets; patches, merging (8 d² + 8 d), final norm and head."""
    offsets = (2 * config.window[0] - 1) * (2 * config.window[1] - 1)
    blocks = sum(
        depth * (12 * width**2 + 13 * width + offsets * heads)
        for depth, width, heads in zip(config.depths, config.widths, config.heads)
    )
    merging = sum(8 * width**2 + 8 * width for width in config.widths[:-1])
    embedding = (3 * config.patch_size[0] * config.patch_size[1] + 3) * config.dim
    return blocks + merging + embedding + 2 * config.widths[-1] + (config.widths[-1] + 1) * config.classes


@pytest.mark.parametrize(("name", "stated"), [("swin-micro", 1_267_670), ("swin-tiny-224", 28_288_354)])
def test_a_preset_has_its_parameters(name: str, stated: int) -> None:
    with torch.device("meta"):
        model = SwinTransformer(SWIN_PRESETS[name])
    assert sum(value.numel() for value in model.parameters()) == stated == expected_parameters(SWIN_PRESETS[name])


TWINS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "tiny": ({}, {}),
    "no qkv bias": ({"qkv_bias": False}, {"qkv_bias": False}),
    "oblong windows": ({"window": (2, 4)}, {"window_size": (2, 4)}),
    "odd depths": ({"depths": (1, 3)}, {"depths": (1, 3)}),
    "oblong image": ({"image_size": (16, 48)}, {"img_size": (16, 48)}),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_tiny_model_equals_timms(name: str) -> None:
    change, options = TWINS[name]
    theirs = tiny_twin(**options)
    ours = with_weights(replace(TINY, **change), theirs)
    images = pictures(*ours.config.image_size)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=0)


def test_every_window_has_timms_weights() -> None:
    theirs = tiny_twin()
    both = [model_of(model, alias="swin") for model in (with_weights(TINY, theirs), theirs)]
    mine, other = (capture_attention(model, pictures()) for model in both)
    assert [site.windows.count for site in mine.sites] == [16, 16, 4, 4]  # type: ignore[union-attr]
    for site, one, two in zip(mine.sites, mine.layers, other.layers, strict=True):
        assert one.shape == (2 * site.windows.count, site.heads, 16, 16)  # type: ignore[union-attr]
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


def test_windows_and_offsets_are_timms() -> None:
    maps = numbered(8, 12, batch=2)
    windows = window_partition(maps, (4, 2))
    assert torch.equal(windows, timm_partition(maps, (4, 2)).flatten(1, 2))
    assert torch.equal(window_reverse(windows, (4, 2), (8, 12)), timm_reverse(windows, (4, 2), 8, 12))
    assert torch.equal(relative_position_index((3, 5)), get_relative_position_index(3, 5))


@pytest.mark.slow
def test_timms_file_is_loaded_under_our_names(tmp_path) -> None:
    theirs = shaken(lambda: timm.create_model(TIMM, num_classes=7), scale=0.05)
    torch.save(theirs.state_dict(), tmp_path / "swin.pth")
    model = load("swin-tiny-224", weights=str(tmp_path / "swin.pth"))
    images = pictures(224, 224, batch=1)
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs(model.prepare(images)), atol=1e-5, rtol=0)
    save(model, tmp_path / "model.safetensors")
    again = load(str(tmp_path / "model.safetensors"))
    assert again.classes == model.classes
    assert torch.equal(again(images), model(images))


# ---- masks


def patches_that_meet(size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]) -> set[tuple[int, int]]:
    """Pairs of patches in one window of the shifted map whose offset in it is that in the map, by loops."""
    rows, columns = padded_size(size, window)
    place = {
        row * size[1] + column: ((row - shift[0]) % rows, (column - shift[1]) % columns, row, column)
        for row in range(size[0])
        for column in range(size[1])
    }
    return {
        (one, other)
        for one, (down, across, row, column) in place.items()
        for other, (down2, across2, row2, column2) in place.items()
        if (down // window[0], across // window[1]) == (down2 // window[0], across2 // window[1])
        and (down - down2, across - across2) == (row - row2, column - column2)
    }


@settings(deadline=None, max_examples=150)
@given(size=PAIRS, window=PAIRS, data=st.data())
def test_patches_attend_iff_they_share_a_window_and_were_neighbours(size, window, data) -> None:
    shift = data.draw(st.tuples(st.integers(0, window[0] - 1), st.integers(0, window[1] - 1)))
    shift = window_shift(size, window, shift)
    index = window_index(Windows(size, window, shift, pad_first=True))
    mask = window_mask(size, window, shift)
    allowed = torch.ones(len(index), *index.shape[1:] * 2, dtype=torch.bool) if mask is None else mask
    assert allowed.shape == (len(index), window[0] * window[1], window[0] * window[1])
    assert allowed.any(-1).all()  # every softmax has a key
    real = index >= 0
    assert not (allowed & (real[:, :, None] != real[:, None])).any()  # padding and patches never meet
    pairs = (allowed & real[:, :, None] & real[:, None]).nonzero().tolist()
    met = {(int(index[n, query]), int(index[n, key])) for n, query, key in pairs}
    assert met == patches_that_meet(size, window, shift)
    assert (mask is None) == (shift == (0, 0) and -1 not in index)


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (3, 12)])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_patch_depends_on_the_patches_that_it_may_attend_to(size, shifted) -> None:
    """By gradients of the whole branch: pad, shift, cut, attend and back."""
    torch.manual_seed(0)
    block = SwinBlock(SwinConfig(dim=8, depths=(1,), heads=(1,)), stage=0, shifted=shifted).eval()
    maps = torch.randn(1, *size, 8, requires_grad=True)
    depends = set()
    output = block.attend(maps)
    assert output.shape == maps.shape
    for query in range(size[0] * size[1]):
        (gradient,) = torch.autograd.grad(output.flatten(1, 2)[0, query].sum(), maps, retain_graph=True)
        depends |= {(query, int(key)) for key in gradient.abs().sum(-1).flatten().nonzero()}
    shift = window_shift(size, (4, 4), (2, 2) if shifted else (0, 0))
    assert depends == patches_that_meet(size, (4, 4), shift)


def test_padding_changes_no_patch() -> None:
    """One window that is larger than the map gives what a window of the map's size gives."""
    torch.manual_seed(0)
    large = SwinBlock(SwinConfig(dim=8, depths=(1,), heads=(2,), window=(5, 6)), stage=0, shifted=True).eval()
    small = SwinBlock(SwinConfig(dim=8, depths=(1,), heads=(2,), window=(3, 4)), stage=0, shifted=False).eval()
    state = large.state_dict()
    table = state["position_bias.bias_table"].view(9, 11, 2)[2:-2, 2:-2]  # offsets up to 2 rows and 3 columns
    state["position_bias.bias_table"] = table.reshape(-1, 2)
    small.load_state_dict(state)
    maps = torch.randn(2, 3, 4, 8)
    torch.testing.assert_close(large(maps), small(maps), atol=1e-6, rtol=0)


def test_without_shift_no_patch_sees_beyond_its_window() -> None:
    model = our_swin(shift=False, depths=(4,), heads=(2,)).module
    images = pictures(batch=1).requires_grad_()
    stream = model.layers(model.patch_embed(images))
    (gradient,) = torch.autograd.grad(stream[0, 5, 6].sum(), images)
    seen = gradient[0].abs().sum(0) > 0
    assert seen[8:16, 8:16].all()  # the window of patches 4 to 7, of 2 px
    assert seen.sum() == 64


def test_merging_halves_the_map_and_pads_odd_sides() -> None:
    merge = PatchMerging(4)
    assert merge(torch.randn(2, 5, 8, 4)).shape == (2, 3, 4, 8)
    corners = numbered(4, 4).expand(-1, -1, -1, 4)
    merge.norm, merge.reduction = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    assert merge(corners)[0, 0, 0, ::4].tolist() == [0, 4, 1, 5]  # first down, then across, as in the paper's code


# ---- sizes, training, what cannot be built


@pytest.mark.parametrize("size", [(33, 47), (64, 16)])
def test_any_image_size(size) -> None:
    model = our_swin(size=size)
    captured = capture_attention(model, pictures(*size))  # the lens checks weights @ values, and the logits
    assert [site.windows.resolution for site in captured.sites[::2]] == list(model.module.config.maps(size))  # type: ignore[union-attr]
    assert all(site.windows.pad_first for site in captured.sites)  # type: ignore[union-attr]


def test_padding_is_said() -> None:
    config = SWIN_PRESETS["swin-micro"]
    assert padding_note(config, (32, 32)) == ""
    model = load("swin-micro", random_weights=True, image_size=(28, 32))
    (note,) = model.provenance.notes
    assert note == padding_note(config, (28, 32))
    for words in ("14x16 patches to 16x16 in stage 0", "7x8 patches to 8x8 in stage 1"):
        assert words in note


def test_position_biases_are_not_decayed_and_not_orthogonalised() -> None:
    module = our_swin().requires_grad_(True).module
    tables = {name for name, _ in module.named_parameters() if name.endswith("bias_table")}
    assert len(tables) == 4
    assert tables <= set(decay_groups(module)[1])
    blocks = our_swin().anatomy.blocks
    state = Optimiser(module, Recipe(optimiser="muon"), blocks=blocks).expected()
    assert not any(f"{name}/momentum_buffer" in state for name in tables)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": (4, -1)}, "window of at least 1 patches a side, found 4x-1"),
        ({"patch_size": (0, 2)}, "patch_size of at least 1 px a side, found 0x2"),
        ({"depths": (2, 0), "heads": (2, 4)}, "at least 1 block in stage 1, found 0"),
        ({"depths": ()}, "depths and heads of one number of stages"),
        ({"heads": (2, 4)}, "depths and heads of one number of stages"),
        ({"heads": (2, 5, 8)}, "divide the width 96 of stage 1, found 5; try 4"),
        ({"dim": 0}, "dim of at least 1"),
        ({"mlp_ratio": 0.0}, "mlp_ratio of at least 1/dim"),
        ({"drop_path": 1.0}, r"drop_path in \[0, 1\), found 1"),
    ],
)
def test_what_cannot_be_built(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        SwinConfig(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"residual": False}, "fields of a Swin, found 'residual'"),
        ({"pooling": "cls"}, "no --pooling for swin-micro"),
        ({"depth": 3}, "no --depth for swin-micro, whose stages have their own"),
        ({"heads": 3}, "no --heads for swin-micro, whose stages have their own"),
        ({"heads": [3, 6]}, "one number of stages"),
    ],
)
def test_options_of_other_models_are_refused(overrides, words) -> None:
    with pytest.raises(InputError, match=words):
        untrained("swin-micro", classes=("a", "b"), overrides=overrides)


def test_other_weights_are_refused(tmp_path) -> None:
    torch.save(timm.create_model("vit_tiny_patch16_224").state_dict(), tmp_path / "vit.pth")
    with pytest.raises(ModelError, match="do not fit"):
        load("swin-tiny-224", weights=str(tmp_path / "vit.pth"))
