"""Views of a patch, windows, moved attention and the order of positions.

References are full matrices, loops and scipy.
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit.lens import calls_of
from tests.kit.select import values_of
from tests.kit.tiny import (
    images,
    model_of,
    our_swin,
    ours,
    shared_model,
    timm_model,
    torchvision_swin,
    torchvision_vit,
)
from tests.kit.windows import WINDOWED, unwindow
from vitlens.analysis.attention.positions import (
    distance_correlation,
    position_similarity,
    rank_correlation,
)
from vitlens.analysis.attention.weights import attention_moved, merged_index, patch_views
from vitlens.analysis.attention.windows import reachable_patches, window_layers
from vitlens.errors import InputError, UnsupportedError


@pytest.mark.parametrize(
    ("make", "patch", "count"),
    [
        (partial(shared_model, "cait"), (1, 2), 2),
        (partial(shared_model, "siglip"), (1, 2), 2),
        # more images than go at once
        (
            partial(ours, registers=3, size=(64, 96), patch_size=(4, 4)),
            (1, 2),
            9,
        ),
        (WINDOWED["swin"], (0, 0), 2),
        *(
            (WINDOWED[name], (9, 9), 2)
            for name in ("swin, padded", "torchvision, padded", "hiera", "sam2's hiera", "maxvit")
        ),
    ],
)
def test_row_and_column_of_a_patch(make, patch, count):
    """After merging, of the patch that contains it; not of layers whose query is no patch."""
    model = make()
    batch = images(model.input_size, batch=count)
    full = []
    for call in calls_of(model, batch):
        if call.site.kind == "class":
            continue
        if call.site.windows:
            full.append(unwindow(call.placed(), call.site.windows))
        else:
            full.append(call.weights())
    looks = patch_views(model, batch, side="query", patch=patch)
    seen = patch_views(model, batch, side="key", patch=patch)
    grids = [
        look.site.windows.resolution if look.site.windows else model.layout.grid for look in looks
    ]
    for look, see, weights, grid in zip(looks, seen, full, grids, strict=True):
        where = tuple(place * side // before for place, side, before in zip(patch, grid, grids[0]))
        token = weights.shape[-1] - grid[0] * grid[1] + where[0] * grid[1] + where[1]
        for view, line in ((look, weights[:, :, token]), (see, weights[..., token])):
            assert (view.patch, view.maps.shape[2:]) == (where, grid)
            row_and_column = torch.cat([view.prefix, view.maps.flatten(2)], -1)
            torch.testing.assert_close(row_and_column, line, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("place", "before", "now", "expected"),
    [
        (7, 8, 4, 3),
        (4, 5, 3, 2),
        (3, 5, 3, 1),
        (2, 3, 2, 1),
        (3, 8, 8, 3),
        (19, 20, 14, 13),
        (0, 14, 20, 0),
    ],
)
def test_a_place_after_merging(place, before, now, expected):
    assert merged_index(place, before, now) == expected


def test_a_patch_that_is_not_there_is_refused():
    xcit = timm_model("xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32)
    with pytest.raises(UnsupportedError, match="omit --key"):
        patch_views(xcit, images(), side="key", patch=(0, 0))
    for patch in ((4, 0), (0, 3), (0, -1), (-1, 0)):
        with pytest.raises(
            InputError, match=rf"4x3 grid \(0,0 to 3,2\), found {patch[0]},{patch[1]}"
        ):
            patch_views(ours(), images((32, 48)), side="query", patch=patch)


def meets(
    one: tuple[int, int], other: tuple[int, int], *, shift: int, side: int, window: int = 4
) -> bool:
    """Return True if two patches share a window of the shifted map without crossing its seam."""
    places = [tuple((axis - shift) % side for axis in patch) for patch in (one, other)]
    near = all(a - b == p - q for a, b, p, q in zip(*places, one, other))
    return near and all(a // window == b // window for a, b in zip(*places))


PATCHES = [(row, column) for row in range(16) for column in range(16)]


@pytest.mark.parametrize("name", ["swin", "torchvision-swin"])
def test_pairs_reach_and_parts_by_loops(name):
    plain = {(a, b) for a in PATCHES for b in PATCHES if meets(a, b, shift=0, side=16)}
    shifted = {(a, b) for a in PATCHES for b in PATCHES if meets(a, b, shift=2, side=16)}
    through = {patch: set() for patch in PATCHES}
    for first, middle in shifted:
        through[first] |= {last for start, last in plain if start == middle}
    first, second, third, fourth = layers = window_layers(shared_model(name), images())
    assert (
        values_of(layers[:2], "shift") == values_of(layers[2:], "windows.shift") == [(0, 0), (2, 2)]
    )
    assert (first.pairs, first.new, first.padding) == (len(plain), None, 0) == (256 * 16, None, 0)
    assert (second.pairs, second.new) == (len(shifted), len(shifted - plain))
    assert third.new is None  # the first layer after merging
    assert fourth.new > 0
    assert len(first.part.unique()) == 16
    # 3x3 whole windows, and 16 parts of those that the map's end cuts
    assert len(second.part.unique()) == 25
    assert first.reach == third.reach == 16.0
    every = torch.arange(0, 256, 4)
    assert second.reach == pytest.approx(
        sum(len(through[PATCHES[int(i)]]) for i in every) / len(every)
    )
    reach = reachable_patches([first, second], torch.tensor([5 * 16 + 6]))[0]
    assert {PATCHES[int(index)] for index in reach.nonzero()} == through[5, 6]


def test_without_shift_nothing_new_is_connected():
    layers = window_layers(our_swin(shift=False), images())
    assert values_of(layers, "new") == [None, 0, None, 0]
    assert values_of(layers, "reach") == [16.0] * 4


def test_padding_is_no_patch_and_one_window_is_not_shifted():
    (first, second, *_) = window_layers(our_swin(size=(18, 24)), images((18, 24)))  # maps of 9 x 12
    assert first.padding == second.padding == 12 * 12 - 9 * 12
    # two rows of whole windows; one row of patches is left
    assert first.pairs == 16 * 16 * 6 + 4 * 4 * 3
    assert (first.part.shape, second.shift) == ((9, 12), (2, 2))
    # maps of 4 x 8 in windows of 4 x 4
    layers = window_layers(torchvision_swin((8, 16)), images((8, 16)))[:2]
    assert values_of(layers, "shift") == [(0, 0), (0, 2)]
    with pytest.raises(UnsupportedError, match="try swin-micro"):
        window_layers(ours(), images((32, 48)))


def test_nothing_passes_through_padding():
    """torchvision's patches attend to padding, which is no patch and depends on none."""
    layers = window_layers(torchvision_swin((18, 34)), images((18, 34)))[:2]  # maps of 9 x 17
    edges = [set(), set()]
    for met, layer in zip(edges, layers):
        assert layer.padding > 0
        real = layer.places >= 0
        for window, query, key in (
            (layer.allowed & real[:, :, None] & real[:, None]).nonzero().tolist()
        ):
            met.add((int(layer.places[window, query]), int(layer.places[window, key])))
    for patch in (0, 76, 152):
        middles = {end for start, end in edges[1] if start == patch}
        expected = {end for start, end in edges[0] if start in middles}
        assert (
            set(reachable_patches(layers, torch.tensor([patch]))[0].nonzero().flatten().tolist())
            == expected
        )


def test_attention_moved_by_its_total_variation_and_only_from_the_changed_block_on():
    """In more images than are held at once; windows are averaged over."""
    vit = vitlens.load("vit-digits")
    digits = vitlens.load_data("digits", limit=17)
    other = copy.deepcopy(vit)
    swins = (torchvision_swin(), torchvision_swin())
    other.module.blocks[3].mlp.fc1.weight.data.mul_(1.5)
    for parameter in swins[1].module.parameters():
        parameter.data.mul_(1.5)
    same, moved = attention_moved(vit, [vit, other], digits)
    for layer in same:
        assert not layer.any()
    assert [bool(layer.any()) for layer in moved] == [False] * 4 + [
        True
    ] * 2  # its MLP is read by the next block
    (in_windows,) = attention_moved(swins[0], [swins[1]], digits)
    for changes, models in ((moved, (vit, other)), (in_windows, swins)):
        for layer, (one, two) in enumerate(
            zip(*(vitlens.attention(model, digits) for model in models))
        ):
            variation = (one - two).clamp_min(0).sum(-1).mean(-1)  # (images x windows, heads)
            expected = variation.view(17, -1, variation.shape[1]).mean(1)
            torch.testing.assert_close(changes[layer], expected, atol=1e-6, rtol=1e-4)
    with pytest.raises(InputError, match="of one architecture at one image size"):
        attention_moved(vit, [ours(size=(32, 32), depth=6)], digits)


def pairs(
    similarity: Tensor, patch: tuple[int, int], keep: Callable[[int, int], bool]
) -> list[tuple[float, float]]:
    """Return the similarities of pairs of 3 x 4 patches with minus their distances in pixels."""
    values = []
    for i in range(12):
        for j in range(i):
            down = i // 4 - j // 4
            right = i % 4 - j % 4
            if keep(down, right):
                values.append(
                    (
                        float(similarity[i, j]),
                        -(((down * patch[0]) ** 2 + (right * patch[1]) ** 2) ** 0.5),
                    )
                )
    return list(zip(*values))


@pytest.mark.parametrize("patch", [(4, 4), (4, 8)])
def test_the_order_of_positions_is_spearmans_and_pearsons_over_pairs(patch):
    layout = ours(
        size=(3 * patch[0], 4 * patch[1]), patch_size=patch, pooling="mean", depth=1
    ).layout
    vectors = F.normalize(torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    similarity = vectors @ vectors.T
    conditions = (lambda *_: True, lambda down, _: down == 0, lambda _, right: right == 0)
    by_hand = [pairs(similarity, patch, keep) for keep in conditions]
    assert rank_correlation(similarity, layout) == pytest.approx(
        [stats.spearmanr(*values).statistic for values in by_hand]
    )
    assert distance_correlation(similarity, layout) == pytest.approx(
        -stats.pearsonr(*by_hand[0]).statistic, abs=1e-6
    )
    x = torch.arange(12) % 4
    only_columns = torch.exp(-((x[:, None] - x) ** 2).float())  # all patches of one column alike
    assert rank_correlation(only_columns, layout)[1:] == (pytest.approx(1.0), None)
    assert (
        *rank_correlation(torch.ones(12, 12), layout),
        distance_correlation(torch.ones(12, 12), layout),
    ) == (None,) * 4
    two = ours(size=(4, 8), patch_size=(4, 4), pooling="mean", depth=1).layout
    assert (*rank_correlation(torch.eye(2), two), distance_correlation(torch.eye(2), two)) == (
        None,
    ) * 4


def cosine(embeddings: Tensor) -> Tensor:
    return F.cosine_similarity(embeddings[:, None], embeddings, dim=-1)


def test_similarity_is_the_cosine_of_the_patches_embeddings():
    """With and without a prefix; None without positions of this grid: those learned on another are
    not sliced.
    """
    for model in (ours(), ours(registers=2), ours(pooling="mean"), torchvision_vit()):
        learned = getattr(model.module, "pos_embed", None)
        learned = model.module.encoder.pos_embedding if learned is None else learned
        expected = cosine(learned[0, -model.layout.patches :])
        torch.testing.assert_close(position_similarity(model), expected, atol=1e-5, rtol=1e-5)
    resized = (partial(model_of, ours().module, size=size) for size in ((16, 48), (64, 48)))
    for make in (partial(ours, positions=False), torchvision_swin, *resized):
        assert position_similarity(make()) is None


@pytest.mark.parametrize("kind", ["sine", "sine-2d"])
def test_fixed_positions_are_read_at_every_size(kind):
    model = ours(positions=kind, size=(32, 32), patch_size=(4, 4), dim=64, pooling="mean")
    large = model_of(model.module, size=(64, 48))
    grey = torch.zeros(1, 3, 64, 48)
    with torch.no_grad():
        patches = vitlens.capture(large, grey, "patches")["patches"][0]
        plain = large.module.patch_embed.proj(large.prepare(grey))[0].flatten(1).T
    torch.testing.assert_close(
        position_similarity(large), cosine(patches - plain), atol=1e-4, rtol=0
    )
