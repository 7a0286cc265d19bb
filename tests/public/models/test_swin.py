"""Swin: timm's weights, logits and windows; patches that meet, by gradients; padding."""

import pytest
import timm
import torch
from torch import Tensor

import vitlens
from tests.kit.models.handwritten import half
from tests.kit.tiny import SWIN, images, our_swin, shaken
from vitlens.errors import InputError

TIMM = "swin_tiny_patch4_window7_224"


@pytest.mark.parametrize(
    ("name", "stated"), [("swin-micro", 1_267_670), ("swin-tiny-224", 28_288_354)]
)
def test_a_preset_has_its_parameters(name, stated):
    with torch.device("meta"):
        assert vitlens.load(f"{name}@random", device="meta").parameter_count() == stated


MICRO = SWIN | {"embed_dim": 48, "depths": (2, 2, 2), "num_heads": (2, 4, 8), "num_classes": 7}


def test_timms_file_is_loaded_under_our_names(tmp_path):
    theirs = shaken(lambda: timm.create_model(TIMM, **MICRO), scale=0.05)
    torch.save(theirs.state_dict(), tmp_path / "swin.pth")
    model = vitlens.load("swin-micro", weights=tmp_path / "swin.pth")
    batch = images(model.input_size, batch=1)
    with torch.no_grad():
        torch.testing.assert_close(model(batch), theirs(model.prepare(batch)), atol=1e-5, rtol=1e-5)
    assert len(model.classes) == 7


TWINS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "tiny": ({}, {}),
    "no qkv bias": ({"qkv_bias": False}, {"qkv_bias": False}),
    "oblong windows": ({"window": (2, 4)}, {"window_size": (2, 4)}),
    "odd depths": ({"depths": (1, 3)}, {"depths": (1, 3)}),
    "oblong image": ({"size": (16, 48)}, {"img_size": (16, 48)}),
}


@pytest.mark.parametrize("twin", TWINS)
def test_logits_and_the_weights_of_every_window_are_timms(twin: str):
    change, options = TWINS[twin]
    theirs = shaken(lambda: timm.create_model(TIMM, **SWIN | options))
    our_model = our_swin(**change)
    state = {}
    for name, value in theirs.state_dict().items():
        name = name.replace("attn.relative_position_bias_table", "position_bias.bias_table")
        state[name.replace("head.fc.", "head.")] = value
    our_model.module.load_state_dict(state, strict=True)
    wrapped = half(theirs, our_model.input_size)
    seen: list[list[Tensor]] = [[], []]
    logits = []
    for model, weights in zip((our_model, wrapped), seen):
        vitlens.observe(
            model,
            images(our_model.input_size),
            lambda call, store=weights: store.append(call.weights()),
        )
        logits.append(model(images(our_model.input_size)))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
    assert len(seen[0]) == len(seen[1]) == 4
    for one, other in zip(*seen):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


# ---- which patches meet


def patches_that_meet(
    size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]
) -> set[tuple[int, int]]:
    """Return pairs of patches in one shifted window whose offset is that in the map, by loops."""
    rows, columns = (-(-side // part) * part for side, part in zip(size, window))
    place = {}
    for row in range(size[0]):
        for column in range(size[1]):
            shifted = ((row - shift[0]) % rows, (column - shift[1]) % columns)
            place[row * size[1] + column] = (*shifted, row, column)
    pairs = set()
    for one, (down, across, row, column) in place.items():
        for other, (down2, across2, row2, column2) in place.items():
            same_row = down // window[0] == down2 // window[0]
            same_column = across // window[1] == across2 // window[1]
            same_offset = (down - down2, across - across2) == (row - row2, column - column2)
            if same_row and same_column and same_offset:
                pairs.add((one, other))
    return pairs


# patches of the map, of a window, and by how many the second block shifts (none where one window
# holds all)
MAPS = [
    ((7, 9), (4, 4), (2, 2), 1, True),
    ((3, 12), (4, 4), (0, 2), 1, True),
    ((12, 4), (4, 4), (2, 0), 1, True),
    ((5, 6), (2, 3), (1, 1), 1, True),
    ((4, 9), (1, 5), (0, 2), 1, True),
    ((3, 5), (5, 6), (0, 0), 1, True),
    ((8, 8), (4, 4), (0, 0), 0, True),
    ((6, 7), (3, 2), (0, 0), 0, True),
    ((7, 9), (4, 4), (0, 0), 1, False),
]


@pytest.mark.parametrize(("size", "window", "shift", "index", "shifts"), MAPS)
def test_a_patch_depends_on_those_that_share_its_window_and_were_neighbours(
    size, window, shift, index, shifts
):
    """By gradients of the whole branch: pad, shift, cut, attend and back; every second block
    shifts.
    """
    block = (
        our_swin(dim=8, depths=(2,), heads=(1,), window=window, shift=shifts)
        .module.layers[0]
        .blocks[index]
    )
    maps = torch.randn(2, *size, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    output = block.attend(maps)
    assert output.shape == maps.shape
    depends = set()
    for query in range(size[0] * size[1]):
        (gradient,) = torch.autograd.grad(
            output.flatten(1, 2)[1, query].sum(), maps, retain_graph=True
        )
        assert not gradient[0].any()  # of another image
        depends |= {(query, int(key)) for key in gradient[1].abs().sum(-1).flatten().nonzero()}
    assert depends == patches_that_meet(size, window, shift)


def test_padding_changes_no_patch():
    """One window that is larger than the map gives what a window of the map's size gives."""
    large = our_swin(dim=8, depths=(1,), heads=(2,), window=(5, 6)).module
    small = our_swin(dim=8, depths=(1,), heads=(2,), window=(3, 4)).module
    state = large.state_dict()
    name = "layers.0.blocks.0.position_bias.bias_table"
    # offsets up to 2 rows and 3 columns
    state[name] = state[name].view(9, 11, 2)[2:-2, 2:-2].reshape(-1, 2)
    small.load_state_dict(state)
    maps = torch.randn(2, 3, 4, 8)
    torch.testing.assert_close(large.layers(maps), small.layers(maps), atol=1e-6, rtol=0)


def test_padding_is_said():
    assert vitlens.load("swin-micro@random").provenance.notes == ()
    (note,) = vitlens.load("swin-micro@random", image_size=(28, 32)).provenance.notes
    for words in ("14x16 patches to 16x16 in stage 0", "7x8 patches to 8x8 in stage 1"):
        assert words in note


def test_drop_path_grows_with_depth():
    layers = our_swin(drop_path=0.3).module.layers
    assert [block.drop_path.p for stage in layers for block in stage.blocks] == pytest.approx(
        [0, 0.1, 0.2, 0.3]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": (4, -1)}, "window of at least 1"),
        ({"patch_size": (0, 2)}, "patch_size of at least 1"),
        ({"depths": (2, 0)}, "stage 1, found 0"),
        ({"depths": ()}, "one number of stages"),
        ({"heads": (2, 4, 8)}, "one number of stages"),
        ({"heads": (2, 5)}, "found 5; try 4"),
        ({"dim": 0}, "dim of at least 1"),
        ({"mlp_ratio": 0.0}, "mlp_ratio"),
        ({"drop_path": 1.0}, "drop_path"),
    ],
    ids=str,
)
def test_what_cannot_be_built(change: dict[str, object], words: str):
    with pytest.raises(InputError, match=words):
        our_swin(**change)
