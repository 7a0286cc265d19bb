"""Activation patching: every number is that of a full forward with the part put in."""

from functools import partial

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.lens import heads_by_layer
from tests.kit.tiny import images, ours, shared_model, timm_model
from vitlens import Model
from vitlens.analysis.patching.patching import CORRUPTIONS, Patching, corrupt, patch_parts
from vitlens.errors import InputError, UnknownNameError

MADE = {
    "siglip": partial(shared_model, "siglip"),
    "swin": partial(timm_model, "swin_tiny_patch4_window7_224", alias="swin", depths=(1, 1)),
}
TARGETS = torch.tensor([0, 1])
OTHERS = torch.tensor([2, 3])


def pair(model: Model) -> tuple[Tensor, Tensor]:
    """Return two images and two darker ones."""
    return images(model.input_size), 0.2 * images(model.input_size, seed=1)


@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_every_number_is_that_of_a_full_forward(name):
    model = MADE[name]()
    clean, corrupted = pair(model)
    patched = patch_parts(model, clean, corrupted, targets=TARGETS, others=OTHERS)

    def difference(logits: Tensor) -> Tensor:
        return logits[[0, 1], TARGETS] - logits[[0, 1], OTHERS]

    torch.testing.assert_close(patched.clean, difference(model(clean)), atol=1e-5, rtol=0)
    torch.testing.assert_close(patched.corrupted, difference(model(corrupted)), atol=1e-5, rtol=0)
    for layer, count in enumerate(heads_by_layer(model)):
        heads = [f"blocks.{layer}.head.{head}" for head in range(count)]
        numbers = *patched.heads[:, layer].T[:count], *patched.positions[:, layer, [0, 3]].T
        put = vitlens.capture(
            model, clean, [*heads, f"blocks.{layer}.tokens[0]", f"blocks.{layer}.tokens[3]"]
        )
        for place, change in zip(put, numbers, strict=True):
            with vitlens.intervene(model, {place: put[place]}):
                full = difference(model(corrupted)) - patched.corrupted
            torch.testing.assert_close(change, full, atol=1e-5, rtol=0)
    # what was compared is not all zero
    assert patched.positions.nan_to_num().abs().amax((0, 2)).min() > 1e-3
    if name == "swin":
        assert patched.heads.isnan().any((0, 2)).tolist() == [True, False]  # 2 heads, then 4
        # 16 x 16 patches, then 8 x 8
        assert (~patched.positions.isnan()).all(0).sum(1).tolist() == [
            256,
            64,
        ]


@torch.no_grad()
def test_by_default_the_two_predictions_are_compared():
    model = ours(classes=20)
    clean = images((32, 48))
    model.module.head.bias.zero_()
    black = torch.zeros_like(clean)
    patched = patch_parts(model, clean, black)
    assert torch.equal(patched.targets, model(clean).argmax(-1))
    assert torch.equal(patched.others, model(black).argmax(-1))
    assert (patched.clean > 0).all()
    assert (patched.corrupted < 0).all()


def test_the_share_of_several_pairs():
    heads = torch.tensor([[[1.0, 0.0]], [[-1.0, 1.0]]])
    ends = (torch.tensor([2.0, -1.0]), torch.tensor([0.0, 1.0]))
    classes = torch.tensor([0, 0]), torch.tensor([1, 1])
    several = Patching(heads, 2 * heads, *ends, *classes)
    # half of either gap; none, and half the wrong way
    assert several.restored("heads").tolist() == [[0.5, -0.25]]
    assert several.restored("positions").tolist() == [[1.0, -0.5]]
    one = Patching(*(values[:1] for values in vars(several).values()))
    assert one.restored("heads").tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"others": TARGETS}, r"\(a - a\) in both runs of pair 0"),
        ({"targets": torch.tensor([0, 9])}, "found 9"),
        ({"corrupted": images((32, 48), batch=1)}, "found 1 and 2"),
        ({"corrupted": images((48, 48))}, ".32, 48. and .48, 48. px"),
        ({"corrupted": images((32, 48))}, "in both runs of pair 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes, message):
    model = ours()
    clean, corrupted = pair(model)
    with pytest.raises(InputError, match=message):
        patch_parts(
            model,
            clean,
            **{"corrupted": corrupted, "targets": TARGETS, "others": OTHERS, **changes},
        )


@pytest.mark.parametrize("how", CORRUPTIONS)
@pytest.mark.parametrize("size", [(32, 32), (24, 40), (7, 5), (1, 1)])
def test_a_corruption_hangs_on_the_seed_and_the_place_in_the_batch_alone(how, size):
    batch = images(size, batch=3)
    before = batch.clone()
    result = corrupt(batch, how, seed=5)
    assert (result.shape, result.min() >= 0, result.max() <= 1) == (batch.shape, True, True)
    assert torch.equal(batch, before)
    assert torch.equal(result, corrupt(batch, how, seed=5))
    assert torch.equal(result[:1], corrupt(batch[:1], how, seed=5))
    if how == "shuffle" and size == (7, 5):  # sides without a common divisor
        assert not torch.equal(result, batch)
    if size == (32, 32):
        assert not torch.allclose(result, batch, atol=0.1)
        assert torch.equal(result, corrupt(batch, how, seed=6)) == (how == "blur")


def test_what_each_corruption_keeps():
    batch = images((32, 32))
    blurred = corrupt(batch, "blur")
    assert (blurred.std((2, 3)) < 0.2 * batch.std((2, 3))).all()
    torch.testing.assert_close(blurred.mean((2, 3)), batch.mean((2, 3)), atol=0.05, rtol=0)
    grey = torch.full((1, 3, 64, 64), 0.5)
    assert 0.3 < corrupt(grey, "noise").std() < 0.5  # 0.5, cut off at black and white
    # tiles are moved whole
    ramp = torch.arange(64.0).view(1, 8, 8).expand(3, 8, 8).unsqueeze(0) / 64

    def tiles_of(picture):
        tiles = picture[0, 0].unfold(0, 2, 2).unfold(1, 2, 2).flatten(0, 1)
        return [tuple(tile.flatten().tolist()) for tile in tiles]

    tiles = tiles_of(ramp)
    moved = tiles_of(corrupt(ramp, "shuffle"))
    assert sorted(tiles) == sorted(moved) != moved
    with pytest.raises(UnknownNameError, match="did you mean 'blur'"):
        corrupt(images(), "blurr")
