"""Activation patching: every number is that of a full forward with the part put in, and the identities hold."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.lens.tiny import FAMILIES, images, model_of, ours, shared_model, timm_model
from vitlens.analysis.patching.patching import CORRUPTIONS, Patching, corrupt, patch_parts
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.capture import capture
from vitlens.lens.intervene import intervene
from vitlens.lens.trace import layers
from vitlens.models.model import Model
from vitlens.models.resnet import build_resnet

small_swin = partial(timm_model, "swin_tiny_patch4_window7_224", alias="swin", depths=(1, 1))
MADE = {**{name: partial(shared_model, name) for name in FAMILIES}, "swin": small_swin}

TARGETS, OTHERS = torch.tensor([0, 1]), torch.tensor([2, 3])


def pair(model: Model) -> tuple[Tensor, Tensor]:
    """Two images and two others, darker."""
    return images(model.input_size), 0.2 * images(model.input_size, seed=1)


def difference(logits: Tensor) -> Tensor:
    which = torch.arange(2)
    return logits[which, TARGETS] - logits[which, OTHERS]


@pytest.mark.parametrize("name", ["ours", "siglip", "swin"])
@torch.no_grad()
def test_every_number_is_that_of_a_full_forward(name):
    model = MADE[name]()
    clean, corrupted = pair(model)
    found = patch_parts(model, clean, corrupted, targets=TARGETS, others=OTHERS)
    for layer in layers(model):
        heads = [f"blocks.{layer.index}.head.{head}" for head in range(layer.heads)]
        tokens = [f"blocks.{layer.index}.tokens[{at}]" for at in (0, 3)]
        numbers = *found.heads[:, layer.index].T[: layer.heads], *found.positions[:, layer.index, [0, 3]].T
        put = capture(model, clean, [*heads, *tokens])
        for place, change in zip(put, numbers, strict=True):
            with intervene(model, {place: put[place]}):
                full = difference(model(corrupted)) - found.corrupted
            torch.testing.assert_close(change, full, atol=1e-5, rtol=0)
    assert found.positions.nan_to_num().abs().amax((0, 2)).min() > 1e-3  # what was compared is not all zero
    if name == "swin":
        assert found.heads.isnan().any((0, 2)).tolist() == [True, False]  # 2 heads, then 4
        assert (~found.positions.isnan()).all(0).sum(1).tolist() == [256, 64]  # 16 x 16 patches, then 8 x 8


def test_by_default_the_two_predictions_are_compared():
    model = ours()
    clean, corrupted = pair(model)
    with torch.no_grad():
        ends = [model.module.forward_features(model.prepare(batch))[:, 0].mean(0) for batch in (clean, corrupted)]
        head = model.module.head
        head.weight[3], head.weight[1] = 100 * (ends[0] - ends[1]), 100 * (ends[1] - ends[0])
        head.bias[:] = -(head.weight @ (ends[0] + ends[1])) / 2
        own, other = model(clean).argmax(-1), model(corrupted).argmax(-1)
    assert [own.tolist(), other.tolist()] == [[3, 3], [1, 1]]
    found = patch_parts(model, clean, corrupted)
    assert torch.equal(found.targets, own)
    assert torch.equal(found.others, other)
    assert (found.clean > 0).all()
    assert (found.corrupted < 0).all()


def test_the_share_of_several_pairs():
    heads, ends = torch.tensor([[[1.0, 0.0]], [[-1.0, 1.0]]]), (torch.tensor([2.0, -1.0]), torch.tensor([0.0, 1.0]))
    classes = torch.tensor([0, 0]), torch.tensor([1, 1])
    made = Patching(heads, torch.zeros(2, 1, 2), *ends, *classes)
    assert made.restored("heads").tolist() == [[0.5, -0.25]]  # half of either gap; none, and half the wrong way
    one = Patching(*(each[:1] for each in vars(made).values()))
    assert one.restored("heads").tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"others": TARGETS},
            InputError,
            r"same logit difference \(a - a\) in both runs of pair 0; choose other images",
        ),
        ({"targets": torch.tensor([0, 9])}, InputError, "expected target classes from 0 to 4, found 9"),
        ({"corrupted": images((32, 48), batch=1)}, InputError, "as many images, found 1 and 2"),
        ({"corrupted": images((48, 48))}, InputError, "images of one size, found .32, 48. and .48, 48. px"),
        ({"corrupted": images((32, 48))}, InputError, "expected clean and corrupted runs that differ"),
        ({"model": model_of(build_resnet("resnet20", classes=5, image_size=(32, 48)))}, UnsupportedError, "softmax"),
    ],
)
def test_wrong_calls(change, error, message):
    model = change.pop("model", ours())
    clean, corrupted = pair(model)
    with pytest.raises(error, match=message):
        patch_parts(model, clean, **{"corrupted": corrupted, "targets": TARGETS, "others": OTHERS, **change})


@pytest.mark.parametrize("how", CORRUPTIONS)
@pytest.mark.parametrize("size", [(32, 32), (24, 40), (7, 5), (1, 1)])
def test_corrupted_images(how, size):
    batch = images(size, batch=3)
    before = batch.clone()
    found = corrupt(batch, how, seed=5)
    assert (found.shape, found.min() >= 0, found.max() <= 1) == (batch.shape, True, True)
    assert torch.equal(batch, before)
    assert torch.equal(found, corrupt(batch, how, seed=5))
    assert torch.equal(found[:1], corrupt(batch[:1], how, seed=5))
    if size == (32, 32):
        assert not torch.allclose(found, batch, atol=0.1)
        assert torch.equal(found, corrupt(batch, how, seed=6)) == (how == "blur")


def test_what_each_corruption_keeps():
    batch = images((32, 32))
    blurred = corrupt(batch, "blur")
    assert (blurred.std((2, 3)) < 0.2 * batch.std((2, 3))).all()
    torch.testing.assert_close(blurred.mean((2, 3)), batch.mean((2, 3)), atol=0.05, rtol=0)
    grey = torch.full((1, 3, 64, 64), 0.5)
    assert 0.3 < corrupt(grey, "noise").std() < 0.5  # 0.5, cut off at black and white
    ramp = torch.arange(64.0).view(1, 8, 8).expand(3, 8, 8).unsqueeze(0) / 64  # tiles are moved whole
    own, moved = (
        [tuple(tile.flatten().tolist()) for tile in picture[0, 0].unfold(0, 2, 2).unfold(1, 2, 2).flatten(0, 1)]
        for picture in (ramp, corrupt(ramp, "shuffle"))
    )
    assert sorted(own) == sorted(moved) != moved
    with pytest.raises(UnknownNameError, match="no corruption 'blurr'; did you mean 'blur'"):
        corrupt(images(), "blurr")
